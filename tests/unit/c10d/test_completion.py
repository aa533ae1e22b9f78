"""The pool that waits: kept threads, results and errors in the loop, closed loops, limits, forks."""

import asyncio
import gc
import os
import threading
import time
import weakref

import pytest
from kits.meetkit import PATIENCE, until

from multiworld._c10d.waiter_pool import Pool, future_of


@pytest.fixture
def pool():
    made = Pool(limit=4, idle=0.2, name="test-waiter")
    yield made
    until(lambda: made.threads == 0)
    until(lambda: not [each for each in threading.enumerate() if each.name.startswith("test-waiter")])


def test_results_and_errors_arrive_in_the_loop(pool):
    async def main():
        loop = asyncio.get_running_loop()
        seen = {}

        def where():
            seen["thread"], seen["daemon"] = (
                threading.current_thread().name,
                threading.current_thread().daemon,
            )
            return 7

        assert await pool.wait(where, loop) == 7
        assert seen == {"thread": "test-waiter-1", "daemon": True}

        def fail():
            raise KeyError("x")

        with pytest.raises(KeyError, match="x"):
            await pool.wait(fail, loop)
        with pytest.raises(RuntimeError, match="StopIteration"):
            await pool.wait(lambda: next(iter(())), loop)

    asyncio.run(main())


def test_threads_are_kept_and_the_limit_holds(pool):
    async def main():
        loop = asyncio.get_running_loop()
        used = {await pool.wait(lambda: threading.current_thread().name, loop) for _ in range(50)}
        assert len(used) < 25  # 1 or 2: the next may come before the last one sleeps
        await asyncio.to_thread(until, lambda: pool.threads == 0)
        gate, running, most = threading.Event(), [], []

        def blocked():
            running.append(1)
            most.append(len(running))
            gate.wait(PATIENCE)
            running.pop()

        futures = [pool.wait(blocked, loop) for _ in range(10)]
        await asyncio.to_thread(until, lambda: len(running) == 4)
        await asyncio.sleep(0.05)  # a fifth would come now
        assert pool.threads == 4
        gate.set()
        await asyncio.gather(*futures)
        assert max(most) == 4
        assert len(most) == 10

    asyncio.run(main())


def test_a_thread_that_cannot_be_started_costs_nothing_but_its_job(pool, monkeypatch):
    start, fails = threading.Thread.start, [True]

    def starting(thread):
        if fails[0] and thread.name.startswith("test-waiter"):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", starting)
    for _ in range(10):  # more than the limit
        with pytest.raises(RuntimeError, match="start new thread"):
            pool.run(lambda: None)
    assert pool.threads == 0
    waits = threading.Event()
    pool.run(waits.set, later=True)  # where no caller can be told
    assert not waits.is_set()
    fails[0] = False
    begun, go, done = threading.Event(), threading.Event(), threading.Event()
    pool.run(lambda: (begun.set(), go.wait(PATIENCE))[2:] or None)
    assert begun.wait(PATIENCE)
    fails[0] = True
    pool.run(done.set)  # whoever comes back does it
    assert not done.is_set()
    go.set()
    assert done.wait(PATIENCE)
    assert waits.wait(PATIENCE)


def test_nothing_is_held_by_a_sleeping_thread(pool):
    class Thing:
        pass

    async def main():
        thing = Thing()
        gone = weakref.ref(thing)
        await pool.wait(lambda held=thing: None, asyncio.get_running_loop())
        del thing

        def collected():
            gc.collect()
            return gone() is None

        await asyncio.to_thread(until, collected)

    asyncio.run(main())


def test_a_cancelled_future_and_a_closed_loop_are_no_error(pool, capsys):
    gate = threading.Event()
    over = threading.Event()

    def slow():
        gate.wait(PATIENCE)
        over.set()
        raise ValueError("late")

    async def cancel():
        future = pool.wait(slow, asyncio.get_running_loop())
        future.cancel()
        await asyncio.sleep(0)
        assert future.cancelled()

    asyncio.run(cancel())
    loop = asyncio.new_event_loop()
    pool.wait(slow, loop)
    loop.close()
    gate.set()
    assert over.wait(PATIENCE)
    time.sleep(0.05)
    gc.collect()
    assert capsys.readouterr().err == ""


def test_many_loops_share_it(pool):
    results = []

    def one(number):
        async def main():
            loop = asyncio.get_running_loop()
            return [await pool.wait(lambda n=n: number * 100 + n, loop) for n in range(50)]

        results.append((number, asyncio.run(main())))

    workers = [threading.Thread(target=one, args=(number,)) for number in range(6)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(2 * PATIENCE)
    assert sorted(results) == [(n, [n * 100 + k for k in range(50)]) for n in range(6)]


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_has_a_pool_of_its_own(pool):
    async def main():
        await pool.wait(lambda: None, asyncio.get_running_loop())

    asyncio.run(main())
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            assert pool.threads == 0
            asyncio.run(main())
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_work_without_a_future():
    class Work:
        def get_future(self):
            raise RuntimeError("not implemented")

    async def main():
        assert future_of(Work(), asyncio.get_running_loop()) is None

    asyncio.run(main())


def test_a_works_future():
    class Future:
        def __init__(self, value):
            self._value = value

        def value(self):
            if isinstance(self._value, Exception):
                raise self._value
            return self._value

        def add_done_callback(self, fn):
            threading.Timer(0.05, fn, (self,)).start()

    class Work:
        def __init__(self, value):
            self._value = value

        def get_future(self):
            return Future(self._value)

    async def main():
        loop = asyncio.get_running_loop()
        assert await future_of(Work(3), loop) == 3
        with pytest.raises(RuntimeError, match="closed by peer"):
            await future_of(Work(RuntimeError("closed by peer")), loop)

    asyncio.run(main())
