"""Without ``--bed`` nothing here runs: the test bed stands in for GPUs, as in `nox -s testbed` (`nox -s gpu` is what runs on real ones)."""

from __future__ import annotations

import pytest
from bed import fixtures


def pytest_generate_tests(metafunc):
    fixtures.parametrize(metafunc)


@pytest.fixture
def python(bed_name, pytestconfig):
    """The interpreter of a build."""
    if not fixtures.named(pytestconfig):
        pytest.skip(fixtures.NO_BED)
    return fixtures.named(pytestconfig)[bed_name]


@pytest.fixture
def library(python):
    """The double for it."""
    from bed.build import build

    return build(python)
