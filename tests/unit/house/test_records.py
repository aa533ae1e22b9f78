"""Pages written from records say what these were made from, and docs/records.md which are of older code."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.figures.records import KEPT, stored
from benchmarks.page.write import chosen_of
from benchmarks.paper.page import newest
from m8d_build.files.digests import MIXED, RECORDS, UNKNOWN, patches_digest, sources_digest
from m8d_build.series.read import load_series
from m8d_build.settings import REPO_ROOT
from m8d_build.targets import load_targets
from m8d_build.testing.versions import sources_digest as matrix_digest

DOCS = REPO_ROOT / "docs"
NOT_RECORDED, OLDER, THIS = "not recorded", "older code", "this code"
PAGES = {
    "compatibility": "compatibility.md",
    "nccl-defects": "nccl-defects.md",
    "hardware": "hardware.md",
    "benchmarks": "benchmarks/index.md",
    "paper": "paper.md",
}


def compatibility() -> Iterator[tuple[str, str]]:
    text = (DOCS / PAGES["compatibility"]).read_text(encoding="utf-8")
    found = re.search(r"^\| sources \| (.+) \|$", text, re.MULTILINE)
    now = matrix_digest(REPO_ROOT / "tests" / "contract")
    for digest in found[1].split(" | ") if found else [UNKNOWN]:
        yield digest, now


def series_now(torch: str, patches: Path = REPO_ROOT / "patches") -> str:
    """The digest of the patches that a version has now ("2.6.0+cu124.m8d2")."""
    return load_series(patches, torch.partition("+")[0]).digest


def nccl_defects() -> Iterator[tuple[str, str]]:
    data = json.loads((DOCS / "nccl-defects.json").read_text(encoding="utf-8"))
    for column in data["columns"]:
        facts, target = column["facts"], column["target"]
        yield facts.get("sources", UNKNOWN), sources_digest("nccl-defects")
        if target["patched"]:
            yield facts.get("series", UNKNOWN), series_now(target["torch"])


def hardware() -> Iterator[tuple[str, str]]:
    data = json.loads((DOCS / "hardware.json").read_text(encoding="utf-8"))
    for run in data["runs"]:
        head = run["column"]
        yield head.get("sources", UNKNOWN), sources_digest("hardware")
        if head["topics"]:
            yield head.get("series", UNKNOWN), series_now(head["torch"])


def benchmarks() -> Iterator[tuple[str, str]]:
    kept, _ = stored(KEPT)
    for record in chosen_of(kept).values():
        yield record.sources, sources_digest("benchmarks")


def paper() -> Iterator[tuple[str, str]]:
    kept, _ = stored(KEPT)
    record = newest(kept)
    yield record.sources if record else UNKNOWN, sources_digest("benchmarks")


MADE_FROM = {
    "compatibility": compatibility,
    "nccl-defects": nccl_defects,
    "hardware": hardware,
    "benchmarks": benchmarks,
    "paper": paper,
}


def state(record: str) -> tuple[str, str]:
    """What a page was made from, in words, and what code it is of."""
    pairs = [*MADE_FROM[record]()]
    made = {digest for digest, _ in pairs}
    words = NOT_RECORDED if UNKNOWN in made else ", ".join(sorted(made))
    return words, THIS if all(digest == now for digest, now in pairs) else OLDER


@pytest.mark.parametrize("record", PAGES)
def test_the_page_of_records_is_right(record):
    text = (DOCS / "records.md").read_text(encoding="utf-8")
    (line,) = [line for line in text.splitlines() if f"]({PAGES[record]})" in line and line.startswith("| [")]
    said = tuple(cell.strip() for cell in line.strip("| ").split(" | "))[-2:]
    assert said == state(record), f"docs/records.md: {PAGES[record]} is of {state(record)[1]}"


def test_the_readme_says_how_often_a_gpu_ended_as_the_test_bed_does():
    readme = " ".join((REPO_ROOT / "README.md").read_text(encoding="utf-8").split())
    page = (DOCS / "hardware.md").read_text(encoding="utf-8").splitlines()
    title = next(line for line in page if line.startswith("| build and backend |")).split(" | ")
    rows = [
        line.split(" | ") for line in page if line.startswith("| ") and line.count(" | ") == len(title) - 1
    ]
    told = {row[0].removeprefix("| "): row[title.index("as on the bed")] for row in rows if row != title}
    # What was mended since ("-before") is told in docs/shim.md.
    shown = {
        figure
        for name, figure in told.items()
        if re.fullmatch(r"\d+ of [1-9]\d*", figure) and "-before" not in name
    }
    assert len(shown) > 1
    assert {figure for figure in shown if figure not in readme} == set()


def test_the_readme_says_where_it_leans_on_older_records():
    readme = (REPO_ROOT / "README.md").read_text(encoding="utf-8")
    stale = [page for record, page in PAGES.items() if state(record)[1] == OLDER and f"docs/{page}" in readme]
    assert not stale or "(docs/records.md)" in readme, f"README leans on {stale}, which are of older code"


def test_a_digest_follows_code_and_not_words(tmp_path):
    for folder in RECORDS["hardware"]:
        (tmp_path / folder).mkdir(parents=True)
    code = tmp_path / "multiworld" / "a.py"
    code.write_text("1")
    first = sources_digest("hardware", tmp_path)
    (tmp_path / "multiworld" / "README.md").write_text("words")
    assert sources_digest("hardware", tmp_path) == first
    code.write_text("2")
    assert sources_digest("hardware", tmp_path) not in {first, MIXED, UNKNOWN}


def test_a_series_digest_is_of_its_patches(tmp_path):
    folder = tmp_path / "v9.9.9"
    folder.mkdir()
    assert series_now("9.9.9", tmp_path) == UNKNOWN
    (folder / "series").write_text("0001-a.patch\n")
    (folder / "0001-a.patch").write_text("a\n---\n")
    first = series_now("9.9.9", tmp_path)
    assert series_now("9.9.9+cu130.m8d1", tmp_path) == first != UNKNOWN
    (folder / "0001-a.patch").write_text("b\n---\n")
    assert series_now("9.9.9", tmp_path) != first
    (folder / "series").write_text("0001-a.patch\n0002-b.patch\n")
    (folder / "0002-b.patch").write_text("b\n---\n")
    content = hashlib.sha256(b"b\n---\n").hexdigest()
    two = (("a", content), ("b", content))
    assert series_now("9.9.9", tmp_path) == patches_digest(two) != patches_digest(two[::-1])
    assert series_now("2.6.0") != UNKNOWN


def test_a_build_number_is_of_its_patches():
    for target in load_targets(REPO_ROOT / "patches"):
        digest = series_now(target.version)
        assert target.series in {digest, UNKNOWN}, (
            f"the patches of {target.version} are not those of its build {target.build}: in patches/targets.toml "
            f'raise build to {target.build + 1}, and series to "{digest}"'
        )
