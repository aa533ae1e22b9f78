"""The shim's tests on builds that have NCCL: where torch is a CPU build they are skipped.

They import a fresh torch and make no group, so they need neither the double nor a GPU.
"""

from __future__ import annotations

import os
import subprocess
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIMIT = 800.0  # seconds; 20 on two free cores, each test imports a torch of its own
ELSEWHERE = "test_without_nccl_nothing_is_prepared_unless_it_is_asked_for"
"""The one that is for builds without NCCL."""


@pytest.mark.timeout(LIMIT + 60)
def test_the_shims_own_tests_pass(build, pytestconfig, tmp_path):
    junit = tmp_path / "junit.xml"
    paths = [*pytestconfig.getoption("--bed-path"), str(ROOT / "build"), str(ROOT)]
    dropped = ("M8D_", "TORCH_NCCL_", "NCCL_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    done = subprocess.run(
        [
            build.python, "-m", "pytest", "tests/contract/torch_itself/test_shim.py", "-q", "-p", "no:cacheprovider",
            f"--junitxml={junit}",
        ],
        cwd=ROOT, env={**kept, "PYTHONPATH": os.pathsep.join(paths)}, capture_output=True, text=True, check=False,
        timeout=LIMIT,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-2000:]}"
    cases = [*ET.parse(junit).iter("testcase")]  # noqa: S314  (pytest wrote it)
    skipped = {case.get("name") for case in cases if case.find("skipped") is not None}
    assert skipped == {ELSEWHERE}
    assert len(cases) >= 19
