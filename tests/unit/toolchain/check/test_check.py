from __future__ import annotations

import io
import json
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from kits.fakewheel import contents, write_wheel
from rich.console import Console

from m8d_build import proc
from m8d_build.check import run as check_run
from m8d_build.check.cases import ABORTED, Case, all_cases
from m8d_build.check.jobs import End, Observed, observe, read_ends, supervisor_plan
from m8d_build.check.native import PROBES, build_preload, extension_command, nccl_library, preloadable
from m8d_build.check.report import Report, Result, judge
from m8d_build.check.subject import NO_MARKER, marker_outcome, read_subject, require_stock
from m8d_build.check.trees import link_torch
from m8d_build.cli import check as check_cli
from m8d_build.environments.download import WheelRequest
from m8d_build.environments.venvs import Environment
from m8d_build.errors import (
    BehaviourFailed,
    CommandFailed,
    OutputUnwritable,
    PrerequisiteMissing,
    WheelInvalid,
    WheelMismatch,
    WheelUnreachable,
)
from m8d_build.progress import Silent
from m8d_build.settings import Settings
from multiworld.shim.marker import Marker, Overlay, Topic

COMMIT = "2236df1770800ffea5697b11b0bb0d910b2e59e1"
TOPICS = (Topic("group-guard", "1" * 64), Topic("cleanup-only", "2" * 64))
OVERLAY = Overlay("torch/lib/nccl.so.2", "3" * 64)
MARKER = Marker("2.6.0", "cu124.m8d1", COMMIT, TOPICS, "overlay", "0.1", OVERLAY)
FULL = Marker("2.6.0", "cu124.m8d1", COMMIT, TOPICS, "full", "0.1", None)


def settings_in(folder: Path) -> Settings:
    return Settings(
        cache=folder / "cache",
        patches=folder,
        out=folder / "out",
        compiler="g++",
        jobs=2,
        memory_mb=2300,
        git_url="",
    )


# --- cases


@pytest.mark.parametrize("marker", [MARKER, FULL])
def test_case_names_are_unique_and_their_probes_exist(marker):
    cases = all_cases(marker)
    assert len({case.name for case in cases}) == len(cases)
    for case in cases:
        for script, *_ in case.programs:
            assert (PROBES / script).is_file()


