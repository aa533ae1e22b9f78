"""The front page: its picture is what the script draws, legible on light and dark pages."""

from __future__ import annotations

import importlib.util
import re
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PICTURES = ROOT / "docs" / "pictures"
SVG = "{http://www.w3.org/2000/svg}"
PHONE = 350
"""Pixels that a picture has on a phone's screen."""


def drawing():
    spec = importlib.util.spec_from_file_location("worlds_picture", PICTURES / "worlds.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


worlds = drawing()


def luminance(colour: str) -> float:
    """As WCAG 2 defines it."""
    parts = (int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5))
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def test_the_committed_pictures_are_what_the_script_draws(tmp_path) -> None:
    written = worlds.write(tmp_path)
    assert {path.name for path in written} == {path.name for path in PICTURES.glob("worlds-*.svg")}
    for path in written:
        committed = (PICTURES / path.name).read_bytes()
        assert path.read_bytes() == committed, "draw them anew: python docs/pictures/worlds.py"


@pytest.mark.parametrize("theme", worlds.THEMES, ids=lambda theme: theme.name)
def test_the_picture_is_legible(theme) -> None:
    root = ET.fromstring(worlds.draw(theme))  # noqa: S314  # written by the code under test
    _, _, width, _ = map(float, root.attrib["viewBox"].split())
    sizes = [float(text.get("font-size", root.attrib["font-size"])) for text in root.iter(f"{SVG}text")]
    assert min(sizes) * PHONE / width > 9
    for page in theme.page:
        for text in (theme.ink, theme.quiet, theme.alive):
            assert contrast(text, page) >= 4.5, (text, page)
        for line in (theme.broken, theme.stopped):
            assert contrast(line, page) >= 3, (line, page)
    for line, inside in (
        (theme.alive, theme.alive_fill),
        (theme.broken, theme.broken_fill),
        (theme.stopped, theme.stopped_fill),
    ):
        assert contrast(line, inside) >= 3, (line, inside)


@pytest.mark.parametrize("theme", worlds.THEMES, ids=lambda theme: theme.name)
def test_the_picture_shows_one_broken_world_beside_a_stopped_group(theme) -> None:
    root = ET.fromstring(worlds.draw(theme))  # noqa: S314  # written by the code under test
    outlines = [rect.get("stroke") for rect in root.iter(f"{SVG}rect") if rect.get("stroke")]
    assert (outlines.count(theme.alive), outlines.count(theme.broken)) == (worlds.WORKERS - 1, 1)
    words = " ".join(root.itertext())
    for part in ("hub", "multiworld", "one torchrun group", f"{worlds.WORKERS - 1} go on", "all stop"):
        assert part in words


def test_both_front_pages_show_the_picture_light_and_dark() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    shown = re.findall(r'(?:src|srcset)="([^"]+)"', readme[: readme.index("\n## ")])
    assert sorted(shown) == ["docs/pictures/worlds-dark.svg", "docs/pictures/worlds-light.svg"]
    for theme in worlds.THEMES:
        # Both GitHub and the site's theme hide the one of the other colours by its fragment.
        assert f"(pictures/worlds-{theme.name}.svg#gh-{theme.name}-mode-only)" in index
