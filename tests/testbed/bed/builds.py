"""The builds of torch that tests run on: named on the command line, asked what they are."""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bed.errors import BedError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from bed.rank import Rank
    from bed.ranks import Launcher

__all__ = ["BACKENDS", "Build", "ask", "parse_named"]

# Every name that some version of torch has for NCCL.
BACKENDS = ("nccl", "nccl-legacy", "nccl2", "nccl-lazy")
LEGACY = "ProcessGroupNCCL"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*")


@dataclass(frozen=True)
class Build:
    """What a build of torch is, as it says itself.

    Attributes:
        name: what the command line calls it.
        python: its interpreter.
        torch: "2.6.0+cu124.m8d2".
        cuda: "12.4".
        nccl: the version its libraries were compiled with, "2.21.5".
        patches: those in it, each by topic and SHA-256; () for a stock build.
        backends: the names it has for NCCL, and the class behind each.
    """

    name: str
    python: Path
    torch: str
    cuda: str
    nccl: str
    patches: tuple[tuple[str, str], ...]
    backends: dict[str, str]

    @property
    def topics(self) -> tuple[str, ...]:
        """Of its patches, in the order of the series."""
        return tuple(topic for topic, _ in self.patches)

    @property
    def patched(self) -> bool:
        """Whether the build is one of ours."""
        return bool(self.patches)

    @property
    def nccl_default_is(self) -> str:
        """Which implementation the name ``nccl`` means: "legacy" or "nccl2"."""
        return "legacy" if self.backends["nccl"] == LEGACY else "nccl2"


def parse_named(given: Iterable[str], *, option: str = "--bed") -> dict[str, Path]:
    """Return the interpreters of ``--bed NAME=PYTHON`` by name.

    Raises:
        BedError: one is written differently, is named twice, or is no file.
    """
    found: dict[str, Path] = {}
    for text in given:
        name, equals, path = text.partition("=")
        if not equals or not path or not _NAME.fullmatch(name):
            raise BedError(
                f"{option} {text}",
                rule="it is NAME=PYTHON: letters, digits and ._+- =the path of an interpreter",
                next_step=f"Write for example {option} stock-2.14.1=/path/to/venv/bin/python",
            )
        if name in found:
            raise BedError(
                f"{option} names {name} twice",
                rule="each build has a name of its own",
                next_step="Rename one",
            )
        if not Path(path).expanduser().is_file():
            raise BedError(
                f"{option} {text}: there is no such file",
                rule="it names an interpreter",
                next_step="Correct the path",
            )
        # Not resolved: a virtual environment's interpreter is a link, and only the link knows its packages.
        found[name] = Path(path).expanduser().absolute()
    return found


def ask(name: str, launcher: Launcher) -> Build:
    """Return what a build is, from a rank that looks; the launcher learns whether it is official torch."""
    with launcher.start("bed.builds:look", 1, config={"exit": "hard"}) as ranks:
        (told,) = ranks.wait("looks")
    facts = told.fields
    found = Build(
        name,
        launcher.python,
        facts["torch"],
        facts["cuda"],
        facts["nccl"],
        tuple((topic, sha256) for topic, sha256 in facts["patches"]),
        facts["backends"],
    )
    launcher.official = not found.patched
    return found


def look(me: Rank) -> None:
    """In a rank: make a group with every name there is for NCCL, and tell what came of it."""
    import torch
    import torch.distributed as dist

    backends: dict[str, str] = {}
    for name in BACKENDS:
        with contextlib.suppress(ValueError, RuntimeError, KeyError, AttributeError, AssertionError):
            me.init(name)
            backends[name] = type(dist.group.WORLD._get_backend(me.device)).__name__
        if dist.is_initialized():
            dist.destroy_process_group()
    me.event(
        "looks",
        torch=torch.__version__,
        cuda=torch.version.cuda,
        nccl=".".join(map(str, torch.cuda.nccl.version())),
        patches=_patches(Path(torch.__file__).with_name("m8d.json")),
        backends=backends,
    )


def _patches(marker: Path) -> list[Any]:
    """Return topic and SHA-256 of each patch."""
    from multiworld.shim.marker import parse_marker

    if not marker.is_file():
        return []
    return [[topic.name, topic.sha256] for topic in parse_marker(marker.read_bytes()).topics]
