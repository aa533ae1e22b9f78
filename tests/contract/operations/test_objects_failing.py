"""Operations of objects that fail in one member alone between their steps, as for want of memory."""

from __future__ import annotations

import asyncio

import pytest
import torch
from kits.contract.programkit import runs
from kits.contract.waykit import world

import multiworld as mw
from multiworld import objects
from multiworld._c10d.elastic import resharding


def fails_once(name, module=objects):
    """The next call of this function raises."""
    real = getattr(module, name)

    def fail(*_):
        setattr(module, name, real)
        raise MemoryError("no memory")

    setattr(module, name, fail)


def calls(face, me):
    """Of each operation, and of the receiver of a list: the call, and where it fails."""
    first = me.rank == 0
    return {
        "broadcast_object_list": lambda: face.broadcast_object_list(["x"] if first else [None], 0),
        "scatter_object_list": lambda: face.scatter_object_list([None], ["x", "y"] if first else None, 0),
        "a gather of objects": lambda: face.all_gather_object([None] * 2, "x"),
        "recv_object_list": lambda: (
            face.send_object_list(["x"], 1) if first else face.recv_object_list([None], 0)
        ),
    }


def failing(me, size, awaited):
    """Rank 1 has no memory for the data, once it has the sizes."""
    for name in calls(None, me):
        with world(me, size, name=name.replace(" ", "-")) as w:
            call = calls(w.aio if awaited else w, me)[name]

            async def main(call=call):
                await call()

            if me.rank == 1:
                fails_once("_room")
            with pytest.raises(mw.BrokenWorldException, match=f"rank 1: {name} failed with Memory") as broken:
                asyncio.run(main()) if awaited else call()
                w.barrier()  # rank 0 may have taken all steps before it hears of it
            assert (broken.value.cause, broken.value.ranks) == ("failed", (1,))
            assert (me.rank == 1) == isinstance(broken.value.__cause__, MemoryError)


@pytest.mark.parametrize("awaited", [False, True], ids=["blocking", "aio"])
def test_without_memory_for_the_data_the_world_breaks_for_all(cast, awaited):
    runs(cast, failing, 2, awaited=awaited)


def resharding_alone(me, size):
    """Rank 0 has no memory for what it is to get, and rank 1 gives it."""
    with world(me, size) as w:
        if me.rank == 0:
            fails_once("_exchange", resharding)
        with pytest.raises(mw.BrokenWorldException, match="rank 0: reshard failed with MemoryError"):
            resharding.reshard(w, {"a": torch.ones(2)} if me.rank else None, {"a": torch.zeros(2)}, 1)
            w.barrier()


def test_without_memory_for_a_shard_the_world_breaks_for_all(cast):
    runs(cast, resharding_alone, 2)


def refused(me, size):
    """Rank 0 has no memory for what it is to send."""
    with world(me, size) as w:
        got = torch.zeros(1)
        for face in ("blocking", "aio"):
            if me.rank == 1:
                w.recv(got, 0)
                assert got.item() == 7
                continue
            fails_once("_joined")
            with pytest.raises(MemoryError):
                if face == "blocking":
                    w.send_object_list(["x"], 1)
                else:
                    asyncio.run(w.aio.send_object_list(["x"], 1))
            w.send(torch.tensor([7.0]), 1)
        w.barrier()


def test_a_list_that_has_no_room_to_be_sent_is_not_sent_in_part(cast):
    runs(cast, refused, 2)
