"""docs/elastic-training.md says what its record has, and its pictures show that."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[3] / "docs"
PAGE = (DOCS / "elastic-training.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def training():
    spec = importlib.util.spec_from_file_location("training_pictures", DOCS / "pictures" / "training.py")
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_the_page_has_the_rows_and_pictures_of_its_record(training, tmp_path, name):
    runs = json.loads(training.RECORD.read_text(encoding="utf-8"))[name]
    assert training.row(name, runs) in PAGE.splitlines()
    assert f"(pictures/elastic-{name}.svg)" in PAGE
    drawn = training.draw(name, runs, tmp_path).read_bytes()
    assert drawn == training.draw(name, runs, tmp_path / "again").read_bytes()
    # Another matplotlib may draw it with other bytes; the words are the same.
    for words in (b"undisturbed", b"loss of a step", training.TITLES[name].encode()):
        assert words in drawn
        assert words in (DOCS / "pictures" / f"elastic-{name}.svg").read_bytes()
