"""What docs/metrics.md says of the metrics is what the collector has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from fakeworlds import collected

from multiworld.metrics import collector
from multiworld.metrics.health import STILL
from multiworld.tracing import spans

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")


@pytest.fixture
def families(process):
    world = process.add("w")
    process.joins("w")
    world.log.totals.message("send", 1, 1)
    world.log.totals.collective("all_reduce", 1)
    with collected(process) as made:
        return list(made.collect())


def test_the_table_of_metrics_is_that_of_the_collector(families):
    shown = {}
    for name, labels in re.findall(r"^\| `(multiworld_(?!run_)\w+)` \| (.*?)\|", PAGE, re.MULTILINE):
        shown[name] = set(re.findall(r"`(\w+)`", labels))
    suffix = {"counter": "_total", "info": "_info"}
    assert shown == {
        family.name + suffix.get(family.type, ""): {each for s in family.samples for each in s.labels}
        - {"le"}
        for family in families
    }


def test_the_values_of_labels_are_named(families):
    for family in families:
        for sample in family.samples:
            for label in ("state", "result", "direction"):
                if label in sample.labels:
                    (row,) = re.findall(rf"^\| `{family.name}(?:_total)?` .*$", PAGE, re.MULTILINE)
                    assert f"`{sample.labels[label]}`" in row


def test_numbers_on_the_page_are_those_of_the_code():
    assert f"{collector.MAX_WORLDS} names of worlds" in PAGE
    assert f'`world="{collector.OTHER}"`' in PAGE
    assert f"has not turned for {STILL:.0f} s" in PAGE


def test_the_table_of_spans_is_that_of_the_code():
    source = Path(spans.__file__).read_text(encoding="utf-8")
    named = set(re.findall(r"^\| `(multiworld\.\w+)`", PAGE, re.MULTILINE))
    assert named == set(re.findall(r'_Span\(\s*"(multiworld\.\w+)"', source))
    table = PAGE.partition("| span |")[2].partition("\n\n")[0]
    found = set(re.findall(r'"multiworld\.([a-z_.]+)": ', source)) - {"generation"}  # of links, too
    assert found | {"generation"} == set(re.findall(r"`([a-z_.]+[a-z])`", table)) - named
