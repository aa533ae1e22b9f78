"""Steps that are all taken, whatever becomes of one of them."""

from __future__ import annotations

import gc
import weakref

import pytest

from multiworld._generation.every_step import take_all, take_from


def failing(error):
    def step():
        raise error

    return step


def test_steps_are_taken_in_order():
    taken = []
    take_all("w", *(lambda each=each: taken.append(each) for each in range(3)))
    assert taken == [0, 1, 2]
    take_all("w")


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt, SystemExit])
def test_an_error_is_raised_when_the_rest_is_done(kind):
    taken = []
    with pytest.raises(kind, match="the first"):
        take_all(
            "w", lambda: taken.append("before"), failing(kind("the first")), lambda: taken.append("after")
        )
    assert taken == ["before", "after"]


def test_the_first_error_is_raised_and_the_others_are_logged(caplog):
    taken = []
    with pytest.raises(KeyboardInterrupt):
        take_all(
            "w", failing(KeyboardInterrupt()), failing(ValueError("later")), lambda: taken.append("after")
        )
    assert taken == ["after"]
    (record,) = caplog.records
    assert "world 'w'" in record.getMessage()
    assert str(record.exc_info[1]) == "later"


def test_ctrl_c_as_a_step_is_taken_from_the_list_loses_none():
    class Interrupted(list):
        def pop(self, *args):
            super().pop(*args)
            raise KeyboardInterrupt

        def __delitem__(self, index):
            super().__delitem__(index)
            if not taken and len(self) == 1:
                taken.append("interrupted")
                raise KeyboardInterrupt

    taken = []
    with pytest.raises(KeyboardInterrupt):
        take_from("w", Interrupted(["first", "second"]), taken.append, {"first", "second"})
    assert taken == ["interrupted", "first", "second"]


def test_a_step_that_ctrl_c_may_have_cut_short_is_taken_once_more():
    taken = []

    def take(step):
        taken.append(step)
        if step in {"interrupted", "waits"}:
            raise KeyboardInterrupt
        if step == "fails":
            raise ValueError

    left = ["before", "interrupted", "waits", "fails", "after"]
    with pytest.raises(KeyboardInterrupt):
        take_from("w", left, take, {"interrupted", "fails"})
    assert (left, taken) == ([], ["before", "interrupted", "interrupted", "waits", "fails", "after"])


def test_an_error_is_held_by_none_of_the_frames_that_it_went_through():
    class OwnError(Exception):
        pass

    def step():
        raise OwnError

    gc.disable()
    try:
        try:
            take_all("w", step, lambda: None)
        except OwnError as error:
            gone = weakref.ref(error)
        assert gone() is None
    finally:
        gc.enable()
