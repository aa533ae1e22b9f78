"""Runs parts one after the other and makes the record; a failing part leaves the others alone."""

from __future__ import annotations

import time
import traceback
from datetime import datetime, timezone
from typing import TYPE_CHECKING

from benchmarks.figures import machine
from benchmarks.figures.records import PartRun, Record
from benchmarks.figures.table import FigureTable
from benchmarks.measuring.part import Part, Run, Unavailable
from multiworld import __version__

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Mapping

    from rich.console import Console
    from rich.status import Status

    from benchmarks.figures.figure import Figure


class Runner:
    """One run.

    Args:
        console: the tables go there.
        watched: what is being done goes there, if it is a terminal.
        full: the long form.
        options: of the one part that runs alone; None: each has its defaults.
    """

    def __init__(
        self, console: Console, watched: Console, *, full: bool, options: argparse.Namespace | None
    ) -> None:
        self._console, self._watched = console, watched
        self._full, self._options = full, options
        self._table = FigureTable(console)
        self._figures: list[Figure] = []
        self.failed = False

    def run(self, loaders: Mapping[str, Callable[[], Part]], given: tuple[str, ...]) -> Record:
        """Measure the parts, showing figures as they come.

        Args:
            loaders: how to get each part, by name, in order.
            given: the command line, for the record.
        """
        when = datetime.now(timezone.utc).isoformat(timespec="seconds")
        found = machine.describe() | {"load_before": machine.load()}
        commit = machine.commit()
        self._console.print(machine.words(found))
        parts: dict[str, PartRun] = {}
        with self._watched.status("") as status:
            for name, loader in loaders.items():
                parts[name] = self._part(name, loader, status)
                if parts[name].missing == "interrupted":
                    break
        found["load_after"] = machine.load()
        return Record(when, __version__, commit, found, given, parts, tuple(self._figures), machine.sources())

    def _part(self, name: str, loader: Callable[[], Part], status: Status) -> PartRun:
        """Measure one part; whatever goes wrong is said, and kept."""
        began, remarks, missing = time.monotonic(), [], ""

        def remark(text: str) -> None:
            remarks.append(text)
            self._table.say(text)

        def progress(text: str) -> None:
            status.update(f"{name}: {text}")

        progress("starting")
        try:
            part = loader()
            self._table.head(part.title)
            options = part.defaults() if self._options is None else self._options
            run = Run(self._full, options, self._options is not None, progress, remark)
            for figure in part.measure(run):
                self._keep(name, figure)
        except Unavailable as error:
            missing = str(error)
            self._table.say(f"left out: {missing}")
        except KeyboardInterrupt:
            missing, self.failed = "interrupted", True
            self._table.say(missing, "bold red")
        except Exception as error:  # noqa: BLE001  (said below; the other parts are independent of it)
            missing, self.failed = f"{type(error).__name__}: {error}", True
            self._table.say(f"{name} failed\n{traceback.format_exc()}", "red")
        form = "full" if self._full else "quick"
        return PartRun(form, round(time.monotonic() - began, 1), tuple(remarks), missing)

    def _keep(self, name: str, figure: Figure) -> None:
        if figure.part != name:
            raise ValueError(f"{figure.key}: a figure of {name} is expected to name it as its part")
        if any(figure.key == each.key for each in self._figures):
            raise ValueError(f"{figure.key} was measured twice: a name is unique in its part")
        self._figures.append(figure)
        self._table.show(figure)
