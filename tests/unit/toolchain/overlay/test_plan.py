from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from m8d_build.overlay.plan import (
    UNKNOWN_MB,
    Layout,
    Step,
    compile_flags,
    compile_jobs,
    describe,
    link_command,
    next_to_start,
    overlay_file_name,
    overlay_rpath,
)
from m8d_build.overlay.toolbox import Toolbox
from m8d_build.series.read import load_series
from m8d_build.settings import REPO_ROOT
from m8d_build.targets import Abi, Unit, load_targets

OLD_ABI = Abi(cxx11_abi=False, abi_version=11, std="gnu++17", cuda="12.4")
NEW_ABI = Abi(cxx11_abi=True, abi_version=0, std="gnu++20", cuda="13.0")


def test_flags_follow_the_wheels_abi() -> None:
    assert {"-D_GLIBCXX_USE_CXX11_ABI=0", "-fabi-version=11", "-std=gnu++17"} <= set(compile_flags(OLD_ABI))
    new = compile_flags(NEW_ABI)
    assert {"-D_GLIBCXX_USE_CXX11_ABI=1", "-std=gnu++20"} <= set(new)
    assert not [flag for flag in new if flag.startswith("-fabi-version")]


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    for name in ("stage/torch", "source/torch", "work", "native"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "stage/torch/touched.cpp").write_text("// patched\n")
    (tmp_path / "source/torch/touched.cpp").write_text("// original\n")
    (tmp_path / "source/torch/untouched.cpp").write_text("// original\n")
    (tmp_path / "native/overlay.cpp").write_text("\n")
    return Layout(tmp_path / "stage", tmp_path / "source", tmp_path / "work")


def jobs_in(layout: Layout) -> dict[str, tuple[str, ...]]:
    root = layout.stage.parent
    toolbox = Toolbox(root / "headers/torch/include", (root / "cuda/include", root / "nccl/include"), "id")
    units = (Unit("torch/touched.cpp", ("A=1",), 500), Unit("torch/untouched.cpp", ("B=2",)))
    jobs = compile_jobs(units, root / "native/overlay.cpp", OLD_ABI, toolbox, layout)
    assert [job.unit for job in jobs] == ["torch/touched.cpp", "torch/untouched.cpp", "native/overlay.cpp"]
    assert len({job.name for job in jobs}) == 3
    assert [job.source for job in jobs] == [
        layout.stage / "torch/touched.cpp",
        layout.source / "torch/untouched.cpp",
        root / "native/overlay.cpp",
    ]
    return {job.unit: job.flags for job in jobs}


def test_patched_files_are_compiled_from_the_stage_and_others_from_the_sources(layout: Layout) -> None:
    flags = jobs_in(layout)
    assert "-DA=1" in flags["torch/touched.cpp"]
    assert "-DA=1" not in flags["torch/untouched.cpp"]
    assert {"-DA=1", "-DB=2"} <= set(flags["native/overlay.cpp"])


def test_a_patched_header_wins_and_the_source_tree_comes_last(layout: Layout) -> None:
    flags = jobs_in(layout)["torch/touched.cpp"]
    root = layout.stage.parent
    order = [
        flags.index(f"-I{layout.stage}"),
        flags.index(f"-I{root / 'headers/torch/include'}"),
        flags.index(str(root / "cuda/include")),
        flags.index(str(root / "nccl/include")),
        flags.index(str(layout.source)),
    ]
    assert order == sorted(order)
    assert flags[order[-1] - 1] == "-idirafter"


def test_no_folder_of_this_machine_is_part_of_an_objects_identity(layout: Layout) -> None:
    root = layout.stage.parent
    toolbox = Toolbox(root / "include", (root / "cuda",), "id")
    for job in compile_jobs(
        (Unit("torch/touched.cpp"),), root / "native/overlay.cpp", OLD_ABI, toolbox, layout
    ):
        assert not [part for part in job.identity if str(root) in part]
        assert {f"-ffile-prefix-map={layout.stage}=.", f"-ffile-prefix-map={layout.source}=."} <= set(
            job.flags
        )


def test_the_linker_refuses_undefined_symbols_and_names_the_library() -> None:
    command = link_command(
        "g++-12",
        [Path("a.o"), Path("b.o")],
        [Path("l/libc10.so")],
        Path("a,b/map"),
        "nccl.so.2",
        "$ORIGIN",
        Path("out/nccl.so.2"),
    )
    assert command[0] == "g++-12"
    assert {"-Wl,-z,defs", "-Wl,-soname,nccl.so.2", "-Wl,-rpath,$ORIGIN"} <= set(command)
    script = "--version-script=a,b/map"
    assert command[command.index(script) - 1] == "-Xlinker"  # of -Wl it would be two arguments
    assert command.index("a.o") < command.index("b.o") < command.index("l/libc10.so")


def test_the_overlays_name_is_a_suffix_of_nccls_own() -> None:
    assert overlay_file_name(["libc10.so", "libnccl.so.2"]) == "nccl.so.2"
    with pytest.raises(ValueError, match=r"libc10\.so"):
        overlay_file_name(["libc10.so"])


def test_the_overlay_looks_beside_itself_first_and_where_the_official_library_looks() -> None:
    official = "$ORIGIN/../../nvidia/nccl/lib:$ORIGIN/../../nvidia/nccl/lib:$ORIGIN"
    assert overlay_rpath(official) == "$ORIGIN:$ORIGIN/../../nvidia/nccl/lib"


def test_compilers_side_by_side_fit_the_memory() -> None:
    assert next_to_start([1862, 1060, 905], [], 2300) == 0
    assert next_to_start([1060, 905, 736], [1862], 2300) is None
    assert next_to_start([1060, 905, 100], [1862], 2300) == 2
    assert next_to_start([905, 736], [1060], 2300) == 0
    assert next_to_start([9000], [], 100) == 0  # one always runs
    assert next_to_start([0], [1500], 2300) is None  # unknown: not taken for nothing
    assert next_to_start([], [], 2300) is None


@given(st.lists(st.integers(0, 4000), max_size=6), st.integers(100, 10_000))
def test_all_units_get_compiled_within_the_budget(needs: list[int], budget: int) -> None:
    waiting, running, finished = list(needs), list[int](), 0
    while waiting or running:
        index = next_to_start(waiting, running, budget)
        if index is None:
            running.pop(0)
            finished += 1
            continue
        running.append(waiting.pop(index))
        assert len(running) == 1 or sum(need or UNKNOWN_MB for need in running) <= budget
    assert finished == len(needs)


def test_the_plan_says_what_every_step_does() -> None:
    target = load_targets(REPO_ROOT / "patches").get("2.6.0")
    series = load_series(REPO_ROOT / "patches", "2.6.0")
    steps = describe(target, "cp311", "auto", series, 2)
    assert list(steps) == [step.title for step in Step]
    assert "torch-2.6.0-cp311" in steps["official wheel"]
    assert "none on record" in describe(target, "cp399", "git", series, 1)["official wheel"]
    assert steps["repack"] == f"torch-2.6.0+cu124.m8d{target.build}"