def test_every_mode_is_tried_with_every_trigger_and_only_clean_up_only_differs_from_stock():
    cases = {case.name: case for case in all_cases(MARKER)}
    for trigger in ("dump", "stuck"):
        for mode in (0, 1, 2, 3):
            case = cases[f"heartbeat-{trigger}-mode-{mode}"]
            assert case.stock == ABORTED
            assert (case.patched == ABORTED) == (mode != 2)
            assert case.env["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == str(mode)
            assert case.signs
    unwinds = {name: case for name, case in cases.items() if name.startswith("group-unwind")}
    assert {case.env.get("TORCH_NCCL_ASYNC_ERROR_HANDLING") for case in unwinds.values()} == {
        "0",
        "1",
        "2",
        "3",
        None,
    }
    for case in unwinds.values():
        assert case.stock == ABORTED
        assert (case.patched == ABORTED) == (case.env.get("TORCH_NCCL_ASYNC_ERROR_HANDLING") != "2")


def test_expectations_follow_the_marker():
    cases = {case.name: case for case in all_cases(MARKER)}
    assert cases["version"].patched == "2.6.0+cu124.m8d1, patch info 2.6.0: group-guard, cleanup-only"
    assert cases["version"].stock == "2.6.0+cu124, no patch info"
    assert cases["binding-patched-first"].patched == "nccl.so.2, patch info found"
    full = {case.name: case for case in all_cases(FULL)}
    assert full["binding-patched-first"].patched == "libtorch_cuda.so, patch info found"
    assert "overlay-missing" in cases
    assert not any(name.startswith("overlay") for name in full)


def test_survivors_are_watched_longer_than_stock_lives_and_within_their_time():
    for case in all_cases(MARKER):
        if case.name.startswith("heartbeat"):
            watch = float(case.programs[0][2])
            assert watch >= 3 * 2 * int(case.env["TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"])
            assert case.timeout > watch


# --- jobs

CASE = Case(
    "c", "shows", (("probe.py", "{work}/x"),), "good", ABORTED, env={"A": "{work}"}, signs=((ABORTED, "why"),)
)


def end(returncode=0, stdout="", stderr="", timed_out=False, seconds=1.0) -> End:
    return End(returncode, timed_out, seconds, stdout, stderr)


@pytest.mark.parametrize(
    ("ends", "outcome"),
    [
        ([end(stdout='noise\nM8D {"outcome": "good"}\n')], "good"),
        ([end(stdout='M8D {"outcome": "good"}\n'), end(stdout='M8D {"outcome": "good"}\n')], "good"),
        (
            [end(stdout='M8D {"outcome": "good"}\n'), end(-9, timed_out=True, seconds=7)],
            "good / no end within 7 s",
        ),
        ([end(-6, stderr="this is why")], "SIGABRT"),
        ([end(-6, stderr="something else")], "SIGABRT, but not for this reason (no 'why')"),
        ([end(-11, stdout='M8D {"outcome": "good"}\n')], "SIGSEGV"),
        (
            [end(3, stdout='M8D {"outcome": "good"}\n', stderr="Traceback\nValueError: x")],
            "exit status 3: ValueError: x",
        ),
        ([end(0)], "exit status 0: no message"),
        ([end(0, stdout="M8D nonsense\n")], "unreadable answer: M8D nonsense"),
        ([], "nothing was run"),
    ],
)
def test_an_end_becomes_an_outcome(ends, outcome):
    assert observe(CASE, ends).outcome == outcome


def test_details_beside_the_outcome_are_kept():
    seen = observe(CASE, [end(stdout='M8D {"outcome": "good", "held": 3}\n', seconds=2.0), end(seconds=4.0)])
    assert seen.details == {"held": 3}
    assert seen.seconds == 4.0


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"jobs": {"a": [{"returncode": 0}]}}', '{"jobs": []}'])
def test_a_strange_answer_of_the_supervisor_is_refused(text):
    with pytest.raises(BehaviourFailed):
        read_ends(text)


def test_plan_fills_in_paths_and_leaves_out_what_has_nothing_to_run(tmp_path):
    other = Case("other", "", (("probe.py",),), "good", None)
    plan = supervisor_plan(
        [CASE, other],
        kind="stock",
        python=Path("/py"),
        probes=Path("/probes"),
        paths={"work": "/w"},
        bytecode=Path("/b"),
        parallel=3,
    )
    assert [job["name"] for job in plan["jobs"]] == ["c"]
    command = plan["jobs"][0]["programs"][0]
    assert command[0] == "/py"
    assert command[-2:] == ["/probes/probe.py", "/w/x"]
    assert "pycache_prefix=/b" in command
    assert plan["jobs"][0]["env"] == {"A": "/w"}


def test_no_placeholder_is_left_over():
    paths = dict.fromkeys(
        ("work", "extension", "official_extension", "one_gpu", "exits", "whole", "bare"), "/path"
    )
    plan = supervisor_plan(
        all_cases(MARKER),
        kind="patched",
        python=Path("p"),
        probes=PROBES,
        paths=paths,
        bytecode=None,
        parallel=1,
    )
    for job in plan["jobs"]:
        for text in [
            *job["env"].values(),
            *(argument for program in job["programs"] for argument in program),
        ]:
            assert "{" not in text


# --- the supervisor, run for real


