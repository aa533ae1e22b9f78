"""The front page's picture: a hub with one broken world, beside a torchrun group that stops whole.

``python docs/pictures/worlds.py`` writes ``worlds-light.svg`` and ``worlds-dark.svg`` beside this file. The
same code writes the same bytes; a test compares them with the files. Text stays text, in the reader's own
sans-serif font, and the background is transparent: `THEMES` has a set of colours for light pages and one for
dark pages.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

__all__ = ["BROKEN", "THEMES", "WORKERS", "Theme", "draw", "path_of", "write"]

WORKERS = 5
"""Workers around the hub, and ranks beside rank 0 in the torchrun group."""
BROKEN = 2
"""The worker that crashes, counted from 1."""

WIDTH, HEIGHT = 720, 440
CENTRES = (180.0, 540.0)
MIDDLE = 240.0
RADIUS = 118.0
SIZE, HUB = 21.0, 30.0
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', Arial, sans-serif"
TITLE = "Worlds beside one torchrun group"
DESCRIPTION = (
    f"Left: a hub shares one world with each of {WORKERS} workers. Worker {BROKEN} crashed: its world is broken, the other "
    f"{WORKERS - 1} worlds are active. Right: the same processes as one torchrun group. One rank crashed and all others "
    "are stopped."
)


@dataclass(frozen=True)
class Theme:
    """The colours of one variant.

    Attributes:
        name: of the file, ``worlds-NAME.svg``.
        page: backgrounds that the picture has to be legible on.
        ink: titles, and the hub's label.
        quiet: what stands below them.
        alive: outline and text of what runs.
        alive_fill: inside of what runs.
        broken: outline and text of what failed.
        broken_fill: inside of what failed.
        stopped: outline and text of what was stopped with it.
        stopped_fill: inside of what was stopped.
    """

    name: str
    page: tuple[str, ...]
    ink: str
    quiet: str
    alive: str
    alive_fill: str
    broken: str
    broken_fill: str
    stopped: str
    stopped_fill: str


THEMES = (
    Theme(
        name="light",
        page=("#ffffff", "#f6f8fa"),
        ink="#1f2328",
        quiet="#4d5560",
        alive="#0b5cad",
        alive_fill="#dcebfa",
        broken="#b3261e",
        broken_fill="#fbe3e1",
        stopped="#5b626b",
        stopped_fill="#e9ebee",
    ),
    Theme(
        name="dark",
        page=("#0d1117", "#1e2029"),
        ink="#f0f3f6",
        quiet="#b4bdc8",
        alive="#79c0ff",
        alive_fill="#12304f",
        broken="#ff9a92",
        broken_fill="#4f1a1a",
        stopped="#a9b1bb",
        stopped_fill="#33383f",
    ),
)


def draw(theme: Theme) -> str:
    """The picture in the colours of `theme`, as SVG."""
    left, right = CENTRES
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
            f'role="img" aria-labelledby="title what" font-family="{FONT}" font-size="20" text-anchor="middle">'
        ),
        f'<title id="title">{TITLE}</title>',
        f'<desc id="what">{DESCRIPTION}</desc>',
        _text(left, 34, "multiworld", theme.ink, size=26, bold=True),
        _text(left, 62, f"one world breaks, {WORKERS - 1} go on", theme.quiet),
        *_worlds(theme, left),
        _text(left, 424, "only the broken one is rebuilt", theme.quiet),
        f'<line x1="360" y1="16" x2="360" y2="424" stroke="{theme.stopped}" stroke-opacity="0.45"/>',
        _text(right, 34, "one torchrun group", theme.ink, size=26, bold=True),
        _text(right, 62, "one rank fails, all stop", theme.quiet),
        *_group(theme, right),
        _text(right, 424, "all ranks start again", theme.quiet),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _worlds(theme: Theme, centre: float) -> list[str]:
    """A capsule for each world, around the hub and one worker; the crashed worker's is dashed."""
    half, reach = SIZE + 6, RADIUS + SIZE + 6
    inside, outlines = [], []
    for worker in range(1, WORKERS + 1):
        failed = worker == BROKEN
        line, fill = (theme.broken, theme.broken_fill) if failed else (theme.alive, theme.alive_fill)
        dashes = ' stroke-dasharray="7 5"' if failed else ""
        capsule = (
            f'<rect x="{-half:.0f}" y="{-half:.0f}" width="{reach + half:.0f}" height="{2 * half:.0f}" rx="{half:.0f}" '
            f'transform="translate({centre:.0f} {MIDDLE:.0f}) rotate({_degrees(worker):.0f})"'
        )
        inside.append(f'{capsule} fill="{fill}"/>')
        outlines.append(f'{capsule} fill="none" stroke="{line}" stroke-width="2.5"{dashes}/>')
    # The hub is in all of them: no capsule hides another one's outline.
    parts = [*inside, *outlines]
    for worker in range(1, WORKERS + 1):
        x, y = _place(centre, worker)
        if worker == BROKEN:
            parts += _crashed(theme, x, y)
        else:
            parts += _process(x, y, f"w{worker}", theme.alive, theme.page[0])
    parts += _process(centre, MIDDLE, "hub", theme.alive, theme.page[0], radius=HUB)
    return parts


