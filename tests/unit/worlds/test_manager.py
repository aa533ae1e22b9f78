"""pymultiworld's manager and communicator: which worlds their names mean, before and after these are closed."""

from __future__ import annotations

import asyncio
import contextlib
import threading

import pytest
from kits.meetkit import until
from test_reentry import own

from multiworld import manager as module
from multiworld.communicator import (
    DEFAULT_WORLD_NAME,
    REMEMBERED,
    BrokenWorldException,
    WorldCommunicator,
)
from multiworld.errors import InvalidJoinError, JoinAbandonedError, UnknownWorldError
from multiworld.events import State
from multiworld.manager import WorldManager
from multiworld.registry import Registry

PATIENCE = 120.0


class FakeWorld:
    """Its close waits for those of all others."""

    def __init__(self, name, together):
        self.name, self.state, self.generation, self.rank = name, State.ACTIVE, 1, 0
        self._gen = self
        self._together = together

    def _close(self, seconds, failure=""):
        self.given = seconds
        self._together.wait(PATIENCE)
        self.state = State.CLOSED

    def close(self):
        self._close(PATIENCE)


@pytest.fixture
def registry(monkeypatch):
    made = Registry()
    monkeypatch.setattr(module, "registry", made)
    return made


def test_cleanup_closes_all_worlds_at_once(registry, monkeypatch):
    monkeypatch.setenv("M8D_CLOSE_TIMEOUT", "20")
    manager, together = WorldManager(), threading.Barrier(4)
    worlds = [FakeWorld(f"w{number}", together) for number in range(4)]
    for world in worlds:
        registry.reserve(world.name)
        registry.settle(world.name, world, 1, 0)
        if world is not worlds[0]:  # that one is not of this manager
            manager.add_world(world.name, "gloo")
            manager._worlds[world.name] = world
            manager.communicator.set_world(world.name, world)
    manager.cleanup()
    assert [world.state for world in worlds] == [State.CLOSED] * 4
    assert [world.given for world in worlds] == [20.0] * 4
    assert manager.communicator.is_broken("w1")
    manager.remove_world("w1")  # another task may not know
    with pytest.raises(ValueError, match="does not exist"):
        manager.remove_world("w0")


def test_cleanup_in_a_signals_handler_waits_for_nothing_that_the_interrupted_call_holds(
    registry, monkeypatch
):
    monkeypatch.setenv("M8D_CLOSE_TIMEOUT", "0.1")
    manager, world, held = WorldManager(), FakeWorld("w", threading.Barrier(1)), threading.Lock()
    registry.reserve("w")
    registry.settle("w", world, 1, 0)

    class Held:
        def __enter__(self):
            assert threading.current_thread() is not threading.main_thread(), "this would wait for itself"
            held.acquire()

        def __exit__(self, *_):
            held.release()

    monkeypatch.setattr(registry, "_lock", Held())
    with held:
        own(lambda: manager.cleanup())()  # noqa: PLW0108  (of the program, in the middle of the package's)
        assert world.state is State.ACTIVE
    until(lambda: world.state is State.CLOSED)
    until(lambda: not any(each.name.startswith("m8d-close") for each in threading.enumerate()))


# -- names ------------------------------------------------------------------------------------------------------------


def test_the_default_world_is_the_only_one_that_is_there():
    communicator = WorldCommunicator()

    def found():
        return communicator._find(DEFAULT_WORLD_NAME)

    for name in ("a", "b", "c"):
        world = object()
        communicator.add_world(name)
        with pytest.raises(UnknownWorldError, match="Worlds here: none"):
            found()
        communicator.set_world(name, world)
        assert found() is world
        communicator.add_world("other")  # not initialized yet
        assert found() is world
        communicator.set_world("other", object())
        with pytest.raises(UnknownWorldError, match=f"Worlds here: {name}, other"):
            found()
        communicator.remove_world("other")
        assert found() is world
        communicator.remove_world(name)
        with pytest.raises(BrokenWorldException, match="was removed"):
            communicator._find(name)


