"""Who waits for whom among awaited operations, and whose turn comes when one ends, is given up, or loses its loop."""

from __future__ import annotations

import asyncio
import threading
import time
from types import SimpleNamespace

import pytest

from multiworld.turns import COLLECTIVE, RECEIVE, SEND, Turns, batch, collective, message, own_turn, posted


def from_(peer, tag=0, on="cpu"):
    return message(RECEIVE, peer, tag, on)


def to(peer, tag=0, on="cpu"):
    return message(SEND, peer, tag, on)


MEETINGS = [
    (COLLECTIVE, collective("cpu"), True),
    (COLLECTIVE, collective("cuda:0"), True),
    (collective("cpu"), collective("cuda:0"), True),
    (collective("cpu"), from_(1), False),
    (collective("cuda:0"), from_(1), False),
    (collective("cuda:0"), from_(1, on="cuda:0"), True),
    (from_(1), from_(1), True),
    (from_(1), from_(2), False),
    (from_(1), to(1), False),
    (to(1), to(1), True),
    (to(1), to(2), False),
    (from_(None), from_(2), True),
    (from_(1), from_(None), True),
    (from_(None), to(2), False),
    (from_(1), from_(1, tag=3), False),
    (from_(None), from_(1, tag=3), False),
    (from_(1, on="cuda:0"), to(2, tag=3, on="cuda:0"), True),
    (from_(1, on="cuda:0"), to(1), False),
    ((*from_(1), *to(2)), to(2), True),
    ((*from_(1), *to(2)), to(1), False),
]


@pytest.mark.parametrize(("one", "other", "meet"), MEETINGS)
def test_what_waits_is_what_could_be_taken_for_the_other(one, other, meet):
    for first, second in ((one, other), (other, one)):
        turns = Turns()
        assert not turns.hold(second)
        taken = turns.take(first)
        assert turns.hold(second) is meet
        taken.over()
        assert not turns.hold(second)


def come(turns, come_to, name, ways):
    turn = turns.take(ways)
    turn.when_come(lambda: come_to.append(name))
    return turn


def test_each_comes_when_all_before_it_that_it_meets_are_over():
    turns, seen = Turns(), []
    first = come(turns, seen, "from 1", from_(1))
    second = come(turns, seen, "from 2", from_(2))
    third = come(turns, seen, "from any", from_(None))
    fourth = come(turns, seen, "from 2 again", from_(2))
    come(turns, seen, "to 1", to(1))
    assert seen == ["from 1", "from 2", "to 1"]
    second.over()
    assert seen == ["from 1", "from 2", "to 1"]
    first.over()
    assert seen[3:] == ["from any"]
    third.over()
    third.over()
    assert seen[4:] == ["from 2 again"]
    fourth.over()
    assert len(turns.taken) == 1


def test_who_comes_after_one_that_gave_up_waits_for_who_came_before():
    turns, seen = Turns(), []
    first = come(turns, seen, "first", COLLECTIVE)
    second = come(turns, seen, "second", COLLECTIVE)
    come(turns, seen, "third", COLLECTIVE)
    second.give_up()
    assert seen == ["first"]
    first.give_up()  # it was called, and goes on
    assert seen == ["first"]
    first.over()
    assert seen == ["first", "third"]


def test_turns_are_awaited_in_any_loop():
    turns, seen = Turns(), []
    first = turns.take(COLLECTIVE)

    async def wait(name):
        turn = turns.take(COLLECTIVE)
        await turn.come()
        seen.append(name)
        turn.over()

    async def main():
        tasks = []
        for name in range(3):
            tasks.append(asyncio.create_task(wait(name)))
            await asyncio.sleep(0)  # its turn is taken
        tasks[1].cancel()
        await asyncio.wait([tasks[1]])
        assert not seen
        threading.Thread(target=first.over).start()
        await asyncio.wait_for(asyncio.gather(tasks[0], tasks[2]), 60)

    asyncio.run(main())
    assert seen == [0, 2]
    assert not turns.taken


def test_a_loop_that_is_closed_holds_no_turn_up():
    turns, seen = Turns(), []
    first = turns.take(COLLECTIVE)
    loop = asyncio.new_event_loop()
    task = loop.create_task(turns.take(COLLECTIVE).come())
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    come(turns, seen, "later", COLLECTIVE)
    first.over()
    assert seen == ["later"]
    assert not task.done()
    task._log_destroy_pending = False


