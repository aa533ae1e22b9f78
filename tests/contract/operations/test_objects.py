"""What object methods unpickle, and in which order they run where several are under way at once."""

from __future__ import annotations

import asyncio
import io
import pickle
import tarfile
import threading
import zipfile
from pathlib import Path

import pytest
import torch
from kits.contract.programkit import alone, runs
from kits.contract.waykit import without_lane, world
from kits.meetkit import until

import multiworld as mw
from multiworld import aio, objects


class Trap:
    """Unpickled freely, it makes a file: what a member that is not trusted would send."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (Path.touch, (Path(self.path),))


def _calls(face, me, size, sent):
    """Each object method that unpickles: rank 0 gives `sent`, rank 1 takes it. Values are ``(name, call)``."""
    mine = me.rank == 0

    def received(**how):
        if mine:
            return face.send_object_list([sent], 1)
        return face.recv_object_list([None], 0, **how)

    def broadcast(**how):
        return face.broadcast_object_list([sent] if mine else [None], 0, **how)

    def gathered_by_all(**how):
        return face.all_gather_object([None] * size, sent if mine else "plain", **how)

    def gathered(**how):
        return face.gather_object(sent if mine else "plain", None if mine else [None] * size, 1, **how)

    def scattered(**how):
        return face.scatter_object_list([None], ["plain", sent] if mine else None, 0, **how)

    return [
        ("recv_object_list", received),
        ("broadcast_object_list", broadcast),
        ("all_gather_object", gathered_by_all),
        ("gather_object", gathered),
        ("scatter_object_list", scattered),
    ]


def unpickling(me, size, folder, awaited):
    w = mw.join("w1", me.rank, size, store=me.store, timeout=60)
    trap = Path(folder) / "sprung"

    def run(call, **how):
        if not awaited:
            return call(**how)

        async def main():
            return await call(**how)

        return asyncio.run(main())

    for name, call in _calls(w.aio if awaited else w, me, size, Trap(str(trap))):
        for how in ({}, {"weights_only": True}):
            if me.rank == 0:
                run(call, **how)
            else:
                with pytest.raises(pickle.UnpicklingError, match="from rank 0"):
                    run(call, **how)
                assert not trap.exists(), f"{name}({how}) ran what rank 0 sent"
            w.barrier()
        run(call, weights_only=False)  # the trap is one
        if me.rank == 1:
            assert trap.exists(), f"{name}(weights_only=False) refused"
            trap.unlink()
        w.barrier()
    w.close()


@pytest.mark.parametrize("awaited", [False, True], ids=["blocking", "aio"])
def test_nothing_that_a_member_sends_is_run(cast, tmp_path, awaited):
    runs(cast, unpickling, 2, folder=str(tmp_path), awaited=awaited)


def scattering_beside_messages(me, size):
    w = mw.join("w1", me.rank, size, store=me.store, timeout=60)
    got, objects_ = [None], [0, {"of": "rank 1"}, "long " * 1000]
    if me.rank == 0:
        w.send(torch.arange(3.0), 1)
        w.scatter_object_list(got, objects_)
        w.send(torch.arange(3.0) + 1, 1)
    else:
        w.scatter_object_list(got, None)
        for number in range(2 if me.rank == 1 else 0):
            w.recv(tensor := torch.zeros(3), 0)
            assert torch.equal(tensor, torch.arange(3.0) + number)
    assert got == [objects_[me.rank]]
    w.barrier()
    w.close()


def test_scattered_objects_are_no_messages(cast):
    runs(cast, scattering_beside_messages, 3)


# -- what torch.load would take besides archives of torch.save ------------------------------------------------------


def as_tensor(data):
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def old_tar():
    """Of torch before 0.1.10: torch 2.4 and 2.5 unpack its members to where their names lead."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name in ("sys_info", "pickle", "tensors", "storages"):
            data = pickle.dumps(0, protocol=2)
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
    return out.getvalue()


def old_pickle():
    out = io.BytesIO()
    torch.save(1, out, _use_new_zipfile_serialization=False)
    return out.getvalue()


def torchscript():
    """An archive of TorchScript, which torch 2.4 and 2.5 load, code and all, whatever `weights_only` says."""
    out = io.BytesIO()
    torch.save({"a": 1}, out)
    with zipfile.ZipFile(out, "a") as archive:
        archive.writestr("archive/constants.pkl", pickle.dumps((), protocol=2))
    return out.getvalue()


@pytest.mark.parametrize("made", [old_tar, old_pickle, torchscript])
def test_other_formats_are_not_read_unless_everybody_is_trusted(made):
    with pytest.raises(pickle.UnpicklingError, match=r"rank 3 sent .*weights_only=False"):
        objects._decode(as_tensor(made()), 3, True)


def test_names_in_the_data_are_data():
    mine = {"constants.pkl": b"PK\x03\x04"}
    assert objects._decode(as_tensor(objects._encode({"x": str(mine)})), 0, True) == {"x": str(mine)}


# -- the lane ---------------------------------------------------------------------------------------------------------


