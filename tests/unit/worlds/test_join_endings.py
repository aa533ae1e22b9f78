"""After which errors a join begins again where ranks are assigned, and that the others are told the same."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from multiworld._join.arguments import make_plan
from multiworld._join.endings import is_tried_again, told_to_others
from multiworld.errors import (
    BackendError,
    BrokenWorldException,
    JoinAbandonedError,
    JoinTimeoutError,
    StaleGenerationError,
    StoreUnreachableError,
)

STORE = "tcp://127.0.0.1:1"
AGAIN = [
    BrokenWorldException("w", "x"), JoinAbandonedError("w", "x"), JoinTimeoutError("w", "x"),
    StaleGenerationError("w", "x"), StoreUnreachableError("w", "x"),
]  # fmt: skip


def make(store=STORE):
    return make_plan("w", None, "1:3", store, "gloo", 3.0, 3.0, None)


@pytest.mark.parametrize("error", AGAIN, ids=lambda error: type(error).__name__)
def test_a_lost_or_late_member_is_followed_by_another_try(error):
    assert is_tried_again(make(), error, agreed=True)


@pytest.mark.parametrize(
    "error", [BackendError("w", "x"), ValueError("x"), KeyboardInterrupt(), None], ids=repr
)
def test_other_errors_end_the_join(error):
    assert not is_tried_again(make(), error, agreed=True)


def test_a_store_is_looked_for_again_where_it_is_an_address_and_was_there():
    error = StoreUnreachableError("w", "x")
    assert not is_tried_again(make(), error, agreed=False)
    assert not is_tried_again(SimpleNamespace(store=object()), error, agreed=True)


def test_an_interrupt_is_told_as_an_abandoned_join():
    error = ValueError("x")
    assert told_to_others(make(), error) is error
    assert "was interrupted (KeyboardInterrupt)" in str(told_to_others(make(), KeyboardInterrupt()))


@pytest.mark.parametrize(
    ("error", "left"), [*((each, False) for each in AGAIN), (BackendError("w", "x"), True)]
)
def test_the_store_has_a_member_that_tries_again_as_one_that_has_not_left(error, left, monkeypatch):
    pytest.importorskip("torch")
    from multiworld._join import steps

    said = []
    monkeypatch.setattr(steps, "keys_of", lambda *_: ())
    attempt = steps._Attempt(SimpleNamespace(plan=make(), machine=SimpleNamespace(generation=1)))
    attempt.begin(SimpleNamespace(fail=lambda *_, left: said.append(left)))
    attempt.tell(error)
    assert said == [left]
