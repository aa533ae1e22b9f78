"""Notes by hand on the page: benchmarks/page/notes.toml."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from benchmarks.figures.figure import Figure

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found,unused-ignore]

NOTES = Path(__file__).with_name("notes.toml")


class BadNotes(Exception):
    """The file says something that nobody would show; the message says what."""


@dataclass(frozen=True)
class Notes:
    """Texts in Markdown.

    Attributes:
        parts: by part.
        figures: by figure's key, or a pattern of keys.
    """

    parts: dict[str, str] = field(default_factory=dict)
    figures: dict[str, str] = field(default_factory=dict)

    def of(self, part: str) -> list[tuple[str, str]]:
        """The texts about a part's figures, with their keys."""
        return [(key, text) for key, text in self.figures.items() if key.split("/")[0] == part]

    def strangers(self, parts: Sequence[str], measured: Mapping[str, Sequence[Figure]]) -> list[str]:
        """The keys of texts about parts that there are not, and about figures that a measured part has not.

        Args:
            parts: all that there are.
            measured: the figures of those that were measured; the texts of the others wait.
        """
        found = [part for part in self.parts if part not in parts]
        for mine in self.figures:
            part = mine.split("/")[0]
            figures = measured.get(part)
            unknown = figures is not None and not any(fnmatchcase(figure.key, mine) for figure in figures)
            if part not in parts or unknown:
                found.append(mine)
        return found


def load(path: Path = NOTES) -> Notes:
    """Read the texts.

    Raises:
        BadNotes: a table other than [parts] and [figures], or a text that is no string.
        tomllib.TOMLDecodeError: not TOML.
        OSError: it cannot be read.
    """
    data = tomllib.loads(path.read_text(encoding="utf-8"))
    unknown = set(data) - {"parts", "figures"}
    if unknown:
        raise BadNotes(f"{path.name}: {sorted(unknown)}: its tables are [parts] and [figures]")
    for table in data.values():
        for key, text in table.items():
            if not isinstance(text, str):
                raise BadNotes(
                    f"{path.name}: {key} = {text!r}: a text is a string; put dotted names in quotes"
                )
    return Notes(**data)
