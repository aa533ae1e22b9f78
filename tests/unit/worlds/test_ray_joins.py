"""Joins from Ray's actors, with a double in the place of Ray: what is tried again, and where."""

from __future__ import annotations

import pickle
import sys
import types
from concurrent.futures import Future

import pytest

import multiworld as mw
from multiworld._join import join as joining
from multiworld.integrations import ray as worlds

STORE = worlds.RayStore("store", "tests")


class RayError(Exception):
    pass


class Actor:
    """Answers with the addresses given, one after the other; the last one again and again. None: never."""

    def __init__(self, *addresses):
        self.addresses = list(addresses)
        self.address = types.SimpleNamespace(remote=lambda: types.SimpleNamespace(future=self._answer))

    def _answer(self):
        future = Future()
        found = self.addresses[0] if len(self.addresses) == 1 else self.addresses.pop(0)
        if isinstance(found, Exception):
            future.set_exception(found)
        elif found is not None:
            future.set_result(found)
        return future


@pytest.fixture
def ray(monkeypatch):
    """Ray's double: `ray.actors` has actors by name."""
    module = types.ModuleType("ray")
    module.actors = {}
    module.is_initialized = lambda: True
    module.exceptions = types.SimpleNamespace(RayError=RayError)

    def get_actor(name, namespace):
        if (namespace, name) not in module.actors:
            raise ValueError(name)
        return module.actors[namespace, name]

    module.get_actor = get_actor
    monkeypatch.setitem(sys.modules, "ray", module)
    monkeypatch.setitem(sys.modules, "ray.util", types.ModuleType("ray.util"))
    monkeypatch.setattr(worlds, "AGAIN", 0.001)
    return module


@pytest.fixture
def joins(monkeypatch):
    """What is joined: ends in the errors given, one after the other, then in a world."""
    seen = types.SimpleNamespace(plans=[], ends=[])

    def join_planned(plan, cancelled):
        seen.plans.append(plan)
        end = seen.ends.pop(0) if seen.ends else None
        if callable(end):
            end = end(cancelled)
        if end is not None:
            raise end
        return "world"

    monkeypatch.setattr(joining, "join_planned", join_planned)
    return seen


def late():
    return mw.JoinTimeoutError("w", "rank 1 did not come")


def test_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(mw.MultiworldError, match=r"pip install 'm8d\[ray\]'"):
        worlds.join("w", 0, 2, STORE)
    with pytest.raises(mw.MultiworldError, match="Ray is not installed"):
        worlds.serve_store()


@pytest.mark.parametrize(
    ("store", "patience"), [("tcp://127.0.0.1:1", 1), (None, 1), (STORE, -1), (STORE, "x")]
)
def test_a_store_is_one_of_rays(ray, store, patience):
    with pytest.raises(mw.InvalidJoinError, match="what serve_store"):
        worlds.join("w", 0, 2, store, patience=patience)


def test_it_is_tried_again_at_the_stores_present_address(ray, joins):
    ray.actors["tests", "store"] = Actor("tcp://a:1", "tcp://b:2")
    joins.ends = [late()]
    assert worlds.join("w", 0, 2, STORE, rejoin=False) == "world"
    assert [plan.store for plan in joins.plans] == ["tcp://a:1", "tcp://b:2"]
    assert all(plan.served for plan in joins.plans)  # no member serves it


def test_a_try_ends_when_the_store_has_moved(ray, joins, monkeypatch):
    monkeypatch.setattr(worlds, "LOOK_EVERY", 0.0)
    ray.actors["tests", "store"] = Actor("tcp://a:1", RayError("restarting"), "tcp://a:1", "tcp://b:2")

    def wait(cancelled):
        assert [cancelled() for _ in range(5)] == [False] * 5  # asked and answered, asked and answered, asked
        assert cancelled()
        return mw.JoinAbandonedError("w", "it was given up")

    joins.ends = [wait]
    assert worlds.join("w", 0, 2, STORE, rejoin=False) == "world"
    assert [plan.store for plan in joins.plans] == ["tcp://a:1", "tcp://b:2"]


def test_when_patience_is_over_the_error_says_why(ray, joins):
    ray.actors["tests", "store"] = Actor("tcp://a:1")
    with pytest.raises(mw.JoinTimeoutError, match="rank 1 did not come"):
        joins.ends = [late()]
        worlds.join("w", 0, 2, STORE, patience=0)

    def given_up(cancelled):
        while not cancelled():
            continue
        return mw.JoinAbandonedError("w", "it was given up")

    joins.ends = [late(), given_up]
    with pytest.raises(mw.JoinTimeoutError, match="rank 1 did not come"):
        worlds.join("w", 0, 2, STORE, patience=0.2)


def test_what_another_member_cannot_cause_is_raised_at_once(ray, joins):
    ray.actors["tests", "store"] = Actor("tcp://a:1")
    joins.ends = [mw.RankTakenError("w", "rank 0 is taken")]
    with pytest.raises(mw.RankTakenError):
        worlds.join("w", 0, 2, STORE)
    assert len(joins.plans) == 1


@pytest.mark.parametrize(
    "actor", [None, Actor(None), Actor(RayError("it died"))], ids=["gone", "slow", "died"]
)
def test_a_store_that_does_not_answer(ray, actor):
    if actor is not None:
        ray.actors["tests", "store"] = actor
    with pytest.raises(mw.StoreUnreachableError, match="the actor 'store' did not tell"):
        STORE.address(timeout=0.01)


def test_no_cluster_is_started_after_a_shutdown(ray, joins, monkeypatch):
    """`ray.get_actor` and actors' methods do so, also in the thread that joins a broken world again."""
    asked = []
    monkeypatch.setattr(worlds, "LOOK_EVERY", 0.0)
    actor = ray.actors["tests", "store"] = Actor("tcp://a:1")
    place = worlds._Place("w", STORE)
    actor.address.remote = lambda: asked.append("address")
    ray.get_actor = lambda *names, **_: asked.append(names)
    ray.is_initialized = lambda: False
    assert not place.moved()
    broken = types.SimpleNamespace(name="w")
    for call in (
        lambda: worlds.join("w", 0, 2, STORE),
        lambda: worlds._rejoin(broken, STORE, lambda: False),
        STORE.address,
    ):
        with pytest.raises(mw.StoreUnreachableError, match="Ray is not initialised"):
            call()
    STORE.end()
    assert asked == []
    assert joins.plans == []


def test_it_travels_as_its_name():
    assert pickle.loads(pickle.dumps(STORE)) == STORE  # noqa: S301  (its own)
