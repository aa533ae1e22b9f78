"""Layouts of classes that cross libraries: compared by compiling a probe twice; nothing is run.

One probe is compiled against the wheel's headers and against the patched ones; sizes, alignments and offsets
are constants in the object files, and read from there. Explicit instantiation may name private classes and
members.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from m8d_build.elf.read import read_constant, read_object
from m8d_build.errors import CheckFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

__all__ = ["ClassProbe", "probe_source", "read_layouts", "same_layouts"]

_TEMPLATES = """
namespace m8d_probe {
template <int I, class T> struct Size { static const unsigned long value[2]; };
template <int I, class T> const unsigned long Size<I, T>::value[2] = {sizeof(T), alignof(T)};
template <int I, auto P> struct Member { static const decltype(P) value; };
template <int I, auto P> const decltype(P) Member<I, P>::value = P;
"""


@dataclass(frozen=True)
class ClassProbe:
    """A class whose layout must not change.

    Attributes:
        name: qualified, "c10d::ProcessGroupNCCL::WorkNCCL"; may be private.
        members: data members whose offset must not change; no references, no bit-fields.
    """

    name: str
    members: tuple[str, ...] = ()


def probe_source(headers: Sequence[str], probes: Sequence[ClassProbe]) -> str:
    """Return a C++17 translation unit whose constants are the layouts.

    Args:
        headers: as they stand between ``<`` and ``>``.
        probes: classes of these headers.
    """
    lines = [f"#include <{header}>" for header in headers]
    lines.append(_TEMPLATES)
    number = 0
    for probe in probes:
        lines.append(f"template struct Size<{number}, {probe.name}>;")
        number += 1
        for member in probe.members:
            lines.append(f"template struct Member<{number}, &{probe.name}::{member}>;")
            number += 1
    lines.append("}  // namespace m8d_probe\n")
    return "\n".join(lines)


def read_layouts(probe: Path, probes: Sequence[ClassProbe]) -> dict[str, int]:
    """Return the layouts an object compiled from :func:`probe_source` holds, in bytes: {"size of c10d::X": 8, ...}.

    Raises:
        ElfInvalid: the object is damaged.
        CheckFailed: a constant is missing.
    """
    definitions = read_object(probe).definitions
    layouts: dict[str, int] = {}
    number = 0

    def constant(template: str, what: str) -> list[int]:
        prefix = f"_ZN9m8d_probe{len(template)}{template}ILi{number}E"
        symbol = next((s for name, s in definitions.items() if name.startswith(prefix)), None)
        if symbol is None or not symbol.size:
            raise CheckFailed(
                f"{probe} has no constant for {what}",
                rule="the probe's source makes one for each class and member",
                next_step="Compile it without link-time optimisation",
            )
        data = read_constant(probe, symbol)
        return [int.from_bytes(data[at : at + 8], "little") for at in range(0, len(data), 8)]

    for wanted in probes:
        size, alignment = constant("Size", wanted.name)
        layouts[f"size of {wanted.name}"] = size
        layouts[f"alignment of {wanted.name}"] = alignment
        number += 1
        for member in wanted.members:
            # The C++ ABI makes a pointer to a data member its offset.
            layouts[f"offset of {wanted.name}::{member}"] = constant("Member", f"{wanted.name}::{member}")[0]
            number += 1
    return layouts


def same_layouts(
    headers: Sequence[str],
    probes: Sequence[ClassProbe],
    compile_probe: Callable[[str, Path], Path],
    *,
    official: Path,
    patched: Path,
) -> dict[str, int]:
    """Check that the patched headers give the classes the layout the wheel's own have, and return it.

    Args:
        headers: to include.
        probes: classes to compare.
        compile_probe: compiles a source text with a folder searched before all others; returns the object.
        official: the wheel's include folder.
        patched: the folder with the patched headers.

    Raises:
        CheckFailed: a size, alignment or offset differs; each is listed.
        CommandFailed: a probe does not compile.
    """
    source = probe_source(headers, probes)
    before = read_layouts(compile_probe(source, official), probes)
    after = read_layouts(compile_probe(source, patched), probes)
    different = [
        f"{what} was {before[what]}, is {after[what]}" for what in before if before[what] != after[what]
    ]
    if different:
        raise CheckFailed(
            f"patched classes have another layout: {'; '.join(different)}",
            rule="code outside the overlay was compiled with the old one",
            next_step="Change the patch so that it adds no member and no virtual function, or use --mode "
            "full",
        )
    return before
