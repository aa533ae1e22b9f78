"""The library's exceptions: what they say, what they are, and that they can travel."""

from __future__ import annotations

import copy
import pickle

import pytest

from multiworld import errors
from multiworld.errors import BrokenWorldException, JoinError, MultiworldError, WorldError

KINDS = [getattr(errors, name) for name in errors.__all__]
BUILTIN = {
    "UnknownWorldError": KeyError,
    "WrongDeviceError": ValueError,
    "InvalidJoinError": ValueError,
    "JoinTimeoutError": TimeoutError,
    "StoreUnreachableError": ConnectionError,
    "StoreBindError": OSError,
}


def make(kind):
    if kind is BrokenWorldException:
        return kind("w1", "rank 2 is silent", generation=3, cause="hung", ranks=[2])
    if issubclass(kind, WorldError):
        return kind("w1", "x is 3", rule="It is 4", next_step="Make it 4.")
    return kind("x is 3", rule="It is 4", next_step="Make it 4.")


def pickled(protocol):
    return lambda error: pickle.loads(pickle.dumps(error, protocol))  # noqa: S301  (made right here)


@pytest.mark.parametrize("kind", KINDS)
def test_they_say_value_rule_and_next_step(kind):
    error = make(kind)
    expected = (
        "w1 broken: rank 2 is silent" if kind is BrokenWorldException else "x is 3. It is 4. Make it 4."
    )
    assert str(error) == expected
    assert isinstance(error, MultiworldError)
    assert issubclass(kind, JoinError) <= hasattr(error, "world")
    assert isinstance(error, BUILTIN.get(kind.__name__, Exception))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("travel", [copy.copy, copy.deepcopy, *(pickled(protocol) for protocol in range(6))])
def test_they_cross_process_boundaries_whole(kind, travel):
    error = make(kind)
    twin = travel(error)
    assert type(twin) is kind
    assert twin is not error
    assert str(twin) == str(error)
    assert vars(twin) == vars(error)
    assert twin.args == error.args


def test_pymultiworlds_exception_takes_what_it_took():
    error = BrokenWorldException("world1", "exception raised by watchdog")
    assert str(error) == "world1 broken: exception raised by watchdog"
    assert (error.world, error.detail, error.generation, error.cause, error.ranks) == (
        "world1", "exception raised by watchdog", 0, "failed", (),
    )  # fmt: skip


def test_all_are_listed():
    defined = {
        value.__name__
        for value in vars(errors).values()
        if isinstance(value, type) and issubclass(value, MultiworldError)
    }
    assert defined == set(errors.__all__)
    assert all(kind.__name__ in (errors.__doc__ or "") for kind in KINDS)
