"""Whether a machine can do a full build: each reason, and all of them at once."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from m8d_build.errors import PreflightFailed
from m8d_build.full.environment import RouteKind
from m8d_build.full.machine import (
    Compiler,
    MachineFacts,
    Toolkit,
    parse_compiler,
    parse_nvcc,
    read_machine,
    taken_by,
)
from m8d_build.full.preflight import GIB, Need, choose_route, preflight, require
from m8d_build.full.recipes import load_recipes
from m8d_build.targets import Abi

RECIPE = load_recipes().get("2.6.0")
ABI = Abi(cxx11_abi=False, abi_version=11, std="gnu++17", cuda="12.4")
GOOD = MachineFacts(
    system="Linux",
    architecture="x86_64",
    cores=16,
    memory=128 * GIB,
    free=500 * GIB,
    writable=True,
    python="3.11",
    python_program="/usr/bin/python3.11",
    venv=True,
    headers=True,
    programs=(("git", "/usr/bin/git"), ("conda", "/opt/conda/bin/conda")),
    compiler=Compiler("/usr/bin/g++", "gcc", (12, 2, 0)),
    toolkits=(Toolkit("/usr/local/cuda-12.4", "12.4"),),
)
NEED = Need(torch="2.6.0", recipe=RECIPE, kind=RouteKind.VENV, python="3.11", jobs=16, abi=ABI, patches=3)


def codes(need=NEED, **changes):
    return [problem.code for problem in preflight(need, replace(GOOD, **changes))]


def test_a_good_machine_has_no_problem():
    assert codes() == []
    assert codes(replace(NEED, kind=RouteKind.CONDA)) == []


@pytest.mark.parametrize(
    ("code", "changes"),
    [
        ("system", {"system": "Darwin"}),
        ("system", {"architecture": "aarch64"}),
        ("out", {"writable": False}),
        ("disk", {"free": 99 * GIB}),
        ("memory", {"memory": 95 * GIB}),
        ("git", {"programs": ()}),
        ("venv", {"venv": False}),
        ("headers", {"headers": False}),
        ("python", {"python": "3.12"}),
        ("nvcc", {"toolkits": ()}),
        ("nvcc", {"toolkits": (Toolkit("/usr/local/cuda-13.0", "13.0"),)}),
        ("compiler", {"compiler": None}),
        ("compiler", {"compiler": Compiler("/usr/bin/clang++", "clang", (17,))}),
        ("compiler", {"compiler": Compiler("/usr/bin/g++", "gcc", ())}),
        ("compiler", {"compiler": Compiler("/usr/bin/g++", "gcc", (9, 2))}),
        ("compiler", {"compiler": Compiler("/usr/bin/g++", "gcc", (14, 1))}),
    ],
)
def test_one_fault_is_one_problem(code, changes):
    assert codes(**changes) == [code]


@pytest.mark.parametrize("version", [(9, 3), (9, 3, 0), (9, 5), (11, 4), (13, 2)])
def test_compilers_in_the_range_pass(version):
    assert codes(compiler=Compiler("/usr/bin/g++", "gcc", version)) == []


@pytest.mark.parametrize(
    ("code", "changes"),
    [
        ("jobs", {"jobs": 0}),
        ("abi", {"abi": None}),
        ("cuda", {"abi": replace(ABI, cuda="12.1")}),
        ("patches", {"patches": 0}),
    ],
)
def test_one_wrong_wish_is_one_problem(code, changes):
    assert codes(replace(NEED, **changes)) == [code]


def test_a_python_the_version_was_never_built_for_is_refused():
    found = preflight(replace(NEED, python="3.9", kind=RouteKind.CONDA), GOOD)
    assert [p.code for p in found] == ["python"]
    assert "3.10, 3.11, 3.12, 3.13" in found[0].rule


def test_what_the_builds_folder_takes_is_there_for_it():
    """It is resumed, or removed with --fresh: neither asks for the room of a second build."""
    assert codes(replace(NEED, held=60 * GIB), free=40 * GIB) == []
    (problem,) = preflight(replace(NEED, held=59 * GIB), replace(GOOD, free=40 * GIB))
    assert (problem.code, problem.found) == ("disk", "40 GiB free, 59 GiB in the build's folder")


def test_what_a_folder_takes_is_what_lies_in_it(tmp_path):
    assert taken_by(tmp_path / "none") == taken_by(tmp_path) == 0
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "file").write_bytes(b"x" * 1_000_000)
    (tmp_path / "link").symlink_to(tmp_path / "a")
    assert 1_000_000 <= taken_by(tmp_path) < 1_100_000


def test_conda_needs_nothing_the_environment_brings():
    bare = {"compiler": None, "toolkits": (), "venv": False, "headers": False, "python": "3.12"}
    assert codes(replace(NEED, kind=RouteKind.CONDA), **bare) == []


def test_a_missing_conda_names_the_one_that_is_there():
    found = preflight(replace(NEED, kind=RouteKind.MAMBA), GOOD)
    assert [p.code for p in found] == ["environment"]
    assert found[0].next_step == "Use --env conda"
    none = preflight(replace(NEED, kind=RouteKind.MAMBA), replace(GOOD, programs=(("git", "/usr/bin/git"),)))
    assert "miniforge" in none[0].next_step


def test_a_given_tree_needs_no_git():
    assert codes(replace(NEED, from_git=False), programs=()) == []


def test_too_little_memory_names_the_jobs_that_fit():
    found = preflight(NEED, replace(GOOD, memory=32 * GIB))
    assert found[0].next_step == "Use --jobs 5"
    assert preflight(replace(NEED, jobs=5), replace(GOOD, memory=32 * GIB)) == []
    tiny = preflight(replace(NEED, jobs=1), replace(GOOD, memory=4 * GIB))
    assert tiny[0].next_step == "Use a machine with more memory"


def test_unknown_memory_is_no_problem():
    assert codes(memory=0) == []


def test_all_problems_are_listed_at_once_each_with_what_to_do():
    bad = replace(GOOD, free=GIB, memory=GIB, programs=(), compiler=None, toolkits=(), venv=False)
    found = preflight(NEED, bad)
    assert [p.code for p in found] == ["disk", "memory", "git", "venv", "nvcc", "compiler"]
    with pytest.raises(PreflightFailed) as caught:
        require(found, "2.6.0")
    text = str(caught.value)
    assert "6 reasons" in text
    for problem in found:
        assert problem.found in text
        assert problem.rule in text
        assert problem.next_step in text
    assert "overlay" in caught.value.next_step


def test_no_problem_raises_nothing():
    require([], "2.6.0")


def test_auto_takes_the_quickest_conda_then_a_venv():
    every = tuple((name, f"/bin/{name}") for name in ("conda", "mamba", "micromamba"))
    assert choose_route("auto", RECIPE, replace(GOOD, programs=every)).kind is RouteKind.MICROMAMBA
    assert choose_route("auto", RECIPE, replace(GOOD, programs=every[:2])).kind is RouteKind.MAMBA
    assert choose_route("auto", RECIPE, GOOD).program == "/opt/conda/bin/conda"
    assert choose_route("auto", RECIPE, replace(GOOD, programs=())).kind is RouteKind.VENV


def test_a_venv_takes_the_toolkit_of_its_cuda_version():
    both = (Toolkit("/usr/local/cuda-13.0", "13.0"), Toolkit("/opt/cuda124", "12.4"))
    route = choose_route("venv", RECIPE, replace(GOOD, toolkits=both))
    assert (route.program, route.compiler, route.cuda_home) == (
        "/usr/bin/python3.11",
        "/usr/bin/g++",
        "/opt/cuda124",
    )


@pytest.mark.parametrize(
    ("banner", "kind", "version"),
    [
        (
            "g++ (Debian 12.2.0-14+deb12u1) 12.2.0\nCopyright (C) 2022 Free Software Foundation, Inc.",
            "gcc",
            (12, 2, 0),
        ),
        (
            "g++ (GCC) 9.3.1 20200408 (Red Hat 9.3.1-2)\nCopyright (C) Free Software Foundation, Inc.",
            "gcc",
            (9, 3, 1),
        ),
        (
            "x86_64-conda-linux-gnu-c++ (conda-forge gcc 11.4.0-13) 11.4.0\nFree Software Foundation",
            "gcc",
            (11, 4, 0),
        ),
        ("Debian clang version 14.0.6\nTarget: x86_64-pc-linux-gnu", "clang", (14, 0, 6)),
        ("icpc (ICC) 2021.6.0", "", ()),
        ("", "", ()),
    ],
)
def test_compiler_banners_are_read(banner, kind, version):
    assert parse_compiler("/x", banner) == Compiler("/x", kind, version)


def test_nvcc_banner_is_read():
    assert parse_nvcc("Cuda compilation tools, release 12.4, V12.4.131") == "12.4"
    assert parse_nvcc("something else") == ""


def program(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_this_machine_is_read(tmp_path, monkeypatch):
    program(tmp_path / "bin/git", "exit 0")
    program(tmp_path / "bin/mamba", "exit 0")
    program(tmp_path / "bin/my-g++", "echo 'g++ (GCC) 11.4.0'; echo 'Free Software Foundation'")
    nvcc = program(tmp_path / "cuda/bin/nvcc", "echo 'Cuda compilation tools, release 12.4, V12.4.131'")
    (tmp_path / "cuda/include").mkdir()
    (tmp_path / "cuda/include/cuda_runtime.h").touch()
    (tmp_path / "bin/nvcc").symlink_to(nvcc)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin")
    monkeypatch.setattr("m8d_build.full.machine.TOOLKITS", tmp_path / "none")
    facts = read_machine(tmp_path / "not" / "there", "my-g++")
    assert facts.programs == (("git", f"{tmp_path}/bin/git"), ("mamba", f"{tmp_path}/bin/mamba"))
    assert facts.compiler == Compiler(f"{tmp_path}/bin/my-g++", "gcc", (11, 4, 0))
    assert facts.toolkits == (Toolkit(str(tmp_path / "cuda"), "12.4"),)
    assert facts.cores == len(os.sched_getaffinity(0))
    assert facts.memory > 0
    assert facts.free > 0
    assert facts.writable


def test_a_compiler_that_fails_or_is_not_there_is_no_error(tmp_path, monkeypatch):
    program(tmp_path / "bin/bad", "exit 3")
    monkeypatch.setenv("PATH", f"{tmp_path}/bin")
    assert read_machine(tmp_path, "bad").compiler == Compiler(f"{tmp_path}/bin/bad", "", ())
    assert read_machine(tmp_path, "no-such-compiler").compiler is None


def test_a_folder_we_may_not_write_is_seen(tmp_path, monkeypatch):
    asked = []

    def refuse(path, mode):
        asked.append((path, mode))
        return False

    monkeypatch.setattr("m8d_build.full.machine.os.access", refuse)  # root may write everywhere
    assert not read_machine(tmp_path / "out", "g++").writable
    assert asked[0] == (tmp_path, os.W_OK | os.X_OK)
