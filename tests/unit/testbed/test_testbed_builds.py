from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from bed.builds import Build, parse_named
from bed.errors import BedError
from bed.fixtures import NO_BED

ROOT = Path(__file__).parents[3]


def test_names_and_interpreters(tmp_path):
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.symlink_to(sys.executable)
    assert parse_named([f"patched-2.6.0={python}", f"b={sys.executable}"]) == {
        "patched-2.6.0": python,  # the link, not what it leads to
        "b": Path(sys.executable),
    }
    assert parse_named([]) == {}


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["python"], "it is NAME=PYTHON"),
        (["=python"], "it is NAME=PYTHON"),
        (["a b=/bin/sh"], "it is NAME=PYTHON"),
        (["a="], "it is NAME=PYTHON"),
        (["a=/bin/sh", "a=/bin/sh"], "names a twice"),
        (["a=/no/such/python"], "there is no such file"),
    ],
)
def test_wrong_ones(given, says):
    with pytest.raises(BedError, match=says):
        parse_named(given)


def test_what_a_build_is():
    stock = Build("s", Path("p"), "2.15.0", "13.2", "2.30.7", (), {"nccl": "ProcessGroupNCCL2"})
    assert (stock.patched, stock.nccl_default_is) == (False, "nccl2")
    patched = Build(
        "p", Path("p"), "2.6.0", "12.4", "2.21.5", (("marker", "0" * 64),), {"nccl": "ProcessGroupNCCL"}
    )
    assert (patched.patched, patched.nccl_default_is) == (True, "legacy")


def run(*arguments: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=240,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def test_without_a_build_the_test_bed_s_tests_are_skipped_with_one_line():
    code, said = run("tests/testbed/test_bed_values.py")
    assert code == 0
    assert said.count(NO_BED) == 1
    assert "1 skipped" in said
    assert "passed" not in said


def test_a_wrong_build_is_an_error_of_usage():
    code, said = run("tests/testbed/test_bed_values.py", "--bed", "a=/no/such/python")
    assert code == 4
    assert "there is no such file" in said