def test_the_default_name_is_broken_unless_the_only_world_is_active():
    communicator, world = WorldCommunicator(), FakeWorld("w", threading.Barrier(1))
    assert communicator.is_broken(DEFAULT_WORLD_NAME)
    communicator.set_world("w", world)
    assert not communicator.is_broken(DEFAULT_WORLD_NAME)
    world.state = State.BROKEN
    assert communicator.is_broken(DEFAULT_WORLD_NAME)
    world.state = State.ACTIVE
    communicator.set_world("other", world)
    assert communicator.is_broken(DEFAULT_WORLD_NAME)  # an operation does not know which one is meant


def test_names_of_removed_worlds_do_not_pile_up():
    manager, count = WorldManager(), REMEMBERED + 100
    for number in range(count):
        for _ in range(2):
            manager.add_world(f"w{number}", "gloo")
            manager.remove_world(f"w{number}")
            manager.remove_world(f"w{number}")
    for face in (manager, manager.communicator):
        assert not face._worlds
        assert len(face._removed) == REMEMBERED
    with pytest.raises(BrokenWorldException, match="was removed"):
        manager.communicator._find(f"w{count - 1}")
    with pytest.raises(UnknownWorldError):
        manager.communicator._find("w0")
    with pytest.raises(ValueError, match="does not exist"):
        manager.remove_world("w0")


# -- a broken world's name is initialized again -----------------------------------------------------------------------


@pytest.fixture
def broken():
    world = FakeWorld("w", threading.Barrier(1))
    world.state = State.BROKEN
    return world


@pytest.fixture
def joins(monkeypatch):
    monkeypatch.setattr(module, "join_planned_async", found := FakeJoins(late=False))
    return found


def manager_of(world):
    manager = WorldManager()
    manager.add_world("w", "gloo")
    manager._worlds["w"] = world
    manager.communicator.set_world("w", world)
    return manager


@pytest.mark.parametrize("then", ["removed", "initialized"])
@pytest.mark.usefixtures("registry")
def test_a_broken_world_stays_when_its_name_cannot_be_initialized_again(broken, joins, then):
    async def main():
        manager, task = await initializing(joins, manager_of(broken))
        with pytest.raises(BrokenWorldException, match="not initialized"):
            manager.communicator._find("w")
        task.cancel()
        assert isinstance(await ended(task), asyncio.CancelledError)
        assert manager.communicator._find("w") is broken
        if then == "removed":
            manager.remove_world("w")
            assert broken.state is State.CLOSED
            return
        again = initialized(manager)
        await joins.begun(2)
        joins.ends[1].set()
        assert await ended(again) is None
        assert manager.communicator._find("w") is joins.worlds[0]
        manager.remove_world("w")
        assert (joins.worlds[0].state, broken.state) == (State.CLOSED, State.BROKEN)
        with pytest.raises(BrokenWorldException, match="was removed"):
            manager.communicator._find("w")

    asyncio.run(main())


@pytest.mark.usefixtures("registry")
def test_a_broken_world_that_is_removed_while_its_name_is_initialized_is_closed(broken, joins):
    async def main():
        manager, task = await initializing(joins, manager_of(broken))
        manager.remove_world("w")
        assert isinstance(await ended(task), JoinAbandonedError)
        assert broken.state is State.CLOSED
        assert not manager._worlds

    asyncio.run(main())


@pytest.mark.parametrize("state", [State.ACTIVE, State.JOINING])
@pytest.mark.usefixtures("registry")
def test_a_world_that_is_active_or_joined_again_is_there(state):
    world = FakeWorld("w", threading.Barrier(1))
    world.state = state
    manager = manager_of(world)
    with pytest.raises(ValueError, match="already exists"):
        asyncio.run(manager.initialize_world("w", 0, 2, port=1))
    assert manager.communicator._find("w") is world