def together(me, size):
    """Each takes several steps; two at once would take each other's."""
    w = mw.join("w1", me.rank, size, store=me.store, timeout=60)
    rounds = 20

    async def main():
        got = [[None] * size for _ in range(rounds)]
        lists = [[("list", n)] if me.rank == 0 else [None] for n in range(rounds)]
        await asyncio.gather(
            *(
                step
                for n in range(rounds)
                for step in (
                    # Of different lengths, so that a mix-up is a wrong object, and not only another's.
                    w.aio.all_gather_object(got[n], (me.rank, n, "x" * (997 * n % 5000))),
                    w.aio.broadcast_object_list(lists[n], 0),
                )
            )
        )
        for n in range(rounds):
            assert got[n] == [(rank, n, "x" * (997 * n % 5000)) for rank in range(size)]
            assert lists[n] == [("list", n)]

    asyncio.run(main())
    w.close()


def test_several_at_once_run_one_after_the_other(cast):
    runs(cast, together, 2)


def in_order(me, size):
    del size
    w = alone(me)
    seen = []
    real = objects.OneGeneration.all_gather_object

    def slow(self, object_list, obj, **how):
        seen.append(("begins", obj))
        asyncio.run(asyncio.sleep(0.01))  # the others could begin meanwhile
        real(self, object_list, obj, **how)
        seen.append(("ends", obj))

    objects.OneGeneration.all_gather_object = slow

    async def main():
        tasks = [asyncio.create_task(w.aio.all_gather_object([None], n)) for n in range(6)]
        await asyncio.sleep(0)  # they stand in line
        tasks[1].cancel()  # it goes on in its turn
        await asyncio.gather(*tasks, return_exceptions=True)
        assert [each.cancelled() for each in tasks] == [n == 1 for n in range(6)]

    asyncio.run(main())
    assert seen == [(what, n) for n in range(6) for what in ("begins", "ends")]
    w.close()


def test_each_begins_when_the_one_before_it_has_ended(cast):
    runs(cast, in_order, size=1)


def beside_tensors(me, size, lane):
    """Object operations and tensors' at once: each gets its own, in the order of the calls."""
    if not lane:
        without_lane()
    rounds, other = 30, 1 - me.rank

    async def main(w):
        calls, checks = [], []
        for n in range(rounds):
            objects_, total, parts = (
                [None] * size,
                torch.tensor([me.rank + n]),
                [torch.zeros(1) for _ in range(size)],
            )
            lists, tensors = [[None], [None]], [torch.zeros(2), torch.zeros(1), torch.zeros(2)]
            source = None if n % 3 == 0 else other
            calls += [
                w.aio.all_gather_object(objects_, (me.rank, n, "x" * (997 * n % 5000))),
                w.aio.all_reduce(total),
                w.aio.all_gather(parts, torch.tensor([float(me.rank)])),
                w.aio.send_object_list([("list", n)], other),
                w.aio.send(torch.full((2,), float(n)), other),
                w.aio.isend(torch.full((1,), float(n)), other),
                w.aio.send_object_list([{"of": me.rank}], other),
                w.aio.send(torch.full((2,), float(-n)), other),
                w.aio.recv_object_list(lists[0], source),
                w.aio.recv(tensors[0], source),
                w.aio.irecv(tensors[1], source),
                w.aio.recv_object_list(lists[1], source),
                w.aio.recv(tensors[2], other),
            ]

            def check(n=n, objects_=objects_, total=total, parts=parts, lists=lists, tensors=tensors):
                assert objects_ == [(rank, n, "x" * (997 * n % 5000)) for rank in range(size)]
                assert total.item() == 1 + 2 * n
                assert [each.item() for each in parts] == [0.0, 1.0]
                assert lists == [[("list", n)], [{"of": other}]]
                assert [each.tolist() for each in tensors] == [[n] * 2, [n], [-n] * 2]

            checks.append(check)
        for each in await asyncio.gather(*calls):
            if isinstance(each, aio.AioWork):
                await each
        for check in checks:
            check()
        assert not w.aio._turns.taken

    with world(me, size) as w:
        asyncio.run(main(w))


@pytest.mark.parametrize("lane", [True, False], ids=["lane", "no lane"])
def test_no_tensor_comes_between_the_steps_of_an_object_operation(cast, lane):
    runs(cast, beside_tensors, 2, lane=lane)


def goes_on(me, size):
    """Begun in a loop that has ended, an operation still has its turn; so has a tensor's that stood behind it."""
    with world(me, size) as w:
        first, second, total = [None] * size, [None] * size, torch.tensor([me.rank + 1])
        later = torch.tensor([10 * (me.rank + 1)])
        if me.rank == 1:
            w.recv(torch.zeros(1), 0)
            w.all_gather_object(first, "short")
            w.all_reduce(total)
            w.all_gather_object(second, ["of", 1, "long" * 100])
            w.all_reduce(later)
        else:

            async def cut_short():
                tasks = [
                    asyncio.create_task(w.aio.all_gather_object(first, "first")),
                    asyncio.create_task(w.aio.all_reduce(total)),
                ]
                await asyncio.wait(tasks, timeout=0.05)
                assert not any(each.done() for each in tasks)

            async def main():
                await w.aio.send(torch.zeros(1), 1)
                await w.aio.all_gather_object(second, {"second": 0})
                await w.aio.all_reduce(later)

            asyncio.run(cut_short())
            asyncio.run(main())
        assert first == ["first", "short"]
        assert second == [{"second": 0}, ["of", 1, "long" * 100]]
        assert (total.item(), later.item()) == (3, 30)


