"""A real run, a real kill, a real browser, and the page's own period: its cause and its healing show.

`nox -s page -- -k test_page_real --soak 300` kills twenty times: docs/web.md has what that showed.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import browserneeded  # noqa: F401  first: it skips this module where there is no browser
import pytest
from playwright.sync_api import expect

pytest.importorskip("torch", reason="the page's tests need torch where they show a real run")

ROOT = Path(__file__).parents[2]
PATIENCE = 120.0
"""Seconds: workers load torch, on a machine with other work."""
SOON = 10.0
"""Seconds from a kill until its cause shows; on a machine that has time it is one (docs/web.md)."""

WORLDS = """
[roles]
hub = 1
worker = 2

[worlds."w{i}"]
for = "worker"
members = ["hub:0", "worker:{i}"]
timeout = 60
hang_timeout = 60
"""
SCRIPT = """
import time
import multiworld as mw
worlds = mw.join_all()
time.sleep(600)
"""
# When the page has shown the n-th fault, and when it has shown it as healed, in ms of the clock.
WATCH = """
  window.seen = {cause: [], healed: []};
  const look = () => {
    const faults = document.querySelectorAll("#fault-list .fault");
    const causes = [...faults].filter((one) => one.textContent.includes("crashed"));
    const healed = causes.filter((one) => one.dataset.healed === "true");
    while (seen.cause.length < causes.length) seen.cause.push(Date.now());
    while (seen.healed.length < healed.length) seen.healed.push(Date.now());
  };
  new MutationObserver(look).observe(document.body, {
    subtree: true, childList: true, characterData: true, attributes: true,
  });
"""


@pytest.fixture
def link(tmp_path):
    """Of the page of a run with two worlds of a hub and a worker each."""
    (tmp_path / "worlds.toml").write_text(WORLDS)
    (tmp_path / "worker.py").write_text(SCRIPT)
    options = ["--worlds", str(tmp_path / "worlds.toml"), "--max-restarts", "100"]
    options += ["--preload", "torch,multiworld", "--web", "127.0.0.1:0"]
    with (tmp_path / "said").open("w") as said:
        run = subprocess.Popen(
            [sys.executable, "-m", "multiworld.run", *options, str(tmp_path / "worker.py")],
            stdout=said, stderr=said, cwd=tmp_path, start_new_session=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), "XDG_RUNTIME_DIR": str(tmp_path)},
        )  # fmt: skip
    try:
        deadline = time.monotonic() + PATIENCE
        while (found := re.search(r"page: (http://[^\s\"]+)[\s\"]", (tmp_path / "said").read_text())) is None:
            assert run.poll() is None, (tmp_path / "said").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield found[1]
    finally:
        run.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            run.wait(PATIENCE / 2)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(run.pid, signal.SIGKILL)
        run.wait(10)


def pid_of(page, rank):
    processes = page.request.get("/api/v1/view").json()["processes"]
    return next(each["pid"] for each in processes if each["rank"] == rank)


@pytest.mark.timeout(900)
def test_a_killed_worker_shows_with_its_cause_and_its_healing(browser, link, request):
    kills = 20 if request.config.getoption("--soak") > 60 else 1
    took = {"cause": [], "healed": []}
    with browser.new_context(base_url=link.partition("?")[0]) as context:
        page = context.new_page()
        page.set_default_timeout(1e3 * PATIENCE)
        page.goto(link)
        calm = "Nothing is wrong: 2 worlds"
        expect(page.locator("#trouble-word")).to_have_text(calm, timeout=1e3 * PATIENCE)
        page.evaluate(WATCH)
        for number in range(kills):
            pid = pid_of(page, 1 + number % 2)
            at = 1e3 * time.time()
            os.kill(pid, signal.SIGKILL)
            for what, ms in took.items():
                page.wait_for_function("([what, count]) => seen[what].length > count", arg=[what, number])
                ms.append(page.evaluate("([what, n]) => seen[what][n]", [what, number]) - at)
            expect(page.locator("#fault-list .fault").first).to_contain_text("healed in")
            expect(page.locator("#trouble-word")).to_have_text(calm, timeout=1e3 * PATIENCE)
    for what, ms in took.items():
        print(  # noqa: T201  what was measured
            f"\n{kills} kills: {what} shown after {statistics.median(ms):.0f} ms in the median, {max(ms):.0f} at most"
        )
    assert statistics.median(took["cause"]) < 1e3 * SOON
