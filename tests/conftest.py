from __future__ import annotations

import os
import signal

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
    parser.addoption("--parts", action="store_true", help="say which part runs, and how long it will take")
    parser.addoption(
        "--record-seconds", metavar="FILE", help="write what tests take to FILE (tests/seconds.json)"
    )
    add_options(parser)


def pytest_configure(config):
    config.pluginmanager.register(Parts(config), "m8d-parts")
    named(config)  # a wrong --bed ends the run before it begins


# -- a second look (docs/development.md, "Tests")

SECOND_LOOK = "M8D_SECOND_LOOK" in os.environ
REAL_PROCESSES = {"contract", "integration", "testbed"}
MOST_LOOKS = 3  # in one run of pytest; more are no accident


def pytest_collection_modifyitems(config, items):
    if SECOND_LOOK and config.pluginmanager.hasplugin("rerunfailures"):
        for item in items:
            if REAL_PROCESSES & {*item.path.parts}:
                item.add_marker(pytest.mark.flaky(reruns=1, reruns_delay=2))


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session):
    seen = _second_looks(session.config)
    if len(seen) > MOST_LOOKS and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter, config):
    seen = _second_looks(config)
    for report in seen:
        terminalreporter.section(f"failed at first: {report.nodeid}", sep="_")
        terminalreporter.write_line(report.longreprtext)
    if seen:
        terminalreporter.section(f"{len(seen)} of at most {MOST_LOOKS} tests had a second look")
        for report in seen:
            terminalreporter.write_line(report.nodeid)


def _second_looks(config):
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    return [] if reporter is None else reporter.stats.get("rerun", [])
