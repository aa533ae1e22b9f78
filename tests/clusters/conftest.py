"""What tests of clusters share: they need programs that a machine may not have."""

from __future__ import annotations

import shutil

import pytest


@pytest.fixture(scope="session")
def need():
    """Returns a program's path: `need("slurmctld", "apt-get install slurm-wlm")`; without it the test is skipped."""

    def need(program, how):
        path = shutil.which(program, path=None) or shutil.which(program, path="/usr/sbin:/sbin")
        if path is None:
            pytest.skip(f"there is no {program} here: {how}")
        return path

    return need
