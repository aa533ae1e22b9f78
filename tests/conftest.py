from __future__ import annotations

import gc
import os
import signal
from pathlib import Path

import evidence
import hypothesis
import pytest
from bed.fixtures import add_options, named
from partskit import Parts

# A shared, noisy machine: how long one example takes, or is drawn, says nothing. pytest-timeout ends what hangs.
# CI draws the same examples in every run: there a new one is nobody's to look into.
hypothesis.settings.register_profile(
    "here",
    deadline=None,
    derandomize="CI" in os.environ,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("here")

# torch asks for the names of the addresses that its stores' clients have. A name server that limits requests holds
# each of them up for its timeout, which is 5 s if nothing is said.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

# A shell's background job, nohup: without this each program the tests start would ignore these as well.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
for ignored in (signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM):
    if signal.getsignal(ignored) is signal.SIG_IGN:
        signal.signal(ignored, signal.SIG_DFL)


def pytest_addoption(parser):
    parser.addoption(
        "--soak", type=float, default=15.0, help="seconds that each soak test lasts (default: 15)"
    )
    parser.addoption("--seed", type=int, help="of the fuzz tests: what an earlier run has said it used")
    parser.addoption("--parts", action="store_true", help="say which part runs, and how long it will take")
    parser.addoption(
        "--record-seconds", metavar="FILE", help="write what tests take to FILE (tests/seconds.json)"
    )
    parser.addoption(
        "--share", metavar="NUMBER/OF", help="run the files of one of so many shares that take about as long"
    )
    add_options(parser)


def pytest_configure(config):
    config.pluginmanager.register(Parts(config), "m8d-parts")
    named(config)  # a wrong --bed ends the run before it begins


# -- what CI leaves out, and what it looks at twice (tests/ci.toml; docs/development.md, "Tests")

CI_RECORD = os.environ.get("M8D_CI_RECORD", "")
SECOND_LOOK = "M8D_SECOND_LOOK" in os.environ


def pytest_collection_finish():
    # What stays until the end: tests that collect garbage need not go through thousands of tests each time.
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(config, items):
    if SECOND_LOOK and config.pluginmanager.hasplugin("rerunfailures"):
        rules = evidence.load()
        for item in items:
            if rules.second_look(item.nodeid) is not None:
                item.add_marker(pytest.mark.flaky(reruns=1, reruns_delay=2))


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session):
    if not CI_RECORD:
        return
    record = _record(session.config)
    record.write(Path(CI_RECORD))
    if record.refused and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter, config):
    rules, stats = evidence.load(), terminalreporter.stats
    for report in stats.get("rerun", []):
        entry = rules.second_look(report.nodeid)
        terminalreporter.section(f"failed at first: {report.nodeid}", sep="_")
        terminalreporter.write_line(report.longreprtext)
        terminalreporter.write_line(evidence.stacks(report.capstderr, frames=30))
        terminalreporter.write_line(f"It had a second look: {'' if entry is None else entry.reason}")
    if not CI_RECORD:
        return
    record = _record(config)
    if record.refused:
        terminalreporter.section("what CI must not have")
        for line in record.refused:
            terminalreporter.write_line(line)


def _record(config):
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    stats = {} if reporter is None else reporter.stats
    passed = {}
    for report in stats.get("passed", []):
        part = evidence.part_of(report.nodeid, config.getoption("--bed"))
        passed.setdefault(part, []).append(report.nodeid)
    skipped = [(report.nodeid, evidence.reason_of(report.longrepr)) for report in stats.get("skipped", [])]
    looks = [_failure(report) for report in stats.get("rerun", [])]
    failed = [_failure(report) for kind in ("failed", "error") for report in stats.get(kind, [])]
    rules = evidence.load()
    refused = rules.new_skips(skipped) + rules.too_many_looks(node for node, _ in looks)
    return evidence.Record(passed, skipped, looks, failed, refused)


def _failure(report):
    seen, where = evidence.seen(report.longreprtext), evidence.stacks(report.capstderr)
    return report.nodeid, f"{seen}\n{where}" if where else seen
