"""The pictures of docs/elastic-training.md, from the losses in docs/elastic-training.json.

``PYTHONPATH=. python docs/pictures/training.py`` draws them beside this file (matplotlib). The record is made anew by the
examples: ``training.py --take ddp FILE`` and ``--take fsdp FILE`` put what ``--record FILE`` of one of them wrote
into it.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib as mpl

from benchmarks.page import drawing

__all__ = ["RECORD", "draw", "row", "take"]

RECORD = Path(__file__).parents[1] / "elastic-training.json"
TITLES = {
    "ddp": "DDP: one is killed, one comes, one leaves",
    "fsdp": "FSDP2: two are killed, one comes",
}


def take(name: str, file: Path) -> None:
    """Put what an example recorded into the record."""
    record = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}
    record[name] = json.loads(file.read_text(encoding="utf-8"))
    RECORD.write_text(json.dumps(record, sort_keys=True) + "\n", encoding="utf-8")


def draw(name: str, runs: dict[str, Any], folder: Path) -> Path:
    """Draw losses over steps, and below them how many members there were."""
    with mpl.rc_context(drawing.STYLE):
        canvas, (losses, members) = drawing.panels(2.1, 1.0)
        drawing.title(canvas, TITLES[name])
        for run, colour, width in (("undisturbed", "#9FC5E8", 4.0), ("disturbed", "#B2182B", 0.9)):
            loss, sizes = zip(*runs[run]["steps"], strict=True)
            losses.plot(loss, color=colour, lw=width, label=run)
            members.step(range(len(sizes)), sizes, color=colour, lw=width, where="post")
        drawing.log_values(losses)
        losses.set_ylabel("loss of a step")
        losses.legend(loc="upper right")
        members.set_ylabel("members")
        members.set_xlabel("step")
        members.set_ylim(0.5, max(sizes) + 0.5)
        members.set_yticks(range(1, max(sizes) + 1))
        return drawing.save(canvas, folder / f"elastic-{name}.svg")


def row(name: str, runs: dict[str, Any]) -> str:
    """Return a run's row of the page's table."""
    disturbed, calm = runs["disturbed"], runs["undisturbed"]
    sizes = [size for _, size in disturbed["steps"]]
    changes = [str(size) for at, size in enumerate(sizes) if not at or size != sizes[at - 1]]
    pairs = zip(disturbed["steps"], calm["steps"], strict=True)
    difference = max(abs(one[0] - other[0]) for one, other in pairs)
    accuracies = " | ".join(f"{100 * each['accuracy']:.1f} %" for each in (disturbed, calm))
    return f"| {name.upper()} | {len(sizes)} | {', '.join(changes)} | {accuracies} | {difference:.1e} |"


def main() -> None:
    """Take a recording, draw all pictures and say the rows of the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--take", nargs=2, metavar=("NAME", "FILE"))
    args = parser.parse_args()
    if args.take:
        take(args.take[0], Path(args.take[1]))
    for name, runs in json.loads(RECORD.read_text(encoding="utf-8")).items():
        draw(name, runs, Path(__file__).parent)
        print(row(name, runs))  # noqa: T201  (for the page)


if __name__ == "__main__":
    main()
