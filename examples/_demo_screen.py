"""Screen of the demo: a live table above a timeline (rich, on a terminal), or the timeline as plain lines."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

__all__ = ["Lane", "Screen", "screen"]

BARS = " ▁▂▃▄▅▆▇█"
COLOURS = {"joining": "yellow", "active": "green", "broken": "red"}


@dataclass
class Lane:
    """A world as it is shown."""

    state: str = "joining"
    generation: int = 0
    rate: float = 0.0
    slowest: float = 0.0
    last: deque[float] = field(default_factory=lambda: deque(maxlen=32))

    def bars(self) -> str:
        """The last rates, as a line of bars."""
        top = max([1.0, *self.last])
        return "".join(BARS[round(rate / top * (len(BARS) - 1))] for rate in self.last)


class Screen:
    """Plain lines, each with the seconds since the start; rates once a second."""

    def __init__(self, lanes: dict[str, Lane]) -> None:
        self.lanes = lanes
        self.began = time.monotonic()
        self._told = self.began

    def __enter__(self) -> Screen:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the terminal as it was."""

    def say(self, text: str, style: str = "") -> None:  # noqa: ARG002  (plain lines have no style)
        """Add a line to the timeline."""
        print(f"{time.monotonic() - self.began:6.2f} s  {text}", flush=True)

    def refresh(self) -> None:
        """Show the lanes as they are now."""
        if time.monotonic() - self._told >= 1:
            self._told = time.monotonic()
            told = (
                f"{n} {lane.rate:4.0f}/s" if lane.state == "active" else f"{n} {lane.state}"
                for n, lane in self.lanes.items()
            )
            self.say("          " + "   ".join(told))


class RichScreen(Screen):
    """The same, live."""

    def __init__(self, lanes: dict[str, Lane]) -> None:
        super().__init__(lanes)
        from rich.live import Live  # noqa: PLC0415  (only a terminal needs rich)

        self._lines: list[tuple[str, str]] = []
        self._live = Live(get_renderable=self._picture, refresh_per_second=8)

    def __enter__(self) -> Screen:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def say(self, text: str, style: str = "") -> None:
        """Add a line to the timeline."""
        self._lines.append((f"{time.monotonic() - self.began:6.2f} s  {text}", style))

    def refresh(self) -> None:
        """Nothing to do: the picture is drawn several times a second."""

    def _picture(self) -> Any:
        from rich.console import Group  # noqa: PLC0415  (only a terminal needs rich)
        from rich.table import Table  # noqa: PLC0415  (only a terminal needs rich)
        from rich.text import Text  # noqa: PLC0415  (only a terminal needs rich)

        table = Table(
            "world",
            "state",
            "generation",
            "messages/s",
            "slowest",
            "",
            title="the hub's worlds",
            expand=False,
        )
        for name, lane in self.lanes.items():
            rate, slowest = (
                (f"{lane.rate:6.0f}", f"{lane.slowest:5.1f} ms") if lane.state == "active" else ("", "")
            )
            table.add_row(
                name, Text(lane.state, COLOURS[lane.state]), str(lane.generation or ""), rate, slowest,
                Text(lane.bars().ljust(32), "cyan"),
            )  # fmt: skip
        return Group(table, *(Text(text, style) for text, style in self._lines))


def screen(lanes: dict[str, Lane]) -> Screen:
    """The live screen on a terminal, where rich is installed; plain lines elsewhere."""
    if sys.stdout.isatty() and importlib.util.find_spec("rich") is not None:
        return RichScreen(lanes)
    return Screen(lanes)
