"""Many worlds joined at once, in different orders on different members, by threads and by tasks."""

from __future__ import annotations

import asyncio
import random
import threading
import time

import pytest
import torch
from kits.contract.worldkit import PATIENCE, left_over, outcome

import multiworld as mw

SIZE, WORLDS = 3, 6


def use(w, index):
    """What is in this world is nobody else's: values carry the world's number."""
    t = torch.tensor([100 * index + w.rank])
    w.all_reduce(t)
    assert t.item() == SIZE * 100 * index + sum(range(SIZE)), (index, t)
    t = torch.tensor([index if w.rank == index % SIZE else -1])
    w.broadcast(t, index % SIZE)
    assert t.item() == index
    names = [None] * SIZE
    w.all_gather_object(names, (w.name, w.rank, w.generation))
    assert names == [(w.name, rank, w.generation) for rank in range(SIZE)]


def leave(me, cancelling):
    """Join "wx" after all, close everything, and wait until all have."""
    if cancelling:
        if "wx" in mw.worlds():
            mw.worlds()["wx"].close()
        w = mw.join("wx", me.rank, SIZE, store=me.store, timeout=30)
        use(w, 9)
        me.emit("after", generation=w.generation)
        me.hear()
    for w in mw.worlds().values():
        w.close()
    assert mw.worlds() == {}
    me.emit("closed")
    me.hear()


def many(me, seed, rounds, cancelling):
    """Each round joins all worlds at once: half of them by threads, half by tasks, drawn anew on every member."""
    dice = random.Random(seed * 10 + me.rank)  # noqa: S311  (nothing secret)
    began = left_over()
    for round_ in range(1, rounds + 1):
        order = dice.sample(range(WORLDS), WORLDS)
        by_threads, by_tasks = order[: WORLDS // 2], order[WORLDS // 2 :]
        lag = [dice.uniform(0, 0.05) for _ in range(WORLDS)]
        errors = []

        def in_thread(index, lag=lag, errors=errors):
            try:
                time.sleep(lag[index])
                w = mw.join(f"w{index}", me.rank, SIZE, store=me.store, timeout=60)
                use(w, index)
            except BaseException as exc:  # noqa: BLE001  (told to the test)
                errors.append(f"w{index}: {exc!r}")

        async def in_task(index, lag=lag):
            await asyncio.sleep(lag[index])
            w = await mw.join_async(f"w{index}", me.rank, SIZE, store=me.store, timeout=60)
            # Its blocking calls would hold the loop, and with it the other joins of this member, but for no longer
            # than the others need, whose joins run in threads of their own.
            await asyncio.to_thread(use, w, index)

        async def gave_up(patience=0.004 * (2 * round_ + seed - 2)):
            """Join "wx" with the others and give up in the middle, as member 0; the others say what they got."""
            if me.rank != 0:
                return await asyncio.to_thread(
                    lambda: outcome(lambda: mw.join("wx", me.rank, SIZE, store=me.store, timeout=4).barrier())
                )
            joining = asyncio.create_task(mw.join_async("wx", me.rank, SIZE, store=me.store, timeout=6))
            await asyncio.sleep(patience)
            joining.cancel()
            try:
                w = await joining
            except asyncio.CancelledError:
                return {"kinds": ["CancelledError"]}
            w.close()
            return {"kinds": ["closed"]}

        async def main(gave_up=gave_up, in_task=in_task, by_tasks=by_tasks):
            extra = [gave_up()] if cancelling else []
            done = await asyncio.gather(*(in_task(index) for index in by_tasks), *extra)
            return done[-1] if cancelling else None

        threads = [threading.Thread(target=in_thread, args=(index,)) for index in by_threads]
        for thread in threads:
            thread.start()
        given_up = asyncio.run(main())
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        assert errors == []
        made = mw.worlds()
        me.emit(
            "joined",
            given_up=given_up,
            worlds=sorted(made),
            states=sorted({str(w.state) for name, w in made.items() if name != "wx"}),
            generations={made[f"w{index}"].generation for index in range(WORLDS)},
        )
        me.hear()  # all have looked: closing breaks the others' worlds
        leave(me, cancelling)
    deadline = time.monotonic() + PATIENCE / 2
    while left_over()["threads"] != began["threads"] and time.monotonic() < deadline:
        time.sleep(0.05)  # threads that are ending
    me.emit("end of rounds", began=began, ended=left_over())


def everyone(members, name, **options):
    return [member.expect(name, **options) for member in members]


def tell(members):
    for member in members:
        member.say("go on")


@pytest.mark.parametrize("cancelling", [False, True])
@pytest.mark.parametrize("seed", [1, 2])
def test_worlds_joined_at_once_in_any_order(cast, seed, cancelling):
    rounds = 3
    members = [
        cast.start(many, rank, seed=seed, rounds=rounds, cancelling=cancelling) for rank in range(SIZE)
    ]
    last = 0
    for round_ in range(1, rounds + 1):
        for seen in everyone(members, "joined", timeout=90):
            assert set(seen.worlds) >= {f"w{index}" for index in range(WORLDS)}
            assert seen.states == ["active"]
            assert seen.generations == {round_}
            if cancelling and seen.given_up["kinds"] not in (["CancelledError"], ["closed"]):
                # It was given up before it was made, or right afterwards.
                kinds = seen.given_up["kinds"]
                assert "JoinError" in kinds or seen.given_up["cause"] == "left", seen.given_up
        tell(members)
        if cancelling:
            generations = {seen.generation for seen in everyone(members, "after")}
            assert len(generations) == 1
            assert last < min(generations)
            last = min(generations)
            tell(members)
        everyone(members, "closed")
        tell(members)
    for seen in everyone(members, "end of rounds"):
        assert seen.ended["threads"] == seen.began["threads"]
    assert [member.finish() for member in members] == [0] * SIZE
