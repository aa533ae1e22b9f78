"""The page docs/torch-privates.md: which private names of torch this package uses, where, and what breaks without them."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

from torchprivates.scan import ROOT, methods, read, strings, used

try:
    import tomllib
except ImportError:  # Python 3.10
    import tomli as tomllib  # type: ignore[no-redef]

USES = Path(__file__).with_name("uses.toml")
PAGE = ROOT / "docs" / "torch-privates.md"
_HOW = {
    "replaced": "Replaced while a world exists, and put back when the last one is closed",
    "overridden": "Overridden in subclasses",
    "read": "Read or called",
}
_HEAD = """# Private names of torch

multiworld uses the names below, which torch may change without notice. Each is found in the package's source by
`tests/torchprivates`; a test fails when a name is used that this page does not list, or the other way round.
Written by `python -m torchprivates`; do not edit it by hand.
"""


def uses() -> list[dict[str, Any]]:
    """Return the entries of uses.toml."""
    found: list[dict[str, Any]] = tomllib.loads(USES.read_text())["use"]
    return found


def last(name: str) -> str:
    """Return the last part of a dotted name."""
    return name.rpartition(".")[2]


@functools.cache  # all sources are read
def found() -> tuple[dict[str, list[str]], list[str]]:
    """Return the files in which each listed name is used, and the used names that are not listed.

    A name found in the source is that of an entry where they are equal, or where only the last part was found
    (an attribute of a value) and no listed name is equal.
    """
    entries = uses()
    listed = [name for entry in entries for name in entry["names"]]
    whole, by_last = set(listed), {}
    for name in listed:
        by_last.setdefault(last(name), []).append(name)
    files: dict[str, set[str]] = {name: set() for name in listed}
    strange: list[str] = []
    sources = read()
    overriding = methods(sources)
    for entry in entries:
        if entry["how"] == "overridden":
            for name in entry["names"]:
                files[name] |= overriding.get(last(name), set())
    for name, where in used(sources).items():
        meant = [name] if name in whole else by_last.get(last(name), [])
        for each in meant:
            files[each] |= where
        if not meant and not last(name).startswith("_m8d_"):
            strange.append(f"{name} in {', '.join(sorted(where))}")
    for name in [name for name, where in files.items() if not where]:
        files[name] |= strings(sources, last(name))  # the package has a name of its own that is the same
    return {name: sorted(where) for name, where in files.items()}, sorted(strange)


def text() -> str:
    """Return the page."""
    entries = uses()
    files, _ = found()
    parts = [_HEAD]
    for how, title in _HOW.items():
        parts.append(f"## {title}\n")
        parts += [_section(entry, files) for entry in entries if entry["how"] == how]
    return "\n".join(parts)


def _section(entry: dict[str, Any], files: dict[str, list[str]]) -> str:
    lines = ["| name | used in |", "|---|---|"]
    for name in entry["names"]:
        where = ", ".join(f"`{path.removeprefix('multiworld/')}`" for path in files[name])
        lines.append(f"| `{name}` | {where} |")
    lines += ["", f"{entry['why']}", "", f"- Without it: {_lowered(entry['breaks'])}"]
    lines.append(f"- Where it is missing: {_lowered(entry['guard'])}")
    if library := entry.get("library"):
        lines.append(f"- Of: {library}")
    if seen := entry.get("seen"):
        lines.append(f"- Seen in torch {', '.join(seen)}")
    if lacking := entry.get("lacking"):
        lines += [
            f"- torch {version} lacks {', '.join(f'`{n}`' for n in names)}"
            for version, names in lacking.items()
        ]
    return "\n".join(lines) + "\n"


def _lowered(sentence: str) -> str:
    first = sentence.split(" ", 1)[0]
    plain = re.fullmatch(r"[A-Z]?[a-z,]+", first) is not None
    return sentence[0].lower() + sentence[1:] if plain else sentence
