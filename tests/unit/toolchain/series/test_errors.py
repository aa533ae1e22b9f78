from __future__ import annotations

from pathlib import Path

import pytest

from m8d_build import errors
from m8d_build.errors import BuildError, CommandFailed, DiskFull, UnknownVersion
from multiworld.errors import MarkerError, MultiworldError

KINDS = [getattr(errors, name) for name in errors.__all__]


def test_every_kind_of_failure_is_listed():
    defined = {
        value.__name__
        for value in vars(errors).values()
        if isinstance(value, type) and issubclass(value, BuildError)
    }
    assert defined == set(errors.__all__)


def test_exit_codes_are_unique_and_leave_the_common_ones_alone():
    codes = [kind.exit_code for kind in KINDS if kind is not BuildError]
    assert len(set(codes)) == len(codes)
    assert not {0, 1, 2} & set(codes)  # success, a bug, bad arguments
    assert all(code < 126 or code == 130 for code in codes)  # above it, shells have meanings of their own
    assert errors.Interrupted.exit_code == 130


@pytest.mark.parametrize("kind", KINDS)
def test_a_message_says_value_rule_and_next_step(kind):
    error = kind("x is 3", rule="it must be 4.", next_step="Make it 4")
    assert str(error) == "x is 3. it must be 4. Make it 4."
    assert (error.value, error.rule, error.next_step) == ("x is 3", "it must be 4.", "Make it 4")
    assert (error.log, error.tail) == (None, "")
    assert isinstance(error, MultiworldError)


def test_parts_may_be_missing():
    assert str(UnknownVersion("2.0")) == "2.0."


def test_the_log_and_its_last_lines_travel_with_the_error():
    error = CommandFailed("g++ failed", log=Path("out/build.log"), tail="a\nb")
    assert (error.log, error.tail) == (Path("out/build.log"), "a\nb")


def test_every_kind_says_what_it_is_for():
    assert all(kind.__doc__ for kind in KINDS)


def test_the_tree_of_errors_has_one_root():
    assert issubclass(BuildError, MultiworldError)
    assert issubclass(MarkerError, MultiworldError)
    assert not issubclass(MarkerError, BuildError)
    assert all(kind.__mro__[1] is BuildError for kind in KINDS if kind is not BuildError)
    assert DiskFull.exit_code == 30
