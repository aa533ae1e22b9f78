"""gloo's devices: shared by worlds, but never by two that connect at the same time."""

from __future__ import annotations

import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multiworld._c10d.gloo.devices import DevicePool, Lease

HERE = (("hostname", "127.0.0.1"),)
THERE = (("hostname", "127.0.0.2"),)


class Kit:
    """A pool whose devices are plain objects and whose patience is over at once, unless told otherwise."""

    def __init__(self, *, limit: int = 2, patience: float = 0.0) -> None:
        self.pool = DevicePool(limit=limit, patience=patience)
        self.made: list[object] = []

    def make(self, where: object) -> list[object]:
        self.made.append((where, object()))
        return [self.made[-1]]

    def take(self, where: object = HERE, *, shared: bool = True) -> Lease:
        return self.pool.take(where, self.make, lambda: None, shared=shared)  # type: ignore[arg-type]


def test_a_device_is_shared_once_its_group_is_connected():
    kit = Kit(limit=1)
    first = kit.take()
    first.connected()
    assert kit.take().devices == first.devices
    assert len(kit.made) == 1


def test_a_device_on_which_a_group_connects_is_nobody_elses():
    kit = Kit(limit=1)
    first, second = kit.take(), kit.take()
    assert first.devices != second.devices
    first.connected()
    second.connected()
    assert kit.pool.devices == 2


def test_few_worlds_have_a_device_each_and_many_the_least_used():
    kit = Kit(limit=3)
    leases = []
    for _ in range(9):
        leases.append(kit.take())
        leases[-1].connected()
    counts = [sum(each.devices == [one] for each in leases) for one in kit.made]
    assert counts == [3, 3, 3]
    assert [each.among for each in leases] == list(range(1, 10))


def test_another_interface_is_another_device():
    kit = Kit(limit=1)
    first = kit.take()
    first.connected()
    assert kit.take(THERE).devices != first.devices


def test_a_group_that_is_not_joined_by_all_at_once_has_its_own():
    kit = Kit(limit=1)
    first = kit.take()
    first.connected()
    own = kit.take(shared=False)
    assert own.devices != first.devices
    own.connected()
    assert kit.take().devices == first.devices
    assert own.give_back()


def test_the_last_one_to_go_takes_the_device_along():
    kit = Kit(limit=1)
    first = kit.take()
    first.connected()
    second = kit.take()
    second.connected()
    assert not first.give_back()
    assert not first.give_back()  # twice is once
    assert second.give_back()
    assert kit.pool.devices == 0
    assert kit.take().devices != second.devices


def test_a_device_that_is_kept_waits_for_the_next_group():
    kit = Kit(limit=1)
    first = kit.take()
    first.connected()
    release = kit.pool.keep()
    assert not first.give_back()
    again = kit.take()
    assert len(kit.made) == 1
    again.connected()
    release()
    assert kit.pool.devices == 1
    assert again.give_back()

    last = kit.take()
    release = kit.pool.keep()
    last.connected()
    assert not last.give_back()
    release()
    assert kit.pool.devices == 0


def test_what_a_parent_kept_is_not_released_in_its_child():
    kit = Kit(limit=1)
    release = kit.pool.keep()
    kit.pool._forked()
    kit.take()
    release()
    assert kit.pool.devices == 1


def test_no_world_gets_a_device_whose_group_did_not_come_about():
    kit = Kit(limit=1)
    first = kit.take()
    first.connected()
    failed = kit.take()
    assert not failed.give_back()  # the first still uses it
    assert kit.take().devices != first.devices
    assert first.give_back()


def test_a_device_that_cannot_be_made_leaves_nothing_behind():
    kit = Kit(limit=1)

    def refuse(_where: object) -> list[object]:
        raise RuntimeError("no such interface")

    with pytest.raises(RuntimeError, match="no such interface"):
        kit.pool.take(HERE, refuse, lambda: None, shared=True)
    assert kit.pool.devices == 0
    assert kit.take().among == 1


