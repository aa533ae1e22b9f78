"""Who waits for whom among awaited operations, and whose turn comes when one ends, is given up, or loses its loop."""

from __future__ import annotations

import asyncio
import threading

import pytest

from multiworld.turns import COLLECTIVE, RECEIVE, SEND, Turns, collective, message


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