def test_a_turn_outlives_its_loop(cast):
    runs(cast, goes_on, 2)


def cancelled_before(me, size):
    """Rank 0 cancels the collective in the middle before its turn; rank 1, which blocks, takes part in all three."""
    with world(me, size) as w:
        got = [[None] * size for _ in range(3)]
        if me.rank == 1:
            w.recv(torch.zeros(1), 0)
            for n, each in enumerate(got):
                w.all_gather_object(each, (n, 1))
        else:

            async def main():
                tasks = [asyncio.create_task(w.aio.all_gather_object(got[n], (n, 0))) for n in range(2)]
                await asyncio.sleep(0)
                tasks[1].cancel()
                await asyncio.wait(tasks[1:])
                await w.aio.send(torch.zeros(1), 1)
                await w.aio.all_gather_object(got[2], (2, 0))
                assert [each.cancelled() for each in tasks] == [False, True]

            asyncio.run(main())
        assert got == [[(n, 0), (n, 1)] for n in range(3)]


def test_one_that_is_cancelled_before_its_turn_goes_on(cast):
    runs(cast, cancelled_before, 2)


def unhindered(me, size):
    """What cannot be taken for a list that is awaited goes on, although it was called later."""
    with world(me, size) as w:
        if me.rank == 1:
            got = [None]
            w.recv(torch.zeros(1), 0)
            w.recv_object_list(got, 0)
            assert got == ["there"]
            w.all_reduce(torch.zeros(1))
            w.send(torch.ones(1), 0, tag=1)
            w.send_object_list(["back"], 0)
            return

        async def main():
            back = [None]
            listed = asyncio.create_task(w.aio.recv_object_list(back, 1))
            await asyncio.sleep(0)
            await w.aio.send(torch.zeros(1), 1)
            await w.aio.send_object_list(["there"], 1)
            await w.aio.all_reduce(torch.zeros(1))
            await w.aio.recv(torch.zeros(1), 1, tag=1)
            behind = asyncio.create_task(w.aio.recv(torch.zeros(1), 1))
            await asyncio.sleep(0)
            behind.cancel()
            await listed
            assert back == ["back"]

        asyncio.run(main())


def test_nothing_waits_for_a_list_that_it_does_not_meet(cast):
    runs(cast, unhindered, 2)


def taken_back(me, size):
    with world(me, size) as w:
        if me.rank == 0:
            w.recv(torch.zeros(1), 1)
            w.send_object_list(["first", 1], 1)
            lost = [objects._encode("lost")]
            w.send(objects._sizes(lost, w.device), 1)
            w.recv(torch.zeros(1), 1)
            w.send(objects._joined(lost, w.device), 1)
            w.send_object_list(["second"], 1)
            return
        begun = threading.Event()

        class Watched(objects.ComingList):
            def room(self):  # in a waiter's thread
                begun.set()
                return super().room()

        async def main():
            early = asyncio.create_task(w.aio.recv_object_list(["untouched"] * 2, 0))
            await asyncio.sleep(0.01)  # nothing is sent before the message below
            early.cancel()
            await asyncio.wait([early])
            await w.aio.send(torch.zeros(1), 0)
            got = [None, None]
            assert await w.aio.recv_object_list(got, 0) == 0
            assert got == ["first", 1]
            aio.ComingList = Watched
            late = asyncio.create_task(w.aio.recv_object_list([None], 0))
            await asyncio.to_thread(begun.wait)
            late.cancel()
            await asyncio.wait([late])
            assert early.cancelled()
            assert late.cancelled()

        asyncio.run(main())
        until(lambda: any(each.kind == "recv" and 1 in each.waiting for each in w.pending()))
        w.send(torch.zeros(1), 0)
        got = [None]
        w.recv_object_list(got, 0)
        assert got == ["second"], "the rest of the list before came with no loop"


def test_a_cancelled_receive_of_a_list_takes_none_that_comes_later(cast):
    runs(cast, taken_back, 2)


def of_two_threads(me, size):
    """Each of rank 0's threads sends lists to rank 1, and each of rank 1's receives from any."""
    rounds, got = 100, []
    with world(me, size) as w:

        def send(n):
            for turn in range(rounds):
                w.send_object_list([(n, turn, "x" * (50 * n + turn % 40))], 1)

        def receive(_n):
            for _ in range(rounds):
                w.recv_object_list(found := [None])
                got.append(found[0][:2])

        threads = [threading.Thread(target=receive if me.rank else send, args=(n,)) for n in range(2)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        if me.rank == 1:
            assert sorted(got) == [(n, turn) for n in range(2) for turn in range(rounds)]


def test_the_lists_of_two_threads_do_not_mix(cast):
    runs(cast, of_two_threads, 2)