def _group(theme: Theme, centre: float) -> list[str]:
    """One outline around all ranks: one crashed, the others stopped."""
    reach = RADIUS + SIZE + 14
    parts = [
        (
            f'<circle cx="{centre:.0f}" cy="{MIDDLE:.0f}" r="{reach:.0f}" fill="{theme.broken_fill}" fill-opacity="0.55" '
            f'stroke="{theme.broken}" stroke-width="2.5" stroke-dasharray="7 5"/>'
        )
    ]
    for worker in range(1, WORKERS + 1):
        x, y = _place(centre, worker)
        parts.append(
            f'<line x1="{centre:.0f}" y1="{MIDDLE:.0f}" x2="{x:.1f}" y2="{y:.1f}" stroke="{theme.stopped}" '
            'stroke-width="2"/>'
        )
    for worker in range(1, WORKERS + 1):
        x, y = _place(centre, worker)
        if worker == BROKEN:
            parts += _crashed(theme, x, y)
        else:
            parts += _stopped(theme, x, y, SIZE)
    parts += _stopped(theme, centre, MIDDLE, HUB)
    return parts


def _degrees(worker: int) -> float:
    """Worker 1 stands above the hub, the others follow clockwise."""
    return 360 / WORKERS * (worker - 1) - 90


def _place(centre: float, worker: int) -> tuple[float, float]:
    angle = math.radians(_degrees(worker))
    return centre + RADIUS * math.cos(angle), MIDDLE + RADIUS * math.sin(angle)


def _process(x: float, y: float, label: str, line: str, fill: str, *, radius: float = SIZE) -> list[str]:
    """A process that runs: its name in a circle."""
    return [_circle(x, y, radius, line, fill), _text(x, y + 7, label, line, bold=True)]


def _stopped(theme: Theme, x: float, y: float, radius: float) -> list[str]:
    """A process that was stopped: a square in a circle."""
    by = radius * 0.36
    return [
        _circle(x, y, radius, theme.stopped, theme.stopped_fill),
        f'<rect x="{x - by:.1f}" y="{y - by:.1f}" width="{2 * by:.1f}" height="{2 * by:.1f}" rx="2" fill="{theme.stopped}"/>',
    ]


def _crashed(theme: Theme, x: float, y: float) -> list[str]:
    """A process that crashed: a cross in a circle."""
    by = SIZE * 0.42
    return [
        _circle(x, y, SIZE, theme.broken, theme.broken_fill),
        (
            f'<path d="M{x - by:.1f} {y - by:.1f}L{x + by:.1f} {y + by:.1f}M{x + by:.1f} {y - by:.1f}L{x - by:.1f} {y + by:.1f}" '
            f'stroke="{theme.broken}" stroke-width="4" stroke-linecap="round"/>'
        ),
    ]


def _circle(x: float, y: float, radius: float, line: str, fill: str) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:.0f}" fill="{fill}" stroke="{line}" stroke-width="2.5"/>'


def _text(x: float, y: float, words: str, colour: str, *, size: int = 20, bold: bool = False) -> str:
    weight = ' font-weight="600"' if bold else ""
    own = f' font-size="{size}"' if size != 20 else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}"{own}{weight}>{words}</text>'


def path_of(theme: Theme, folder: Path | None = None) -> Path:
    """Where the picture of `theme` lies; `folder`: instead of beside this file."""
    return (folder or Path(__file__).parent) / f"worlds-{theme.name}.svg"


def write(folder: Path | None = None) -> list[Path]:
    """Write all variants; their paths."""
    for theme in THEMES:
        path_of(theme, folder).write_text(draw(theme), encoding="utf-8")
    return [path_of(theme, folder) for theme in THEMES]


if __name__ == "__main__":
    write()
