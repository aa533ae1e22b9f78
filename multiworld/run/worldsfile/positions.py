"""Line numbers of a TOML text's keys, found by parsing it statement by statement with tomllib."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found,unused-ignore]

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Positions"]

_TOKENS = re.compile(
    r'''"""(?:\\.|[^\\])*?"{3,5}|'{3}.*?'{3,5}|"(?:\\.|[^"\\\n])*"|'[^'\n]*'|\#[^\n]*|[\[\]{}\n]''', re.DOTALL
)
"""Strings and comments, in which brackets and ends of lines have no meaning; and those that have one."""


class Positions:
    """Lines of the keys of a TOML text.

    Args:
        text: valid TOML.
    """

    def __init__(self, text: str) -> None:
        text = text.replace("\r\n", "\n")
        self._lines = text.split("\n")
        self._spans: dict[tuple[str, ...], tuple[int, int]] = {}
        table: tuple[str, ...] = ()
        for first, last, said in _statements(text):
            paths = list(_paths(said))
            if self._lines[first].lstrip().startswith("["):
                table = paths[-1]
            else:
                paths = [(*table, *path) for path in paths]
            for path in paths:
                self._spans.setdefault(path, (first, last))

    def line(self, *path: str) -> int:
        """Return the line of a key, or of the nearest table around it; 1 is the first, 0 means none."""
        for end in range(len(path), 0, -1):
            if path[:end] in self._spans:
                return self._spans[path[:end]][0] + 1
        return 0

    def line_of(self, text: str, *path: str) -> int:
        """Return the line of a string within a key's value; the key's line if it is not found there."""
        first, last = self._spans.get(path, (0, -1))
        for number in range(first, last + 1):
            if f'"{text}"' in self._lines[number] or f"'{text}'" in self._lines[number]:
                return number + 1
        return self.line(*path)


def _statements(text: str) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Yield each statement's first and last line, counted from 0, and its own value."""
    begin = first = last = depth = 0
    for token in _TOKENS.finditer(text + "\n"):
        found = token.group()
        depth += (found in {"[", "{"}) - (found in {"]", "}"})
        if found == "\n" and depth == 0:
            said = _read(text[begin : token.start()])
            if said:
                yield first, last, said
            begin, first = token.end(), last + 1
        last += found.count("\n")


def _read(text: str) -> dict[str, Any]:
    try:
        said: dict[str, Any] = tomllib.loads(text)
    except (ValueError, RecursionError):  # without it a message only has no line number
        return {}
    return said


def _paths(said: Any, at: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    if isinstance(said, list) and at and len(said) == 1:  # a header in double brackets
        said = said[0]
    if isinstance(said, dict):
        for key, inner in said.items():
            yield (*at, key)
            yield from _paths(inner, (*at, key))