def supervise(tmp_path, jobs, parallel=4) -> dict[str, tuple[End, ...]]:
    asked, answer = tmp_path / "plan.json", tmp_path / "result.json"
    for job in jobs:
        job.setdefault("env", {})
        job.setdefault("timeout", 60)
        job["programs"] = [[sys.executable, "-I", "-c", text] for text in job["programs"]]
    asked.write_text(json.dumps({"parallel": parallel, "jobs": jobs}))
    proc.run([sys.executable, "-I", PROBES / "supervise.py", asked, answer], what="supervise", timeout=100)
    return read_ends(answer.read_text())


def test_supervisor_tells_how_programs_end(tmp_path):
    ends = supervise(
        tmp_path,
        [
            {"name": "good", "programs": ["print('out'); import sys; print('err', file=sys.stderr)"]},
            {"name": "status", "programs": ["raise SystemExit(7)"]},
            {"name": "abort", "programs": ["import os; os.abort()"]},
            {"name": "long", "programs": ["import time; time.sleep(60)"], "timeout": 1},
        ],
    )
    assert ends["good"][0].returncode == 0
    assert ends["good"][0].stdout == "out\n"
    assert ends["good"][0].stderr == "err\n"
    assert ends["status"][0].returncode == 7
    assert ends["abort"][0].returncode == -6
    assert ends["long"][0].timed_out
    assert ends["long"][0].seconds < 30


def test_supervisor_runs_a_jobs_programs_at_the_same_time(tmp_path):
    meet = (
        "import pathlib, time\n"
        "mine, other = pathlib.Path({0!r}), pathlib.Path({1!r})\n"
        "mine.write_text('')\n"
        "end = time.monotonic() + 30\n"
        "while not other.exists() and time.monotonic() < end: time.sleep(0.01)\n"
        "print(other.exists())\n"
    )
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    ends = supervise(tmp_path, [{"name": "pair", "programs": [meet.format(a, b), meet.format(b, a)]}])
    assert [one.stdout for one in ends["pair"]] == ["True\n", "True\n"]


def test_supervisor_keeps_what_steers_torch_away_from_programs(tmp_path, monkeypatch):
    for name in ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_DEBUG", "LD_PRELOAD", "PYTHONPATH", "MASTER_PORT"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("HOME", "/home/someone")
    show = "import os, json; print(json.dumps(dict(os.environ)))"
    ends = supervise(tmp_path, [{"name": "env", "programs": [show], "env": {"NCCL_TEST": "1"}}])
    env = json.loads(ends["env"][0].stdout)
    assert {name for name in env if name.startswith(("TORCH", "NCCL", "LD_", "PYTHON", "MASTER"))} == {
        "NCCL_TEST"
    }
    assert env["HOME"] == "/home/someone"
    assert env["CUDA_VISIBLE_DEVICES"] == ""


# --- native parts


def fake_site(folder: Path, *, nccl: bool = True) -> Path:
    (folder / "torch" / "lib").mkdir(parents=True)
    if nccl:
        (folder / "nvidia" / "nccl" / "lib").mkdir(parents=True)
        (folder / "nvidia" / "nccl" / "lib" / "libnccl.so.2").write_text("")
    return folder


def test_missing_nccl_is_said(tmp_path):
    with pytest.raises(PrerequisiteMissing, match="libnccl"):
        nccl_library(fake_site(tmp_path, nccl=False))
    assert nccl_library(fake_site(tmp_path / "with")).name == "libnccl.so.2"


