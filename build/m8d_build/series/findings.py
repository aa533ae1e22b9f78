"""Findings of ``verify``: one broken rule, and where."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Finding", "summary"]

SHOWN = 12


@dataclass(frozen=True, order=True)
class Finding:
    """One broken rule.

    Attributes:
        patch: file name the finding is about ("0001-topic.patch", "series", "targets.toml").
        line: 1-based line in that file, 0 where the whole file is meant.
        code: short stable name of the rule, for programs ("crlf", "fuzz", "overlap").
        message: what was found and what it should be.
    """

    patch: str
    line: int
    code: str
    message: str

    def __str__(self) -> str:
        where = f"{self.patch}:{self.line}" if self.line else self.patch
        return f"{where}: {self.message} [{self.code}]"

    def as_json(self) -> dict[str, str | int]:
        """Return it as a mapping of plain values."""
        return asdict(self)


def summary(findings: Sequence[Finding]) -> str:
    """Return the findings one per line, cut after the first dozen."""
    lines = [str(finding) for finding in findings[:SHOWN]]
    if len(findings) > SHOWN:
        lines.append(f"and {len(findings) - SHOWN} more")
    return "\n".join(lines)