@pytest.mark.parametrize("port", ["29500", -1, 65536, None, 1.5])
def test_a_port_that_is_none_is_refused(port):
    with pytest.raises(InvalidJoinError, match=r"1 to 65535"):
        asyncio.run(WorldManager().initialize_world("w", 0, 2, port=port))


@pytest.mark.parametrize("addr", [None, 7, ""])
def test_an_address_that_is_none_is_refused_and_leaves_no_name(addr):
    manager = WorldManager()
    for _ in range(2):
        with pytest.raises(InvalidJoinError, match=f"addr {addr!r}"):
            asyncio.run(manager.initialize_world("w", 0, 2, addr=addr, port=1))


# -- removed while it is initialized ----------------------------------------------------------------------------------


class FakeJoins:
    """Each join ends when it is told to; `late` ones although they were cancelled before."""

    def __init__(self, *, late):
        self.late, self.ends, self.worlds = late, [], []

    async def __call__(self, plan, given_up):
        assert not given_up()
        end = asyncio.Event()
        self.ends.append(end)
        while not end.is_set():
            with contextlib.suppress(asyncio.CancelledError) if self.late else contextlib.nullcontext():
                await end.wait()
        self.worlds.append(FakeWorld(plan.name, threading.Barrier(1)))
        return self.worlds[-1]

    async def begun(self, count):
        async def until():
            while len(self.ends) < count:  # noqa: ASYNC110  (two tasks, one loop)
                await asyncio.sleep(0)

        await asyncio.wait_for(until(), PATIENCE)


def initialized(manager):
    return asyncio.create_task(manager.initialize_world("w", 0, 2, port=1))


async def initializing(joins, manager=None):
    """A manager, and a task in which it initializes a world; the join has begun."""
    manager = WorldManager() if manager is None else manager
    task = initialized(manager)
    await joins.begun(1)
    return manager, task


async def ended(task):
    return (await asyncio.wait_for(asyncio.gather(task, return_exceptions=True), PATIENCE))[0]


@pytest.mark.parametrize("late", [False, True], ids=["in time", "too late"])
@pytest.mark.parametrize("how", ["cleanup", "remove_world", "another thread"])
@pytest.mark.usefixtures("registry")
def test_a_world_that_is_removed_while_it_is_initialized_does_not_become_active(monkeypatch, how, late):
    joins = FakeJoins(late=late)
    monkeypatch.setattr(module, "join_planned_async", joins)

    async def main():
        manager, task = await initializing(joins)
        if how == "remove_world":
            manager.remove_world("w")
        elif how == "cleanup":
            manager.cleanup()
        else:
            await asyncio.to_thread(manager.cleanup)
        await asyncio.sleep(0)
        if late:
            joins.ends[0].set()
        error = await ended(task)
        assert isinstance(error, JoinAbandonedError), error
        assert "removed" in str(error)
        assert manager.communicator.is_broken("w")
        again = initialized(manager)
        await joins.begun(2)
        joins.ends[1].set()
        assert await ended(again) is None
        assert not manager.communicator.is_broken("w")

    asyncio.run(main())