NCCL = """
static thread_local int depth = 0; static thread_local bool failed = false;
extern "C" int ncclGroupStart() { ++depth; return 0; }
extern "C" int ncclAllReduce(const void*, void*, unsigned long, int, int, void* c, void*) {
  if (!c) { failed = true; return 4; } return 0;
}
extern "C" int ncclGroupEnd() { if (!depth) return 5; --depth; bool f = failed; failed = false; return f ? 4 : 0; }
"""
TORCH = """
#include <exception>
#include <stdexcept>
extern "C" int ncclGroupStart(); extern "C" int ncclGroupEnd();
namespace torch::cuda::nccl {
struct AutoNcclGroup { AutoNcclGroup(); ~AutoNcclGroup() noexcept(false); void* comm; bool nonblocking; };
AutoNcclGroup::AutoNcclGroup() { ncclGroupStart(); }
AutoNcclGroup::~AutoNcclGroup() noexcept(false) {
#if FORM == 1
  if (std::uncaught_exceptions() > 0) { ncclGroupEnd(); return; }
#elif FORM == 2
  if (std::uncaught_exceptions() > 0) return;
#endif
  if (ncclGroupEnd()) throw std::runtime_error("NCCL Error 4");
}
}
#if FORM
extern "C" const char* m8d_patch_info() { return "{}"; }
#endif
"""


def call_extension(folder: Path, form: int, function: str) -> tuple[int, str]:
    (folder / "nccl.cpp").write_text(NCCL)
    (folder / "torch.cpp").write_text(TORCH)
    shared = ["g++", "-std=c++17", "-shared", "-fPIC"]
    proc.run(
        [*shared, folder / "nccl.cpp", "-o", folder / "libnccl.so.2", "-Wl,-soname,libnccl.so.2"], what="nccl"
    )
    proc.run(
        [*shared, f"-DFORM={form}", folder / "torch.cpp", "-o", folder / "libtorch_cuda.so",
         "-Wl,-soname,libtorch_cuda.so", folder / "libnccl.so.2"], what="torch",
    )  # fmt: skip
    made = folder / "extension.so"
    proc.run(
        extension_command("g++", made, link_folders=(folder,), run_folders=(folder,), nccl="libnccl.so.2"),
        what="link",
    )
    call = f"import ctypes; f = ctypes.CDLL({str(made)!r}).{function}; f.restype = ctypes.c_char_p; print(f().decode())"
    ends = supervise(folder, [{"name": "x", "programs": [call]}])
    return ends["x"][0].returncode, ends["x"][0].stdout.strip()


@pytest.mark.compiler
@pytest.mark.parametrize(
    ("form", "function", "ended"),
    [
        (0, "m8d_unwind", (-6, "")),
        (1, "m8d_unwind", (0, "first error arrives, group closed")),
        (2, "m8d_unwind", (0, "first error arrives, group left open")),
        (0, "m8d_plain", (0, "its own error arrives, group closed")),
        (0, "m8d_empty", (0, "no error arrives, group closed")),
        (0, "m8d_bound_to", (0, "libtorch_cuda.so, no patch info")),
        (1, "m8d_bound_to", (0, "libtorch_cuda.so, patch info found")),
    ],
)
def test_extension_tells_a_guarded_group_from_others(tmp_path, form, function, ended):
    folder = tmp_path / "with, a comma"
    folder.mkdir()
    assert call_extension(folder, form, function) == ended


@pytest.mark.compiler
def test_extension_does_not_link_against_a_library_without_the_class(tmp_path):
    (tmp_path / "empty.cpp").write_text("")
    for name in ("libtorch_cuda.so", "libnccl.so.2"):
        proc.run(
            ["g++", "-shared", "-fPIC", tmp_path / "empty.cpp", "-o", tmp_path / name], what="empty library"
        )
    command = extension_command(
        "g++", tmp_path / "x.so", link_folders=(tmp_path,), run_folders=(tmp_path,), nccl="libnccl.so.2"
    )
    with pytest.raises(CommandFailed, match="link"):
        proc.run(command, what="link")


SHARED = """
struct Thing { Thing() : x(0) {} ~Thing() { x = 1; } volatile int x; };
#define VISIBLE __attribute__((visibility(VIS)))
VISIBLE Thing thing;
"""


