"""The pages' command lines of `m8d-run` for one node, run as they stand there, with a script that ends at once.

tests/unit/run/test_run_options.py reads every line of every page, those of several nodes too.
"""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest
from kits.contract.runkit import launched, script

ROOT = Path(__file__).parents[3]
LINE = re.compile(r"^(?:\$ )?m8d-run +(-[^#\n]* \w+\.py) *(?:#.*)?$", re.MULTILINE)
ELSEWHERE = ("--nnodes", "examples/", "--preload")
"""What other tests run: several nodes, the examples, large packages."""


def commands():
    """Each line once, with the first page that has it."""
    found = {}
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        text = page.read_text(encoding="utf-8").replace("\\\n", " ")
        for block in re.findall(r"```(?:console|bash)\n(.*?)```", text, re.DOTALL):
            for line in LINE.findall(block):
                if not any(word in line for word in ELSEWHERE):
                    found.setdefault(line, page)
    return [pytest.param(page, line, id=f"{page.name}: {line}") for line, page in found.items()]


def worlds_file(page):
    """The page's own, or else that of docs/worlds-file.md."""
    pages = [page.read_text(encoding="utf-8"), (ROOT / "docs" / "worlds-file.md").read_text(encoding="utf-8")]
    return next(each for text in pages for each in re.findall(r"```toml\n(\[roles\].*?)```", text, re.DOTALL))


def test_there_are_some():
    assert len(commands()) > 3


@pytest.mark.everyday
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("page", "line"), commands())
def test_a_pages_command_runs_as_written(page, line, tmp_path):
    words = shlex.split(line)
    (tmp_path / "worlds.toml").write_text(worlds_file(page))
    script(tmp_path, "tell('ran', size=int(_os.environ['LOCAL_WORLD_SIZE']))\n", words[-1])
    command = [sys.executable, "-m", "multiworld.run", *words]
    with launched(tmp_path, tmp_path / words[-1], command=command) as run:
        assert run.ended() == 0, run.report()
        told = run.told("ran")
    given = re.search(r"--nproc-per-node (\d+)", line)  # fewer than a world of a range may have
    assert sorted(each.rank for each in told) == list(range(int(given[1]) if given else told[0].size))
