"""``python -m multiworld doctor``: abilities of this torch, how far faults are managed, the next step."""

from __future__ import annotations

import json
import textwrap
from typing import TYPE_CHECKING

from multiworld._core.nccl_policy import Mode
from multiworld.cli.console import say
from multiworld.errors import ShimError
from multiworld.provenance.statement import ported_words
from multiworld.shim.report import status

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable

    from multiworld._c10d.capabilities import BackendAbility
    from multiworld.shim.report import Status

__all__ = ["SUMMARY", "UNSOUND", "configure_parser", "execute", "lines_of"]

SUMMARY = "tell what this torch can do, and how far faults of NCCL worlds are managed"

UNSOUND = 1
"""Exit code where torch is missing or broken, or its marker and its library disagree."""

_WIDTH = 100


def configure_parser(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.description = f"{SUMMARY[0].upper()}{SUMMARY[1:]}. Sets nothing, builds nothing, looks for no GPU."
    parser.add_argument("--json", action="store_true", help="print JSON")


def execute(args: argparse.Namespace) -> int:
    """Run the command; return its exit code."""
    try:
        found = status()
    except ShimError as error:
        if args.json:
            say(json.dumps({"error": str(error), "sound": False}, indent=1))
        else:
            say(f"torch cannot be used: {error}")
        return UNSOUND
    if args.json:
        say(json.dumps({**found.as_dict(), "sound": found.sound}, indent=1, sort_keys=True))
    else:
        say("\n".join(lines_of(found)))
    return 0 if found.sound else UNSOUND


def lines_of(found: Status) -> list[str]:
    """Return the report for people, line by line."""
    torch = found.torch
    made_for = f"CUDA {torch.cuda}" if torch.cuda else f"ROCm {torch.hip}" if torch.hip else "CPU only"
    nccl = f", NCCL {torch.nccl}" if torch.nccl else ""
    return [
        f"multiworld {found.multiworld}",
        *_clash(found),
        f"torch      {torch.version} ({made_for}{nccl}), commit {torch.git[:12] or 'unknown'}",
        f"           {torch.folder}",
        *_patches(found),
        *_loader(found),
        f"router     {'on' if found.router else 'off; joining a world turns it on'}",
        "",
        *_backends(found.backends),
        "",
        *_nccl(found),
    ]


def _clash(found: Status) -> Iterable[str]:
    if found.clash is not None:
        yield from _wrapped(
            f"{found.clash.says}. {found.clash.next_step}.", "           ", first="CLASH      "
        )


def _patches(found: Status) -> Iterable[str]:
    patched = found.patched
    if not patched.marked:
        yield "patches    none: an official build"
        return
    yield f"patches    {', '.join(patched.topics) or 'unknown'} ({patched.mode or 'no'} build {patched.version})".rstrip()
    if patched.ported_from:
        yield f"           PORTED {ported_words(patched.ported_from)}: check-wheel shows what of it holds"
    if patched.disagreements:
        yield "           THE BUILD CONTRADICTS ITSELF; install the patched wheel again, or the official one:"
        for line in patched.disagreements:
            yield from _wrapped(line, "             ")
    else:
        yield "           torch/m8d.json and the library agree"
        yield (
            f"           its {patched.built_files} changed files are as built"
            if patched.built_files is not None
            else "           its wheel has no provenance statement: an older toolchain made it"
        )


def _loader(found: Status) -> Iterable[str]:
    loader = found.loader
    if found.loader_error:
        yield from _wrapped(found.loader_error, "           ", first="namespace  ")
        return
    if loader is None:
        yield "namespace  torch was not installed from a wheel: use the package `multiworld` itself"
        return
    yield from _wrapped(f"{loader.says}. {loader.next_step}".strip(), "           ", first="namespace  ")


def _backends(abilities: tuple[BackendAbility, ...]) -> Iterable[str]:
    if not abilities:
        yield "This torch has no torch.distributed."
        return
    head = ("backend", "class", "remote error", "abort", "survives", "reconfigure")
    rows = [
        (
            each.name,
            each.implementation or "?",
            _yes(each.remote_error),
            each.abort or "-",
            each.survive or "?",
            _yes(each.reconfigure),
        )
        for each in abilities
        if each.available
    ]
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    for row in (head, *rows):
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
    missing = [each.name for each in abilities if not each.available]
    if missing:
        yield f"not in this build: {', '.join(missing)}"


def _nccl(found: Status) -> Iterable[str]:
    nccl = found.nccl
    yield from _wrapped(f"NCCL fault management: {nccl.mode}: {nccl.reason}.", first="")
    if nccl.environment:
        yield "  set before the first NCCL world:"
        for name, value in nccl.environment:
            yield f"    {name}={value}"
    for each in nccl.overrides:
        yield from _wrapped(f"{each.name}={each.value} is set: {each.effect}.", "    ", first="  ")
    for note in nccl.notes:
        yield from _wrapped(f"{note}.", "    ", first="  ")
    if nccl.remaining:
        yield "  what remains wrong:" if nccl.mode is not Mode.ON else "  what remains, and ends no process:"
        for defect in nccl.remaining:
            yield from _wrapped(f"{defect.id}  {defect.text}", "        ", first="    ")
    if nccl.next_step:
        yield from _wrapped(f"{nccl.next_step}.", "  ", first="  ")


def _wrapped(text: str, indent: str = "  ", *, first: str | None = None) -> list[str]:
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=indent if first is None else first,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _yes(value: bool | None) -> str:
    return "?" if value is None else "yes" if value else "no"