# -- calls that block ------------------------------------------------------------------------------------------


def waits(turns, ways, seen, goes_on=lambda: True):
    """A thread that waits as a blocking call does, and then tells so."""
    thread = threading.Thread(target=lambda: (turns.wait(ways, goes_on), seen.append("it blocked")))
    thread.start()
    while len(turns.taken) < 2:
        time.sleep(0.001)
    return thread


def test_a_call_that_blocks_waits_for_those_before_it_and_holds_up_no_later_one():
    turns, seen = Turns(), []
    first = turns.take(COLLECTIVE)
    thread = waits(turns, COLLECTIVE, seen)
    assert not seen
    first.over()
    thread.join(60)
    assert seen == ["it blocked"]
    assert not turns.taken


def test_a_call_that_blocks_waits_no_longer_than_the_world_goes_on():
    turns, seen, over = Turns(), [], threading.Event()
    first = turns.take(COLLECTIVE)
    thread = waits(turns, COLLECTIVE, seen, lambda: not over.is_set())
    over.set()
    thread.join(60)
    assert seen == ["it blocked"]
    assert turns.taken == [first]


def test_what_its_own_operation_posts_waits_for_no_turn():
    turns = Turns()
    turns.take(COLLECTIVE)
    with own_turn():
        with own_turn():
            pass
        turns.wait(COLLECTIVE, pytest.fail)
    turns.wait(from_(1), pytest.fail)  # does not meet it
    assert len(turns.taken) == 1


@pytest.mark.parametrize("between", [False, True])
def test_a_call_that_would_wait_for_its_own_event_loop_says_so(between):
    turns = Turns()

    async def main():
        await turns.take(from_(1)).come()
        if between:  # it waits for one that waits for one of the loop
            turns.take((*from_(1), *from_(2)))
        with pytest.raises(RuntimeError, match="Await that one first"):
            turns.wait(from_(2 if between else 1), lambda: True)
        assert len(turns.taken) == 1 + between

    asyncio.run(main())


def test_a_call_that_would_wait_for_an_event_loop_that_stands_says_so():
    turns, loop = Turns(), asyncio.new_event_loop()
    turn = turns.take(COLLECTIVE)
    loop.run_until_complete(turn.come())
    with pytest.raises(RuntimeError, match="does not run now"):
        turns.wait(COLLECTIVE, lambda: True)
    loop.close()
    assert turns.taken == [turn]


def test_a_signals_handler_waits_for_nothing_that_waits_for_it():
    """Its thread waits for a turn already."""
    turns = Turns()
    ahead, said = turns.take(COLLECTIVE), []

    def handle():
        if len(turns.taken) == 2 and not said:
            with pytest.raises(RuntimeError, match="handler"):
                turns.wait(COLLECTIVE, lambda: True)
            said.append(True)
            ahead.over()
        return True

    turns.wait(COLLECTIVE, handle)
    assert said
    assert not turns.taken


def test_an_operation_that_goes_on_in_a_thread_can_be_waited_for_in_its_loop():
    turns = Turns()

    async def main():
        turn = turns.take(COLLECTIVE)
        await turn.come()
        turn.loop = None  # as when a thread begins it
        threading.Thread(target=turn.over).start()
        turns.wait(COLLECTIVE, lambda: True)

    asyncio.run(main())
    assert not turns.taken


def test_ways_of_what_torch_posts():
    tensor = SimpleNamespace(device="cpu")
    assert posted("send", ([tensor], 1, 0), {}) == to(1)
    assert posted("send", ([tensor],), {"dstRank": 1, "tag": 0}) == to(1)
    assert posted("recv", ([tensor], 2, 0), {}) == from_(2)
    assert posted("recv", (), {"tensors": [tensor], "srcRank": 2, "tag": 5}) == ()
    assert posted("recv", (), {}) == ()
    assert posted("recv_anysource", ([tensor], 0), {}) == from_(None)
    assert posted("allreduce", ([tensor],), {}) == COLLECTIVE

    def irecv():
        pass

    messages = [SimpleNamespace(op=irecv, peer=1, tag=0, tensor=tensor), object()]
    assert batch(messages) == list(from_(1))
