"""The report of check-wheel: outcome beside expectation, as a table, as JSON, as an error."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from m8d_build.errors import BehaviourFailed

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from m8d_build.check.cases import Case
    from m8d_build.check.jobs import Observed

__all__ = ["Report", "Result", "judge"]

SCHEMA = 1
NOT_RUN = "not run"
BLANK = "-"


@dataclass(frozen=True)
class Result:
    """One check.

    Attributes:
        name: of the case.
        shows: what a good outcome means.
        expected_stock, stock: outcomes; None where the case has none, or there was no stock environment.
        expected_patched, patched: outcomes; None where the case has none.
        stock_seconds, patched_seconds: how long the probes took; 0.0 where none ran.
        details: what the probes told beyond their outcome, by kind of environment.
    """

    name: str
    shows: str
    expected_stock: str | None
    stock: str | None
    expected_patched: str | None
    patched: str | None
    stock_seconds: float = 0.0
    patched_seconds: float = 0.0
    details: Mapping[str, Any] | None = None

    @property
    def ok(self) -> bool:
        """Whether every outcome that was observed is the expected one, and the patched one was observed."""
        stock = self.stock is None or self.stock == self.expected_stock
        return stock and self.patched == self.expected_patched

    @property
    def seconds(self) -> float:
        """How long the probes took in both environments."""
        return self.stock_seconds + self.patched_seconds

    def failures(self) -> tuple[str, ...]:
        """Return what is wrong, one line each."""
        found = []
        if self.stock is not None and self.stock != self.expected_stock:
            found.append(f"{self.name}: stock: {self.stock}; expected: {self.expected_stock}")
        if self.patched != self.expected_patched:
            found.append(
                f"{self.name}: patched: {self.patched or NOT_RUN}; expected: {self.expected_patched}"
            )
        return tuple(found)


@dataclass(frozen=True)
class Report:
    """Everything that was checked of one wheel.

    Attributes:
        wheel: the file.
        sha256: of the file.
        version: torch's, with the local label.
        topics: of its marker.
        stock: what the stock environment holds ("torch 2.6.0+cu124"); "" if there was none.
        results: in the order they are shown.
        seconds: from start to end, installing included.
    """

    wheel: Path
    sha256: str
    version: str
    topics: tuple[str, ...]
    stock: str
    results: tuple[Result, ...]
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether every check came out as expected."""
        return all(result.ok for result in self.results)

    def require_ok(self, log: Path | None = None) -> None:
        """Raise if a check failed.

        Raises:
            BehaviourFailed: it lists every failure.
        """
        failures = [line for result in self.results for line in result.failures()]
        if failures:
            bad = sum(not result.ok for result in self.results)
            raise BehaviourFailed(
                f"{self.wheel.name}: {bad} of {len(self.results)} checks failed",
                rule="the patched wheel must behave as patched, and the stock one must show what was wrong",
                next_step="The log has what every probe wrote",
                log=log,
                tail="\n".join(failures),
            )

    def as_json(self) -> dict[str, Any]:
        """Return the report as JSON-ready data; the meaning of its keys stays within a schema."""
        return {
            "schema": SCHEMA,
            "wheel": str(self.wheel),
            "sha256": self.sha256,
            "version": self.version,
            "topics": list(self.topics),
            "stock": self.stock or None,
            "ok": self.ok,
            "seconds": round(self.seconds, 1),
            "checks": [
                {
                    "name": result.name,
                    "shows": result.shows,
                    "ok": result.ok,
                    "stock": result.stock,
                    "expected_stock": result.expected_stock,
                    "patched": result.patched,
                    "expected_patched": result.expected_patched,
                    "stock_seconds": round(result.stock_seconds, 1),
                    "patched_seconds": round(result.patched_seconds, 1),
                    "details": dict(result.details or {}),
                }
                for result in self.results
            ],
        }

    def as_table(self) -> Table:
        """Return the report as a table for a terminal: a line of outcomes a check, and below it what it shows."""
        table = Table(box=None, pad_edge=False)
        for heading in ("check", "stock", "patched", "ok"):
            table.add_column(heading, overflow="fold")
        table.add_column("s", justify="right")
        for result in self.results:
            table.add_row(
                f"[bold]{result.name}[/]\n[dim]{result.shows}[/]",
                Text(result.stock or BLANK),
                Text(result.patched or BLANK),
                Text("yes", style="green") if result.ok else Text("NO", style="bold red"),
                f"{result.seconds:.1f}",
            )
        return table


def judge(case: Case, stock: Observed | None, patched: Observed | None) -> Result:
    """Return the result of a case from what was observed in each environment (None: nothing was run there)."""
    details = {
        kind: dict(seen.details)
        for kind, seen in (("stock", stock), ("patched", patched))
        if seen is not None and seen.details
    }
    return Result(
        name=case.name,
        shows=case.shows,
        expected_stock=case.stock,
        stock=stock.outcome if stock else None,
        expected_patched=case.patched,
        patched=patched.outcome if patched else None,
        stock_seconds=stock.seconds if stock else 0.0,
        patched_seconds=patched.seconds if patched else 0.0,
        details=details,
    )