@pytest.mark.compiler
@pytest.mark.parametrize(("visibility", "twice"), [("default", True), ("hidden", False)])
def test_exits_sees_an_object_that_two_libraries_would_destroy(tmp_path, visibility, twice):
    tmp_path = tmp_path / "my folder: one"
    tmp_path.mkdir()
    (tmp_path / "thing.cpp").write_text(SHARED)
    for name in ("one.so", "two.so"):
        proc.run(
            [
                "g++",
                "-shared",
                "-fPIC",
                f'-DVIS="{visibility}"',
                tmp_path / "thing.cpp",
                "-o",
                tmp_path / name,
            ],
            what="compile",
        )
    exits = build_preload("g++", "exits", tmp_path, tmp_path / "log")
    program = (
        "import ctypes\n"
        f"for name in ('one.so', 'two.so'): ctypes.CDLL({str(tmp_path)!r} + '/' + name, mode=ctypes.RTLD_GLOBAL)\n"
        "watch = ctypes.CDLL(None)\n"
        "watch.m8d_destroyed_twice.restype = ctypes.c_char_p\n"
        "print(watch.m8d_destroyed_twice().decode())\n"
    )
    with preloadable(exits) as loaded:
        ends = supervise(tmp_path, [{"name": "x", "programs": [program], "env": {"LD_PRELOAD": str(loaded)}}])
    assert loaded != exits
    assert not loaded.parent.exists()
    assert ends["x"][0].returncode == 0, ends
    assert ends["x"][0].stdout.strip() == ("thing by one.so and two.so" if twice else "")


WATCHDOG = """
#include <sys/prctl.h>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
static std::atomic<long> beats{0};
static std::atomic<bool> done{false};
static std::thread watchdog;
extern "C" long beat() { return beats.load(); }
extern "C" void start(const char* name) {
  watchdog = std::thread([name] {
    prctl(PR_SET_NAME, name, 0, 0, 0);
    std::mutex m; std::condition_variable cv;
    while (!done) { std::unique_lock<std::mutex> l(m); cv.wait_for(l, std::chrono::milliseconds(5)); ++beats; }
  });
}
extern "C" void stop() { done = true; watchdog.join(); }
"""


@pytest.mark.compiler
@pytest.mark.parametrize(("name", "stuck"), [("pt_nccl_watchdg", True), ("other", False)])
def test_one_gpu_holds_the_watchdog_and_nobody_else(tmp_path, name, stuck):
    (tmp_path / "dog.cpp").write_text(WATCHDOG)
    proc.run(
        [
            "g++",
            "-std=c++17",
            "-shared",
            "-fPIC",
            "-pthread",
            tmp_path / "dog.cpp",
            "-o",
            tmp_path / "dog.so",
        ],
        what="c",
    )
    one_gpu = build_preload("g++", "one_gpu", tmp_path, tmp_path / "log")
    program = (
        "import ctypes, time\n"
        f"dog = ctypes.CDLL({str(tmp_path / 'dog.so')!r})\n"
        "double = ctypes.CDLL(None)\n"
        "def until(what):\n"
        "    end = time.monotonic() + 20\n"
        "    while not what() and time.monotonic() < end: time.sleep(0.01)\n"
        "    return what()\n"
        "count = ctypes.c_int(0)\n"
        "double.cudaGetDeviceCount(ctypes.byref(count))\n"
        f"dog.start({name.encode()!r})\n"
        "assert until(lambda: dog.beat() > 3)\n"
        "double.m8d_hold_watchdog(1)\n"
        + ("assert until(lambda: double.m8d_times_held() == 1)\n" if stuck else "")
        + "before = dog.beat()\n"
        + ("time.sleep(0.3)\n" if stuck else "until(lambda: dog.beat() > before)\n")
        + "print(count.value, dog.beat() == before)\n"
        "double.m8d_hold_watchdog(0)\n"
        "assert until(lambda: dog.beat() > before)\n"
        "dog.stop()\n"
    )
    ends = supervise(tmp_path, [{"name": "x", "programs": [program], "env": {"LD_PRELOAD": str(one_gpu)}}])
    assert ends["x"][0].returncode == 0, ends
    assert ends["x"][0].stdout.strip() == f"1 {stuck}"


