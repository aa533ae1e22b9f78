"""A nested state as text and a list of tensors, and back: nothing in the text can run anything.

The text is JSON in ASCII. None, booleans, strings and whole numbers below 2^53 stand for themselves; all else
is a list that begins with its kind:

| kind | is followed by |
|---|---|
| "i" | another whole number, hexadecimal |
| "f" | a float, its eight bytes in hexadecimal: infinities, NaNs and signs of zeros stay what they are |
| "b" | bytes, in base64 |
| "l", "t" | the elements of a list, of a tuple |
| "d", "c" | the keys (strings, and whole numbers below 2^53) and values of a dict, of a Counter, in turns |
| "T" | nothing: the next tensor of the list |
"""

from __future__ import annotations

import base64
import json
import re
import struct
from collections import Counter, OrderedDict
from typing import TYPE_CHECKING, Any, NoReturn

from multiworld.errors import StateError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["DEPTH", "Path", "dotted", "flatten", "rebuild"]

DEPTH = 100
"""Containers inside of each other, at most: far below the limit of recursion."""

Path = tuple[str | int, ...]
"""The keys and indexes that lead to a value."""

_SMALL = 1 << 53
_DIGITS = len(str(_SMALL)) + 1  # with a sign
_DOUBLE = struct.Struct(">d")
_WHOLE = re.compile(r"-?[0-9a-f]+")
_EIGHT_BYTES = re.compile(r"[0-9a-f]{16}")


def dotted(path: Path) -> str:
    """Return a path as people read it, ``model.layers.0.weight``."""
    return ".".join(str(each) for each in path) or "the state itself"


def flatten(value: object, is_tensor: Callable[[object], bool]) -> tuple[str, list[tuple[Path, Any]]]:
    """Return the text of a nested value, and its tensors with their paths, in the order of the text.

    Args:
        value: dicts, Counters, lists and tuples of None, bool, int, float, str, bytes and tensors. An
            OrderedDict comes back as a dict; attributes of its own, as ``_metadata`` of a module's state, do
            not travel.
        is_tensor: says whether a value is one.

    Raises:
        StateError: it has something else, or more than `DEPTH` containers inside of each other.
    """
    tensors: list[tuple[Path, Any]] = []

    def node(value: Any, path: Path) -> Any:
        if value is None or type(value) in (bool, str):
            return value
        if type(value) is int:
            return _whole(value)
        if type(value) is float:
            return ["f", _DOUBLE.pack(value).hex()]
        if type(value) is bytes:
            return ["b", base64.b64encode(value).decode()]
        if is_tensor(value):
            tensors.append((path, value))
            return ["T"]
        if len(path) >= DEPTH:
            raise _too_deep(path)
        if type(value) in (list, tuple):
            kind = "l" if type(value) is list else "t"
            return [kind, *(node(each, (*path, at)) for at, each in enumerate(value))]
        if type(value) in (dict, OrderedDict, Counter):  # torch's MultiStepLR has a Counter
            flat: list[Any] = ["c" if type(value) is Counter else "d"]
            for key, each in value.items():
                if not _is_key(key):
                    raise _key_refused(path, key)
                flat += (key, node(each, (*path, key)))
            return flat
        raise _refused(path, value)

    return json.dumps(node(value, ()), separators=(",", ":")), tensors


def rebuild(text: str, tensor: Callable[[Path], Any]) -> Any:
    """Return the value that `flatten` made a text of.

    Args:
        text: from another process; it may be anything. What is built takes memory in proportion to it.
        tensor: called with the path of each tensor, in the order of the text; returns it.

    Raises:
        StateError: no such text.
    """
    try:
        parsed = json.loads(text, parse_int=_small, parse_float=_no_number, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise _damaged(f"it is not the JSON that is expected: {error}") from error
    return _value(parsed, (), tensor)


def _is_key(key: object) -> bool:
    # Larger numbers can be chosen so that all have one hash: a dict of a million of them takes hours.
    return type(key) is str or (type(key) is int and -_SMALL < key < _SMALL)


def _whole(value: int) -> Any:
    return value if -_SMALL < value < _SMALL else ["i", f"{value:x}"]


def _value(node: Any, path: Path, tensor: Callable[[Path], Any]) -> Any:
    if node is None or isinstance(node, bool | int | str):
        return node
    if not isinstance(node, list) or not node or not isinstance(node[0], str):
        raise _damaged(f"{dotted(path)} has no kind")
    kind = node[0]
    if kind in _ATOMS and len(node) == 2 and isinstance(node[1], str):
        return _ATOMS[kind](node[1])
    if kind == "T" and len(node) == 1:
        return tensor(path)
    if len(path) >= DEPTH:
        raise _too_deep(path)
    if kind in ("l", "t"):
        elements = [_value(each, (*path, at), tensor) for at, each in enumerate(node[1:])]
        return elements if kind == "l" else tuple(elements)
    if kind in ("d", "c") and len(node) % 2:
        found: dict[Any, Any] = {} if kind == "d" else Counter()
        _fill(found, node, path, tensor)
        return found
    raise _damaged(f"{dotted(path)} is of kind {kind!r:.20} with {len(node) - 1} elements")


def _fill(found: dict[Any, Any], node: list[Any], path: Path, tensor: Callable[[Path], Any]) -> None:
    for at in range(1, len(node), 2):
        key = node[at]
        if not _is_key(key) or key in found:
            raise _damaged(f"{dotted(path)} has the key {key!r:.80} twice, or it is none")
        found[key] = _value(node[at + 1], (*path, key), tensor)


def _whole_of(text: str) -> int:
    if not _WHOLE.fullmatch(text):
        raise _damaged(f"{text!r:.80} is no whole number")
    return int(text, 16)


def _float_of(text: str) -> float:
    if not _EIGHT_BYTES.fullmatch(text):
        raise _damaged(f"{text!r:.80} is no float")
    (value,) = _DOUBLE.unpack(bytes.fromhex(text))
    return float(value)


def _bytes_of(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except ValueError as error:
        raise _damaged(f"{text!r:.80} are no bytes") from error


_ATOMS: dict[str, Callable[[str], Any]] = {"i": _whole_of, "f": _float_of, "b": _bytes_of}


def _small(digits: str) -> int:
    if len(digits) > _DIGITS:  # Python takes time for them that grows with their square
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)


def _no_number(digits: str) -> NoReturn:
    raise ValueError(f"the number {digits:.80}")


def _refused(path: Path, value: object) -> StateError:
    kind = type(value)
    return StateError(
        f"{dotted(path)} is a {kind.__module__}.{kind.__qualname__}",
        rule="A state that is sent to another member has dict, Counter, list, tuple, None, bool, int, float, "
        "str, bytes and tensors, and none of their subclasses",
        next_step="Leave it out of the state, or put it there as one of these, and make it again from that",
    )


def _key_refused(path: Path, key: object) -> StateError:
    return StateError(
        f"{dotted(path)} has the key {key!r:.80}, a {type(key).__name__}",
        rule="Keys of a state that is sent to another member are str, or int below 2^53",
        next_step="Use such a key, or leave the dict out of the state",
    )


def _too_deep(path: Path) -> StateError:
    return StateError(
        f"{dotted(path[:8])}... has {len(path)} containers inside of each other, or contains itself",
        rule=f"A state that is sent to another member has at most {DEPTH}",
        next_step="Make it flatter",
    )


def _damaged(why: str) -> StateError:
    return StateError(
        f"the description of a state is damaged: {why}",
        rule="It comes whole, from a member of the same version of multiworld",
        next_step="Compare the versions on both hosts, and receive the state again",
    )
