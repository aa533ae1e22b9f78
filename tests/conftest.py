from __future__ import annotations

import os
import signal

import hypothesis
from bed.fixtures import add_options, named

# A shared, noisy machine: how long one example takes, or is drawn, says nothing. pytest-timeout ends what hangs.
# CI draws the same examples in every run: there a new one is nobody's to look into.
hypothesis.settings.register_profile(
    "here",
    deadline=None,
    derandomize="CI" in os.environ,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("here")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell's background job: without this each program the tests start would ignore Ctrl-C as well.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser):
    parser.addoption(
        "--soak", type=float, default=15.0, help="seconds that each soak test lasts (default: 15)"
    )
    add_options(parser)


def pytest_configure(config):
    named(config)  # a wrong --bed ends the run before it begins
