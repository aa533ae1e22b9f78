from __future__ import annotations

import contextlib
import dataclasses
import gc
import weakref

import pytest

from multiworld._core.lane.operations import SizesDifferError
from multiworld._core.reraise import as_new, not_a_tensor, raise_instead, raised_by_the_program
from multiworld.errors import JoinTimeoutError


class Work:
    """Something an operation worked on."""


@pytest.mark.parametrize("same", [False, True])
def test_an_error_that_stands_is_raised_as_it_is(same):
    error = ValueError("as it was")
    with pytest.raises(ValueError, match="as it was") as raised:
        raise_instead(error, error if same else None)
    assert raised.value is error
    assert raised.value.__cause__ is None


def test_the_other_is_raised_with_the_error_as_its_cause():
    error, other = ValueError("torch's"), KeyError("ours")
    with pytest.raises(KeyError) as raised:
        raise_instead(error, other)
    assert raised.value is other
    assert raised.value.__cause__ is error


@pytest.mark.parametrize(
    "translate", [lambda error: KeyError(str(error)), lambda error: error, lambda error: None]
)
def test_nothing_is_held_once_the_exception_is_gone(translate):
    def operation():
        work = Work()
        kept.append(weakref.ref(work))
        raise ValueError("failed")

    kept: list[weakref.ref[Work]] = []
    gc.disable()  # what only the collector frees counts as held
    try:
        try:
            try:
                operation()
            except ValueError as error:
                raise_instead(error, translate(error))
        except (KeyError, ValueError):
            held = kept[0]() is not None
        assert held, "the traceback holds it as long as the exception is there"
        assert kept[0]() is None
    finally:
        gc.enable()


class Equal(Exception):
    """Equal to every other; not the same."""

    def __eq__(self, other):
        return True

    __hash__ = None


def test_an_equal_error_is_another_one():
    first, better = Equal("first"), Equal("better")
    with pytest.raises(Equal) as caught:
        raise_instead(first, better)
    assert caught.value is better
    assert better.__cause__ is first


def test_what_is_no_tensor_is_said_by_its_value_and_type():
    with pytest.raises(AttributeError) as caught:
        [1, 2].device  # noqa: B018
    error = not_a_tensor(caught.value)
    assert isinstance(error, TypeError)
    assert str(error) == "[1, 2] is a list, and an operation takes a torch.Tensor"


@pytest.mark.parametrize("error", [ValueError("device"), AttributeError("no shape", name="shape", obj=1)])
def test_other_errors_are_no_word_on_tensors(error):
    assert not_a_tensor(error) is None


def late():
    error = JoinTimeoutError("w", "none came", rule="two come", next_step="Start the other")
    error.missing = (1,)
    return error


class OddError(Exception):
    """Takes other arguments than it has."""

    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")
        self.one = one


class Coded(Exception):
    """Makes a text of what it is given."""

    def __init__(self, code):
        super().__init__(f"code {code}")


class OddOSError(OSError):
    def __init__(self, number, text, more):
        super().__init__(number, text)
        self.more = more


@dataclasses.dataclass(frozen=True)
class FrozenError(Exception):
    code: int


class OnlyByNameError(Exception):
    """Cannot be made of its arguments."""

    def __new__(cls, *, code):
        return super().__new__(cls, code)

    def __init__(self, *, code):
        super().__init__(code)


def test_what_cannot_be_copied_is_the_error_itself():
    error = OnlyByNameError(code=1)
    with contextlib.suppress(OnlyByNameError):
        raise error
    assert as_new(error) is error
    assert error.__traceback__ is None


def test_copies_have_notes_of_their_own():
    error = ValueError("it")
    error.__notes__ = ["a"]
    again = as_new(error)
    again.__notes__.append("b")
    assert error.__notes__ == ["a"]


@pytest.mark.parametrize(
    "error",
    [
        ConnectionAbortedError("it is over"),
        OSError(111, "refused"),
        SizesDifferError(5, 4, 1),
        late(),
        OddError(1, 2),
        Coded(5),
        FrozenError(1),
        OddOSError(111, "refused", "more"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_copy_is_as_the_error_and_has_no_frames(error):
    cause = ValueError("why")
    cause.__cause__ = cause  # no end
    with contextlib.suppress(type(error)):
        raise error from cause
    again = as_new(error)
    assert again is not error
    assert (type(again), str(again), again.args) == (type(error), str(error), error.args)
    assert vars(again) == vars(error)
    assert again.__traceback__ is None
    assert (str(again.__cause__), again.__cause__ is cause) == ("why", False)
    assert again.__cause__.__cause__ is None
    if isinstance(error, OSError):
        assert (again.errno, again.strerror) == (error.errno, error.strerror)


@pytest.mark.parametrize(
    ("names", "is_its_own"),
    [
        (["__main__"], True),
        (["__main__", "queue"], True),
        (["a.library", "multiworld"], True),
        (["torch.utils.data._utils.signal_handling"], True),
        (["multiworld._net.x"], False),
        (["torch.distributed", "multiworld", "ssl"], False),
    ],
)
def test_what_a_signals_handler_raises_is_the_programs(names, is_its_own):
    def fails():
        raise TimeoutError

    call = type(fails)(fails.__code__, {"__name__": "multiworld"})
    for name in reversed(names):
        scope = {"__name__": name, "call": call}
        exec("def through(): call()", scope)  # noqa: S102
        call = scope["through"]
    scope = {"__name__": "multiworld.world", "call": call, "seen": []}
    exec("def catches():\n try: call()\n except TimeoutError as error: seen.append(error)", scope)  # noqa: S102
    scope["catches"]()
    assert raised_by_the_program(scope["seen"][0]) is is_its_own
    assert not raised_by_the_program(as_new(scope["seen"][0]))
