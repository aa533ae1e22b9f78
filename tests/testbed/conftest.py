"""Without ``--bed`` nothing here runs: the test bed needs an official CUDA build of torch (``nox -s testbed``)."""

from __future__ import annotations

from pathlib import Path

import pytest
from bed import fixtures
from bed.fixtures import _only_for, _some_bed, build, launch, launchers  # noqa: F401 -- pytest finds fixtures by name


def pytest_collection_modifyitems(config, items):
    fixtures.leave_one(config, items, Path(__file__).parent)


def pytest_generate_tests(metafunc):
    fixtures.parametrize(metafunc)


@pytest.fixture(scope="session")
def library(bed_name, pytestconfig):
    """The double for a build, for tests that use it without torch."""
    from bed.build import build as compile_bed

    return compile_bed(fixtures.named(pytestconfig)[bed_name])
