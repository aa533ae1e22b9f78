"""What is gone through while a destructor changes it: a garbage collection may begin wherever memory is taken."""

from __future__ import annotations

import gc
from types import SimpleNamespace

import pytest

from multiworld._core.operations.log import OperationLog
from multiworld._generation.fail_awaited import AwaitedOperations
from multiworld._net.lane.awaiting import Watch
from multiworld.events import Bus

MANY = 25  # more than Python keeps empty tuples for


def subscribers():
    """Return what takes one in and returns what takes it out, and what goes through all."""
    bus = Bus()
    return lambda: bus.subscribe(lambda _: None), lambda: bus.publish(None)


def awaited():
    operations = AwaitedOperations(SimpleNamespace(state=None, world="w"), RuntimeError)

    class Awaited:
        def get_loop(self):
            return SimpleNamespace(call_soon_threadsafe=lambda *_: None)

    def add():
        operations._pending.add(work := Awaited())
        return lambda: operations.expect_no_more(work)

    return add, operations.fail


def groups():
    log, numbers = OperationLog(0, 1), iter(range(1, 1000))

    def add():
        number = next(numbers)
        log.group(number, (0,))
        return lambda: log.drop(number)

    return add, lambda: log.report(0.0)


def tasks():
    watch = Watch(None, None)

    class Over:
        def cancel(self):
            pass

    def add():
        watch._awaited.add(over := Over())
        return lambda: watch._awaited.discard(over)

    return add, watch.give_up


@pytest.fixture
def _thresholds():
    before, enabled = gc.get_threshold(), gc.isenabled()
    gc.collect()
    gc.freeze()  # what other tests have left is not gone through 100 times
    yield
    gc.set_threshold(*before)
    gc.unfreeze()
    (gc.enable if enabled else gc.disable)()


@pytest.mark.usefixtures("_thresholds")
@pytest.mark.parametrize("kind", [subscribers, awaited, groups, tasks])
def test_a_destructor_may_end_one_while_all_are_gone_through(kind):
    """Seen up to Python 3.11, which collects within an allocation: at another one in each round."""
    for pads in range(80):
        add, go_through = kind()
        for _ in range(MANY):
            add()

        class Ends:
            def __init__(self, end):
                self.me, self.end = self, end

            def __del__(self):
                self.end()

        gc.disable()
        gc.collect()
        Ends(add())
        taken = [[] for _ in range(pads)]
        gc.set_threshold(60)
        gc.enable()
        go_through()
        gc.disable()
        del taken
