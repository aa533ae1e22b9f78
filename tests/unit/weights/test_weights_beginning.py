"""How trainers and engines begin: after one that was not closed, where Ctrl-C comes, where a store has moved."""

from __future__ import annotations

import itertools
import queue
import threading
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

import multiworld as mw  # noqa: E402  (torch may be missing)
from multiworld import weights  # noqa: E402
from multiworld.weights import announcing, one_end, publisher, subscriber  # noqa: E402

WITHIN = 30.0
"""Seconds, of what comes at once."""


def ended(end):
    for thread in end._threads:
        thread.join(WITHIN)
    return not any(thread.is_alive() for thread in end._threads)


def test_a_newer_publisher_ends_the_one_that_was_not_closed(caplog):
    """It would take engines off the list, which would stay ready with its last version."""
    store = torch.distributed.HashStore()
    first = weights.Publisher("policy", {}, store)
    other = weights.Publisher("another", {}, store)
    second = weights.Publisher("policy", {}, store)
    try:
        assert first._closed.wait(WITHIN)
        assert ended(first)
        assert "'policy' is closed: a newer one of that name has begun" in caplog.text
        with pytest.raises(ValueError, match="is closed"):
            first.publish(1)
        listed = announcing.Announcements(
            "policy", store, serve=False, timeout=WITHIN, cancelled=lambda: False
        )
        store.delete_key(listed._holder)  # as in a store that was started again
        store.wait([listed._holder])
        assert listed.holder("third") == second._session
        assert not second._closed.is_set()
        assert not other._closed.is_set()
    finally:
        for each in (first, other, second):
            assert each.close()


def test_a_process_has_one_end_of_some_weights(monkeypatch):
    """Its join of the world that it is in already would fail again and again, and the engine wait in vain."""
    store = torch.distributed.HashStore()
    for one, two in itertools.permutations([weights.Publisher, weights.Subscriber]):
        first = one("w", {}, store)
        other = two("another", {}, store)
        try:
            with pytest.raises(
                mw.InvalidJoinError, match=f"a {two.__name__} of weights 'w' beside their {one.__name__}"
            ):
                two("w", {}, store)
            if two is weights.Publisher:
                two("w", {}, store, rank=1).close()  # it joins no engine's world
            with monkeypatch.context() as patch:
                patch.setattr(one_end, "os", SimpleNamespace(getpid=lambda: -1))  # in a forked child
                in_the_child = two.__new__(two)
                in_the_child.name = "w"
                one_end.begin(in_the_child)
        finally:
            assert first.close()
            assert other.close()
        assert two("w", {}, store).close()


def test_a_relay_has_both_ends_of_one_name_in_two_stores():
    taken = weights.Subscriber("w", {}, torch.distributed.HashStore())
    given = weights.Publisher("w", {}, torch.distributed.HashStore())
    assert given.close()
    assert taken.close()


def test_a_publisher_that_could_not_begin_is_no_end(monkeypatch):
    store = torch.distributed.HashStore()

    def fails(_):
        raise mw.JoinError("w", "no store", rule="", next_step="")

    with monkeypatch.context() as patch:
        patch.setattr(weights.Publisher, "_open", fails)
        with pytest.raises(mw.JoinError, match="no store") as kept:
            weights.Publisher("w", {}, store)
    assert weights.Subscriber("w", {}, store).close()
    assert kept.value.__traceback__ is not None


@pytest.mark.parametrize("end", [weights.Publisher, weights.Subscriber])
@pytest.mark.parametrize("error", [KeyboardInterrupt("Ctrl-C"), RuntimeError("can't start new thread")])
def test_a_beginning_that_is_interrupted_leaves_no_thread(monkeypatch, end, error):
    """One that makes known an engine, or serves engines, would do so for good."""
    made, start = [], threading.Thread.start

    def interrupted(thread):
        if not thread.name.startswith("m8d-weights-"):
            start(thread)
            return
        made.append(thread)
        if isinstance(error, KeyboardInterrupt):
            start(thread)
        raise error

    store = torch.distributed.HashStore()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(type(error), match=str(error)):
            end("w", {}, store)
    (thread,) = made
    if thread.ident is not None:
        thread.join(WITHIN)
    assert not thread.is_alive()


def test_trainer_and_engine_ask_again_where_a_store_is_that_moves(monkeypatch):
    """An engine that makes itself known at the new address would be served by no trainer."""

    class Moving(torch.distributed.HashStore):
        gone = False

        def compare_set(self, *arguments):
            if self.gone:
                raise RuntimeError("the server is gone")
            return super().compare_set(*arguments)

    before, after = Moving(), Moving()
    present, plans, serves, opened = [before], queue.Queue(), [], announcing.open_in_time

    def open_in_time(store, *, serve, **options):
        serves.append(serve)
        return opened(store, serve=serve, **options)

    def join_planned(plan, _cancelled):
        plans.put(plan)
        raise mw.JoinTimeoutError(plan.name, "it did not come")

    monkeypatch.setattr(announcing, "open_in_time", open_in_time)
    monkeypatch.setattr(publisher, "AGAIN", 0.01)
    monkeypatch.setattr(one_end, "begin", lambda _end: None)  # as in two processes
    for end in (publisher, subscriber):
        monkeypatch.setattr(end, "join_planned", join_planned)
    ends = [weights.Publisher("w", {}, lambda: present[0])]
    try:
        present[:], before.gone = [after], True
        ends.append(weights.Subscriber("w", {}, lambda: present[0], seat="engine"))
        seen = set()
        while seen != {0, 1}:
            plan = plans.get(timeout=WITHIN)
            assert plan.store is after
            assert plan.served, "rank 0 would serve the address itself"
            seen.add(plan.rank)
        assert not any(serves)
    finally:
        for each in ends:
            assert each.close()