def test_who_waits_for_a_device_gets_the_one_that_is_free_first_or_gives_up():
    kit = Kit(limit=1, patience=60.0)
    first = kit.take()
    got: list[Lease] = []
    waiting = threading.Thread(target=lambda: got.append(kit.take()))
    waiting.start()
    first.connected()
    waiting.join(30)
    assert got[0].devices == first.devices

    def give_up() -> None:
        raise TimeoutError

    with pytest.raises(TimeoutError):
        kit.pool.take(HERE, kit.make, give_up, shared=True)  # type: ignore[arg-type]
    assert len(kit.made) == 1


@pytest.mark.parametrize("after", [False, True])
def test_a_waiter_that_ctrl_c_ends_as_it_begins_blocks_no_later_one(after: bool) -> None:
    kit = Kit(patience=60.0)
    lock = kit.pool._lock

    class Interrupted:
        def __enter__(self) -> None:
            kit.pool._lock = lock
            if not after:
                raise KeyboardInterrupt
            lock.acquire()

        def __exit__(self, *exc: object) -> None:
            lock.release()
            raise KeyboardInterrupt

    kit.pool._lock = Interrupted()  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        kit.take()
    assert kit.pool._waiting == []
    assert kit.take().among == 1


def test_those_who_wait_are_served_in_their_worlds_order_and_as_long_as_any_is_served_none_is_made():
    clock = [0.0]
    pool = DevicePool(limit=1, patience=1.0, clock=lambda: clock[0])
    made: list[object] = []

    def make(_where: object) -> list[object]:
        made.append(object())
        return [made[-1]]

    first = pool.take(HERE, make, lambda: None, shared=True)
    served: list[tuple[str, Lease]] = []
    looks = {name: threading.Event() for name in "bca"}

    def wait(name: str) -> None:
        lease = pool.take(HERE, make, looks[name].set, shared=True, order=name)
        served.append((name, lease))

    threads = [threading.Thread(target=wait, args=(name,)) for name in looks]
    for thread in threads:
        thread.start()
    for each in looks.values():
        assert each.wait(30)  # it waits
    last = first
    for number in range(1, 4):
        clock[0] += 0.9
        last.connected()
        while len(served) < number:
            time.sleep(0.001)
        last = served[-1][1]
    assert [name for name, _ in served] == ["a", "b", "c"]
    assert len(made) == 1
    stuck = threading.Thread(target=wait, args=("a",))
    stuck.start()
    clock[0] += 1.1  # nobody was served for longer than that
    stuck.join(30)
    assert len(made) == 2
    for thread in threads:
        thread.join(30)


def test_a_forked_child_has_none_of_its_parents():
    kit = Kit(limit=1)
    first = kit.take()
    first.connected()
    kit.pool._forked()
    assert kit.pool.devices == 0
    assert kit.take().devices != first.devices


@given(st.lists(st.tuples(st.sampled_from(["take", "own", "connected", "back"]), st.integers(0, 30))))
def test_two_never_connect_on_one_device_and_a_device_lives_as_long_as_its_users(steps):
    kit = Kit()
    connecting: list[Lease] = []
    connected: list[Lease] = []
    for step, number in steps:
        if step in {"take", "own"}:
            fresh = kit.take(shared=step == "take")
            assert all(each.devices != fresh.devices for each in connecting)
            connecting.append(fresh)
        elif step == "connected" and connecting:
            connected.append(connecting.pop(number % len(connecting)))
            connected[-1].connected()
        elif step == "back" and (held := connecting + connected):
            gone = held[number % len(held)]
            used = gone.devices
            (connecting if gone in connecting else connected).remove(gone)
            assert gone.give_back() is all(each.devices != used for each in connecting + connected)
    for each in connecting + connected:
        each.give_back()
    assert kit.pool.devices == 0
