"""Records of made-up runs, a launcher that starts nothing, and interpreters that only answer."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hardware.records import Check, Column, Run
from matrix.outcome import Row

from kits.matrixkit import STOCK, row, seen, step

FACTS = {"found": True, "torch": "9.8.7+cu999", "cuda": "99.9", "gpus": ["Toy GPU"], "why": "", "nccl": 23456}
ALIVE_ROW = row(seen(step("caller", ms=0), step("read", ms=400, result="stale"), step("again")))


def column(**more: Any) -> Column:
    known = {
        "target": STOCK, "placement": "one-gpu", "gpu": "Toy GPU", "driver": "1.2.3", "torch": "2.6.0+toy",
        "cuda": "9.9", "nccl": "2.34.56", "topics": (), "date": "2001-02-03",
    }  # fmt: skip
    return Column(**{**known, **more})


def run(*rows: Row, checks: tuple[Check, ...] = (), lacking: tuple[str, ...] = (), **more: Any) -> Run:
    return Run(column(**more), rows, checks, lacking)


def interpreter(folder: Path, body: str) -> Path:
    """A file that can be started in the place of a Python, and does what the shell lines say."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def answering(folder: Path, **facts: Any) -> Path:
    return interpreter(folder, f"echo 'm8d-machine:{json.dumps({**FACTS, **facts})}'")


@dataclass
class NeverStarts:
    """A launcher none of whose ranks ever gets anywhere."""

    says: str = "rank 0 never started"
    python: Path = Path("python")
    asked: list[dict[str, Any]] = field(default_factory=list)

    def start(self, program: str, world_size: int, **more: Any) -> Any:
        self.asked.append({"program": program, "world_size": world_size, **more})
        raise AssertionError(self.says)