# --- trees


def test_tree_of_links_lacks_one_library_and_leaves_the_installation_alone(tmp_path):
    site = fake_site(tmp_path / "site")
    for name in ("nccl.so.2", "libtorch_cuda.so"):
        (site / "torch" / "lib" / name).write_text(name)
    (site / "torch" / "__init__.py").write_text("")
    bare = link_torch(site, tmp_path / "bare", without="nccl.so.2")
    whole = link_torch(site, tmp_path / "whole")
    assert sorted(path.name for path in (bare / "torch" / "lib").iterdir()) == ["libtorch_cuda.so"]
    assert sorted(path.name for path in (whole / "torch" / "lib").iterdir()) == [
        "libtorch_cuda.so",
        "nccl.so.2",
    ]
    assert (bare / "torch" / "__init__.py").is_file()
    assert (bare / "nvidia" / "nccl" / "lib" / "libnccl.so.2").is_file()
    assert (site / "torch" / "lib" / "nccl.so.2").read_text() == "nccl.so.2"


# --- the wheel under test


def marker_json(marker: Marker) -> bytes:
    from m8d_build.wheel.marking import make_marker

    return make_marker(marker)


def test_subject_of_a_patched_wheel(tmp_path):
    path = write_wheel(
        tmp_path, contents(**{"torch/m8d.json": marker_json(MARKER), "functorch/__init__.py": b""})
    )
    subject = read_subject(path)
    assert subject.marker == MARKER
    assert subject.python_tag == "cp311"
    assert subject.recipe.brings == ("functorch", "torch", "torch-2.6.0.dist-info")
    assert subject.recipe.requirement == str(path)


def test_an_unpatched_wheel_is_refused(tmp_path):
    with pytest.raises(WheelMismatch, match=r"m8d\.json"):
        read_subject(write_wheel(tmp_path))


def test_a_broken_marker_is_an_invalid_wheel(tmp_path):
    with pytest.raises(WheelInvalid, match="schema"):
        read_subject(write_wheel(tmp_path, contents(**{"torch/m8d.json": b"{}"})))


def installed(folder: Path, *, commit: str = COMMIT, marker: bytes = b"") -> Environment:
    site = fake_site(folder)
    (site / "torch" / "version.py").write_text(f"__version__ = '2.6.0+cu124'\ngit_version = '{commit}'\n")
    if marker:
        (site / "torch" / "m8d.json").write_bytes(marker)
    return Environment("some", folder / "python", site)


def test_the_official_wheel_of_a_ported_one_is_asked_for_by_its_version(tmp_path, monkeypatch):
    """No wheel of that version is on record, and targets.toml may not have it."""

    class Asked(Exception):
        pass

    def get_wheel(request, settings, **_):
        raise Asked(request)

    monkeypatch.setattr(check_run, "get_wheel", get_wheel)
    subject = SimpleNamespace(marker=replace(MARKER, torch="2.7.0", ported_from="2.6.0"), python_tag="cp311")
    with ExitStack() as stack, pytest.raises(Asked) as caught:
        check_run._stock(
            stack, None, subject, None, Silent(), log=tmp_path / "log", stock="auto", official=None
        )
    assert caught.value.args == (WheelRequest("torch", "2.7.0", "cp311"),)


def test_a_stock_environment_must_be_unpatched_and_of_the_same_commit(tmp_path):
    subject = SimpleNamespace(marker=MARKER)
    require_stock(installed(tmp_path / "a"), subject)
    with pytest.raises(WheelMismatch, match="commit"):
        require_stock(installed(tmp_path / "b", commit="0" * 40), subject)
    with pytest.raises(WheelMismatch, match="patched"):
        require_stock(installed(tmp_path / "c", marker=marker_json(MARKER)), subject)


