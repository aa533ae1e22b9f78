"""Errors of the toolchain, each with an exit code of its own (a test holds them unique).

0 is success, 1 an unexpected error (a bug), 2 wrong arguments (argparse), 130 Ctrl-C; after SIGTERM or SIGHUP
it is 128 and the signal's number, 143 or 129.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from multiworld.errors import MultiworldError

if TYPE_CHECKING:
    from pathlib import Path

__all__ = [
    "AlreadyApplied", "AlreadyGrafted", "BehaviourFailed", "BlobMismatch", "BuildBusy", "BuildError",
    "CheckFailed", "CommandFailed", "CompilerMissing", "DirtyTree", "DiskFull", "ElfInvalid", "Interrupted",
    "NotApplied", "OutputUnwritable", "PatchRejected", "PortConflict", "PreflightFailed",
    "PrerequisiteMissing", "SourceUnreachable", "UnknownVersion", "WheelAlreadyPatched", "WheelInvalid",
    "WheelMismatch", "WheelUnreachable", "WrongTree",
]  # fmt: skip


class BuildError(MultiworldError):
    """Base of the toolchain's errors.

    Args:
        value: what was found.
        rule: what it should have been.
        next_step: what to do about it.
        log: the full log of the step that failed, if there is one.
        tail: the last lines of that log, shown below the message.
    """

    exit_code: ClassVar[int] = 1

    def __init__(
        self, value: str, *, rule: str = "", next_step: str = "", log: Path | None = None, tail: str = ""
    ) -> None:
        super().__init__(value, rule=rule, next_step=next_step)
        self.log = log
        self.tail = tail


class UnknownVersion(BuildError):
    """No target has this torch version."""

    exit_code = 10


class SourceUnreachable(BuildError):
    """None of the places PyTorch's sources can come from worked."""

    exit_code = 11


class BlobMismatch(BuildError):
    """A source file is not the one the target names (its git blob id differs)."""

    exit_code = 12


class PatchRejected(BuildError):
    """A patch series breaks a rule: order, fuzz, overlap, encoding, header."""

    exit_code = 13


class DirtyTree(BuildError):
    """The source tree has changes that are not ours."""

    exit_code = 14


class WrongTree(BuildError):
    """The source tree is of another PyTorch version, or no PyTorch tree at all."""

    exit_code = 15


class AlreadyApplied(BuildError):
    """The series is in this tree already."""

    exit_code = 16


class NotApplied(BuildError):
    """There is nothing to revert or export: the tree has no receipt, or was changed after it."""

    exit_code = 17


class WheelMismatch(BuildError):
    """The wheel is of another torch version, Python, platform or CUDA than the target's."""

    exit_code = 20


class WheelAlreadyPatched(BuildError):
    """The wheel carries our marker already."""

    exit_code = 21


class WheelInvalid(BuildError):
    """The wheel is corrupted, truncated, or its RECORD does not hold."""

    exit_code = 22


class ElfInvalid(BuildError):
    """A shared library is corrupted, truncated, or of a kind the editor does not handle."""

    exit_code = 23


class AlreadyGrafted(BuildError):
    """The library has been grafted before."""

    exit_code = 24


class WheelUnreachable(BuildError):
    """The official wheel, or a package it needs, could not be downloaded."""

    exit_code = 25


class DiskFull(BuildError):
    """Not enough room, found before the step or while it wrote."""

    exit_code = 30


class OutputUnwritable(BuildError):
    """The output folder cannot be made or written."""

    exit_code = 31


class BuildBusy(BuildError):
    """Another build works in this folder."""

    exit_code = 32


class CompilerMissing(BuildError):
    """No usable C++ compiler."""

    exit_code = 33


class PrerequisiteMissing(BuildError):
    """A header, library or tool the build needs is not there."""

    exit_code = 34


class CommandFailed(BuildError):
    """A program the build runs failed, or ran past its time."""

    exit_code = 35


class CheckFailed(BuildError):
    """The library that was built is not a drop-in for the one it replaces."""

    exit_code = 36


class PortConflict(BuildError):
    """A patch does not carry over to the other version; both sides are shown."""

    exit_code = 40


class PreflightFailed(BuildError):
    """This machine cannot do the full build; every reason is listed."""

    exit_code = 41


class BehaviourFailed(BuildError):
    """The patched wheel does not behave as patched, or a build does not pass the test bed's tests."""

    exit_code = 42


class Interrupted(BuildError):
    """Ctrl-C; the next run goes on from the last finished step."""

    exit_code = 130