@pytest.mark.parametrize("who", ["another thread", "a signal's handler"])
@pytest.mark.usefixtures("registry")
def test_a_world_that_is_removed_as_it_comes_about_does_not_become_active(monkeypatch, who):
    monkeypatch.setattr(module, "join_planned_async", joins := FakeJoins(late=False))

    class Joins(dict):
        """Another thread removes the world when the manager has looked whether it is wanted."""

        def get(self, name, default=None):
            found = super().get(name, default)
            if found is not None and found.joining.done() and not removing:
                removing.append(threading.Thread(target=manager.remove_world, args=("w",)))
                removing[0].start()
                removing[0].join(0.2)  # without waiting, it would be through
            return found

    class Communicator(WorldCommunicator):
        def set_world(self, name, world):
            if not removing:
                removing.append(None)
                manager.remove_world(name)
            super().set_world(name, world)

    removing, manager = [], WorldManager()
    if who == "another thread":
        manager._joins = Joins()
    else:
        manager._communicator = Communicator(manager)

    async def main():
        _, task = await initializing(joins, manager)
        joins.ends[0].set()
        error = await ended(task)
        if who == "another thread":
            await asyncio.to_thread(removing[0].join, PATIENCE)
            assert error is None or isinstance(error, JoinAbandonedError), error
        else:
            assert isinstance(error, JoinAbandonedError), error
        assert [world.state for world in joins.worlds] == [State.CLOSED]
        assert not manager._worlds
        assert manager.communicator.is_broken("w")
        again = initialized(manager)
        await joins.begun(2)
        joins.ends[1].set()
        assert await ended(again) is None

    asyncio.run(main())


@pytest.mark.usefixtures("registry")
def test_a_world_of_an_earlier_attempt_is_closed_and_the_later_ones_stays(monkeypatch):
    joins = FakeJoins(late=True)
    monkeypatch.setattr(module, "join_planned_async", joins)

    async def main():
        manager, first = await initializing(joins)
        manager.remove_world("w")
        second = initialized(manager)
        await joins.begun(2)
        joins.ends[1].set()
        assert await ended(second) is None
        joins.ends[0].set()
        assert isinstance(await ended(first), JoinAbandonedError)
        assert [world.state for world in joins.worlds] == [State.ACTIVE, State.CLOSED]
        assert not manager.communicator.is_broken("w")

    asyncio.run(main())


@pytest.mark.usefixtures("registry")
def test_a_cancelled_initialization_is_cancelled(monkeypatch):
    monkeypatch.setattr(module, "join_planned_async", joins := FakeJoins(late=False))

    async def main():
        manager, task = await initializing(joins)
        task.cancel()
        assert isinstance(await ended(task), asyncio.CancelledError)
        with pytest.raises(ValueError, match="does not exist"):
            manager.remove_world("w")

    asyncio.run(main())


@pytest.mark.parametrize("late", [False, True], ids=["in time", "too late"])
@pytest.mark.usefixtures("registry")
def test_a_cancelled_initialization_of_a_world_that_is_removed_is_cancelled(monkeypatch, late):
    """Else a task that tries again after every `JoinError` would outlive its cancellation."""
    monkeypatch.setattr(module, "join_planned_async", joins := FakeJoins(late=late))

    async def main():
        manager, task = await initializing(joins)
        manager.cleanup()
        task.cancel()
        await asyncio.sleep(0)
        if late:
            joins.ends[0].set()
        assert isinstance(await ended(task), asyncio.CancelledError)
        assert [world.state for world in joins.worlds] == [State.CLOSED] * late
        assert manager.communicator.is_broken("w")

    asyncio.run(main())


@pytest.mark.parametrize(("when", "times"), [("as it comes about", 1), ("before", 1), ("before", 2)])
@pytest.mark.usefixtures("registry")
def test_a_world_that_came_about_though_its_initialization_was_cancelled_is_closed(monkeypatch, when, times):
    monkeypatch.setattr(module, "join_planned_async", joins := FakeJoins(late=True))

    async def main():
        manager, task = await initializing(joins)
        joining = manager._joins["w"].joining
        if when == "as it comes about":
            joins.ends[0].set()
            while not joining.done():  # noqa: ASYNC110  (two tasks, one loop)
                await asyncio.sleep(0)
        for _ in range(times):
            task.cancel()
            await asyncio.sleep(0)
        joins.ends[0].set()
        assert isinstance(await ended(task), asyncio.CancelledError)
        assert [world.state for world in joins.worlds] == [State.CLOSED]
        with pytest.raises(ValueError, match="does not exist"):
            manager.remove_world("w")

    asyncio.run(main())