def test_marker_outcomes(tmp_path):
    subject = SimpleNamespace(marker=MARKER)
    assert marker_outcome(installed(tmp_path / "a"), subject) == NO_MARKER
    assert "nccl.so.2 is missing" in marker_outcome(
        installed(tmp_path / "b", marker=marker_json(MARKER)), subject
    )
    assert "schema" in marker_outcome(installed(tmp_path / "c", marker=b"{}"), subject)


# --- running cases and the report


def test_cases_run_in_an_environment_and_their_output_is_logged(tmp_path, monkeypatch):
    probes = tmp_path / "probes"
    probes.mkdir()
    (probes / "supervise.py").write_bytes((PROBES / "supervise.py").read_bytes())
    (probes / "say.py").write_text("import sys; print('M8D {\"outcome\": \"' + sys.argv[1] + '\"}')")
    monkeypatch.setattr(check_run, "PROBES", probes)
    site = fake_site(tmp_path / "site")
    bench = check_run._Bench(
        settings_in(tmp_path), tmp_path, tmp_path / "log", {}, {"patched": {}}, ours=True
    )
    cases = [
        Case("a", "", (("say.py", "hello"),), "hello", None),
        Case("b", "", (("say.py", "bye"),), None, "bye"),
    ]
    environment = Environment("env", Path(sys.executable), site)
    seen = check_run.run_cases(cases, "patched", environment, bench, MARKER)
    assert {name: observed.outcome for name, observed in seen.items()} == {"a": "hello"}
    assert "=== a on env: hello" in (tmp_path / "log").read_text()
    assert (tmp_path / "patched" / "bare" / "torch" / "lib").is_dir()


def seen(outcome: str) -> Observed:
    return Observed(outcome, 1.5, {"n": 1}, "")


@pytest.mark.parametrize(
    ("stock", "patched", "ok"),
    [
        (ABORTED, "good", True),
        (None, "good", True),
        (ABORTED, ABORTED, False),
        ("good", "good", False),
        (ABORTED, None, False),
    ],
)
def test_a_result_is_good_only_if_both_are_as_expected(stock, patched, ok):
    result = judge(CASE, seen(stock) if stock else None, seen(patched) if patched else None)
    assert result.ok is ok
    assert bool(result.failures()) is not ok
    assert report_of(result).ok is ok


def report_of(*results: Result) -> Report:
    return Report(
        Path("/w/torch.whl"), "0" * 64, "2.6.0+cu124.m8d1", ("group-guard",), "stock env", results, 12.34
    )


def test_a_failed_report_lists_every_failure(tmp_path):
    report = report_of(judge(CASE, seen("good"), seen(ABORTED)), judge(CASE, seen(ABORTED), seen("good")))
    with pytest.raises(BehaviourFailed, match="1 of 2 checks") as caught:
        report.require_ok(tmp_path / "log")
    assert caught.value.log == tmp_path / "log"
    assert caught.value.tail.splitlines() == [
        "c: stock: good; expected: SIGABRT",
        "c: patched: SIGABRT; expected: good",
    ]


def test_a_good_report_is_quiet_and_says_all_in_json_and_table():
    report = report_of(judge(CASE, seen(ABORTED), seen("good")))
    report.require_ok()
    data = json.loads(json.dumps(report.as_json()))
    assert data["ok"] is True
    assert data["checks"][0]["stock"] == ABORTED
    assert data["checks"][0]["details"] == {"stock": {"n": 1}, "patched": {"n": 1}}
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(report.as_table())
    assert "SIGABRT" in console.export_text()


# --- the command


def arguments(tmp_path, *words):
    import argparse

    parser = argparse.ArgumentParser()
    check_cli.configure_parser(parser)
    return parser.parse_args([*words, "--out", str(tmp_path / "out")])


