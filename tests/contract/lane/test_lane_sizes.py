"""A message of another size than the tensor that receives it: the receiver hears of it, and the world goes on.

gloo ends the process there: one member's mistake would be another's crash.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from kits.contract.waykit import RECEIVES, SENDS, readers, world

import multiworld as mw

KB, MB = 1 << 10, 1 << 20
SIZES = [(4, 8), (8, 4), (0, 4), (4, 0), (256 * KB, 4), (256 * KB, 256 * KB + 4), (4, MB), (MB, 4), (MB, MB - 4),
         (MB, 2 * MB), (6 * MB, 4), (6 * MB, 6 * MB + 4)]  # fmt: skip


def mismatched(me, size, memory):
    """Each message of a wrong size is followed by one that fits."""
    with world(me, size, memory=memory) as w:
        me.emit("readers", readers=readers(w))
        wrong = []
        for number, (sent, expected) in enumerate(SIZES):
            for receive, way in RECEIVES.items():
                if me.rank == 0:
                    # Sends of any kind, but those that wait until the message is taken.
                    works = [w.isend(torch.full((sent,), 3, dtype=torch.uint8), 1)]
                    works.append(w.isend(torch.tensor([float(number)]), 1))
                    for each in works:
                        each.wait()
                    continue
                room = torch.full((expected,), 9, dtype=torch.uint8)
                try:
                    way(w, room, 0)
                except mw.SizeMismatchError as error:
                    seen = error.sent, error.expected, error.sender, error.world
                    said = f"sent {sent} bytes, and the tensor to receive has {expected}." in str(error)
                    if seen != (sent, expected, 0, "w") or not said:
                        wrong.append((receive, sent, expected, seen, str(error)))
                else:
                    wrong.append((receive, sent, expected, "nothing raised"))
                if not (room == 9).all():
                    wrong.append((receive, sent, expected, "written to"))
                then = torch.zeros(1)
                way(w, then, 0)
                if then.item() != number:
                    wrong.append((receive, sent, expected, then.item()))
        assert w.state.name == "ACTIVE"
        w.barrier()  # else the first to close would break the other's
        me.emit("wrong", wrong=wrong)


@pytest.mark.parametrize("memory", [True, False])
def test_the_receiver_hears_of_a_wrong_size_and_the_world_goes_on(cast, memory):
    members = cast.all(mismatched, 2, memory=memory)
    if not memory:
        assert [each.expect("readers").readers for each in members] == [[], []]
    assert members[1].expect("wrong").wrong == []
    assert [each.finish() for each in members] == [0, 0]


def senders(me, size):
    """However it was sent, and however late the receive comes, the sender's call returns."""
    with world(me, size) as w:
        for way in SENDS.values():
            for nbytes in (4, MB):
                if me.rank == 0:
                    way(w, torch.ones(nbytes, dtype=torch.uint8), 1)
                else:
                    with pytest.raises(mw.SizeMismatchError):
                        w.recv(torch.ones(3, dtype=torch.uint8), 0)
        if me.rank == 0:
            w.send(torch.ones(3), 1)
        else:
            work = w.irecv(torch.ones(2), 0)
            for _ in range(2):  # a work says it as often as it is asked
                with pytest.raises(mw.SizeMismatchError):
                    work.wait()
            assert work.is_completed()
            assert isinstance(work.exception(), mw.SizeMismatchError)
        assert w.state.name == "ACTIVE"
        w.barrier()  # else the first to close would break the other's


def test_the_sender_goes_on(cast):
    assert [each.finish() for each in cast.all(senders, 2)] == [0, 0]


def others(me, size):
    """Two members' mistakes are not the third's; and its messages pass theirs."""
    with world(me, size) as w:
        if me.rank:
            w.send(torch.ones(5 if me.rank == 1 else 3), 0)
            w.send(torch.full((1,), float(me.rank)), 0, tag=2)
        else:
            seen = []
            for _ in range(2):
                room = torch.zeros(3)
                try:
                    seen.append((w.recv(room), None))
                except mw.SizeMismatchError as error:
                    seen.append((error.sender, error.sent))
            assert sorted(seen) == [(1, 20), (2, None)]
            last = torch.zeros(1)
            assert sorted(w.recv(last, tag=2) for _ in range(2)) == [1, 2]
        w.barrier()


def test_a_mismatch_from_any_source_names_its_sender(cast):
    assert [each.finish() for each in cast.all(others, 3)] == [0, 0, 0]


def mismatched_before_it_is_posted(me, size):
    with world(me, size) as w:
        if me.rank == 0:
            w.send(torch.ones(2), 1)
            w.send(torch.ones(1), 1, tag=1)
            room = torch.zeros(1)
            w.recv(room, 1)
            me.emit("got", value=room.item())
        else:
            w.recv(torch.zeros(1), 0, tag=1)  # reads the other message on the way
            with w:
                batch = [
                    dist.P2POp(dist.irecv, torch.zeros(3), 0),
                    dist.P2POp(dist.isend, torch.full((1,), 5.0), 0),
                ]
                works = dist.batch_isend_irecv(batch)
                with pytest.raises(mw.SizeMismatchError):
                    works[0].wait()
                works[1].wait()
        w.barrier()


def test_a_batch_is_posted_whole_though_a_message_of_it_has_a_wrong_size(cast):
    members = cast.all(mismatched_before_it_is_posted, 2)
    assert members[0].expect("got").value == 5
    assert [each.finish() for each in members] == [0, 0]