def test_command_takes_the_newest_patched_wheel_and_fails_if_a_check_failed(tmp_path, monkeypatch):
    import os

    out = tmp_path / "out"
    out.mkdir()
    for age, name in (
        (20, "torch-2.6.0+cu124.m8d1-a.whl"),
        (10, "torch-2.7.0+cu126.m8d1-b.whl"),
        (0, "other.whl"),
    ):
        (out / name).write_text("")
        os.utime(out / name, (1_000_000 - age, 1_000_000 - age))
    asked = []

    def check(wheel, _settings, _report, **options):
        asked.append((wheel.name, options["stock"], options["keep"]))
        return report_of(judge(CASE, seen(ABORTED), seen(outcome)))

    monkeypatch.setattr(check_cli, "check_wheel", check)
    console = Console(record=True, width=200)
    outcome = "good"
    assert check_cli.execute(arguments(tmp_path), settings_in(tmp_path), console) == 0
    outcome = ABORTED
    with pytest.raises(BehaviourFailed):
        check_cli.execute(arguments(tmp_path, "--stock", "none", "--keep"), settings_in(tmp_path), console)
    assert asked == [
        ("torch-2.7.0+cu126.m8d1-b.whl", "auto", False),
        ("torch-2.7.0+cu126.m8d1-b.whl", "none", True),
    ]
    assert (out / "logs" / "check-torch-2.7.0+cu126.m8d1-b.log").exists()


@pytest.mark.parametrize("trouble", ["damaged", "unwritable"])
@pytest.mark.parametrize("options", [(), ("--json",)])
def test_a_report_on_a_port_that_cannot_be_added_to_hides_no_outcome(
    tmp_path, monkeypatch, capsys, trouble, options
):
    wheel = tmp_path / "torch-2.7.0+cu126.m8d0.ported-b.whl"
    wheel.touch()
    wheel.with_name(f"{wheel.name}.port.json").write_text("{" if trouble == "damaged" else "{}")
    if trouble == "unwritable":
        # In the way of the file that is renamed: also root cannot write there.
        wheel.with_name(f".{wheel.name}.port.json.part").mkdir()
    outcome = "good"
    monkeypatch.setattr(
        check_cli, "check_wheel", lambda *_, **__: report_of(judge(CASE, seen(ABORTED), seen(outcome)))
    )
    console = Console(file=io.StringIO(), width=200)
    args = arguments(tmp_path, str(wheel), *options)
    assert check_cli.execute(args, settings_in(tmp_path), console) == 0
    said = console.file.getvalue()
    note = capsys.readouterr().err if options else said
    assert "NOT added to the report on the port" in note
    assert f"{wheel.name}.port.json" in note
    if options:
        assert json.loads(said)["ok"] is True
    outcome = ABORTED
    with pytest.raises(BehaviourFailed):
        check_cli.execute(args, settings_in(tmp_path), console)


def test_a_failed_check_is_added_to_the_report_on_the_port(tmp_path, monkeypatch):
    wheel = tmp_path / "torch-2.7.0+cu126.m8d0.ported-b.whl"
    wheel.touch()
    beside = wheel.with_name(f"{wheel.name}.port.json")
    beside.write_text("{}")
    monkeypatch.setattr(
        check_cli, "check_wheel", lambda *_, **__: report_of(judge(CASE, seen(ABORTED), seen(ABORTED)))
    )
    with pytest.raises(BehaviourFailed):
        check_cli.execute(arguments(tmp_path, str(wheel)), settings_in(tmp_path), Console(file=io.StringIO()))
    assert json.loads(beside.read_text())["behaviour"]["ok"] is False


def test_command_without_a_wheel_says_where_it_looked(tmp_path):
    with pytest.raises(WheelUnreachable, match="no patched wheel"):
        check_cli.execute(arguments(tmp_path), settings_in(tmp_path), Console())


def test_command_needs_a_folder_for_its_log(tmp_path):
    (tmp_path / "out").write_text("a file")
    (tmp_path / "some.whl").touch()
    with pytest.raises(OutputUnwritable):
        check_cli.execute(arguments(tmp_path, str(tmp_path / "some.whl")), settings_in(tmp_path), Console())
