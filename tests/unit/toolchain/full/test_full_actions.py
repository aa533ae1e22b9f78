"""The full build from an empty folder to a marked wheel, with small scripts in place of the real programs."""

from __future__ import annotations

import argparse
import base64
import errno
import hashlib
import io
import json
import os
import shutil
import subprocess
import zipfile
from dataclasses import fields, replace
from pathlib import Path

import pytest
from kits.patchkit import commit_all
from kits.provenancekit import patched_wheel
from rich.console import Console

from m8d_build.cli import full as command
from m8d_build.errors import (
    BlobMismatch,
    BuildBusy,
    CheckFailed,
    CommandFailed,
    DirtyTree,
    DiskFull,
    PreflightFailed,
    PrerequisiteMissing,
    WheelInvalid,
    WrongTree,
)
from m8d_build.files.lock import hold
from m8d_build.full import actions
from m8d_build.full.actions import StandardActions, check_tree, link_libraries
from m8d_build.full.build import run_full
from m8d_build.full.environment import Route, RouteKind
from m8d_build.full.plan import plan_full
from m8d_build.full.portable import built_wheel, platform_tag, rpath_of, shared_libraries
from m8d_build.full.recipes import load_recipes
from m8d_build.full.steps import Act, Action, Command, FullOptions, Inputs, Layout, Step
from m8d_build.gitrepo.tree import head_commit
from m8d_build.progress import Silent
from m8d_build.series.read import Series, load_series
from m8d_build.settings import Settings
from m8d_build.targets import Abi, Status, Target
from m8d_build.wheel.wheelfile import open_wheel
from multiworld.provenance.statement import STATEMENT_NAME, Resource
from multiworld.provenance.wheel import verify_wheel
from multiworld.shim.loader import LOADER_ENTRY, loader_text


def program(path: Path, text: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


RECIPE = load_recipes().get("2.6.0")
SOURCE = "int nothing() {\n  return 0;\n}\n"
PATCHED = SOURCE + "// patched\n"


def git_blob(text: str) -> str:
    return hashlib.sha1(b"blob %d\0" % len(text) + text.encode(), usedforsecurity=False).hexdigest()


def make_target() -> Target:
    from m8d_build.targets import SourceFile

    known = {
        "version": "2.6.0",
        "tag": "v2.6.0",
        "commit": "c" * 40,
        "status": Status.APPLIES,
        "note": "",
        "abi": Abi(cxx11_abi=True, abi_version=0, std="gnu++17", cuda="12.4"),
        "topics": ("marker",),
        "files": (SourceFile("torch/a.cpp", git_blob(SOURCE)),),
    }
    return Target(**{field.name: () for field in fields(Target)} | known)


def make_series(folder: Path) -> Series:
    (folder / "v2.6.0").mkdir(parents=True)
    (folder / "v2.6.0/series").write_text("0001-marker.patch\n")
    (folder / "v2.6.0/0001-marker.patch").write_text(
        "Topic: marker\nReason: A test.\nUpstream: not meant for upstream\nEnds: -\nDrop-when: never\nSend: nothing\n"
        "Licence: context lines are PyTorch's, BSD-3-Clause\n---\n"
        "diff --git a/torch/a.cpp b/torch/a.cpp\n"
        f"index {git_blob(SOURCE)}..{git_blob(PATCHED)} 100644\n"
        "--- a/torch/a.cpp\n+++ b/torch/a.cpp\n@@ -3 +3,2 @@ int nothing() {\n }\n+// patched\n"
    )
    return load_series(folder, "2.6.0")


def make_tree(tree: Path) -> Path:
    for name, text in {
        "version.txt": "2.6.0a0\n",
        "setup.py": "",
        ".gitmodules": '[submodule "third_party/x"]\n\tpath = third_party/x\n\turl = https://x/x\n',
        "third_party/x/CMakeLists.txt": "",
        "torch/a.cpp": SOURCE,
    }.items():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text(text)
    return tree


def test_a_whole_tree_of_the_tag_passes(tmp_path):
    check_tree(make_tree(tmp_path / "t"), make_target())


@pytest.mark.parametrize(
    ("name", "text", "error", "message"),
    [
        ("version.txt", "2.5.1\n", WrongTree, r"is PyTorch 2\.5\.1"),
        ("version.txt", None, WrongTree, "no PyTorch source tree"),
        (".gitmodules", None, WrongTree, "submodules"),
        ("third_party/x/CMakeLists.txt", None, WrongTree, "lacks its submodules: third_party/x"),
        ("torch/a.cpp", PATCHED, BlobMismatch, r"torch/a\.cpp"),
    ],
)
def test_a_tree_that_is_not_the_tags_is_refused(tmp_path, name, text, error, message):
    tree = make_tree(tmp_path / "t")
    (tree / name).unlink()
    if text is not None:
        (tree / name).write_text(text)
    with pytest.raises(error, match=message) as caught:
        check_tree(tree, make_target())
    assert "--allow-unverified" not in str(caught.value), "the full build has no such option"


def make_clone(folder: Path) -> tuple[Path, Target]:
    """A clone with a submodule that, as PyTorch's do, asks git to ignore changes in it."""
    tree = make_tree(folder)
    commit_all(tree / "third_party/x")
    (tree / ".gitmodules").write_text((tree / ".gitmodules").read_text() + "\tignore = dirty\n")
    commit_all(tree)
    return tree, replace(make_target(), commit=head_commit(tree))


@pytest.mark.git
def test_a_clone_at_the_commit_passes_with_files_that_git_does_not_know(tmp_path):
    tree, target = make_clone(tmp_path / "t")
    (tree / "notes").touch()
    (tree / "third_party/x/notes").touch()
    check_tree(tree, target)
    copied = tmp_path / "copy"
    shutil.copytree(tree, copied)
    check_tree(copied, target)


@pytest.mark.git
def test_a_clone_at_another_commit_is_refused(tmp_path):
    tree, target = make_clone(tmp_path / "t")
    (tree / "setup.py").write_text("more = 1\n")
    commit_all(tree)
    with pytest.raises(WrongTree, match=f"is at commit {head_commit(tree)}"):
        check_tree(tree, target)


@pytest.mark.git
@pytest.mark.parametrize("changed", ["setup.py", "third_party/x/CMakeLists.txt"])
def test_a_clone_with_a_file_that_is_not_as_in_the_commit_is_refused(tmp_path, changed):
    tree, target = make_clone(tmp_path / "t")
    (tree / changed).write_text("more\n")
    with pytest.raises(DirtyTree, match="setup.py" if changed == "setup.py" else "third_party/x"):
        check_tree(tree, target)


@pytest.mark.parametrize(("full", "error"), [(True, DiskFull), (False, WrongTree)])
def test_a_copy_that_fails_says_why_in_a_few_words(tmp_path, monkeypatch, full, error):
    """A full disk is one, whatever else could not be copied; of many errors the first ones are shown."""
    tree, copy = make_tree(tmp_path / "tree"), shutil.copyfile

    def failing(source, to, **more):
        if Path(source).parent.name == "many":
            code = errno.ENOSPC if full and Path(source).name == "5" else errno.EACCES
            raise OSError(code, os.strerror(code), str(source))
        return copy(source, to, **more)

    (tree / "many").mkdir()
    for number in range(10):
        (tree / "many" / str(number)).touch()
    monkeypatch.setattr(shutil, "copyfile", failing)
    layout = Layout.of("2.6.0", "cu124", "3.11", tmp_path / "out")
    action = Action(Act.COPY_TREE, (("source", str(tree)), ("tree", str(layout.tree))))
    step = Step("sources", "get the sources", (action,), makes=(), next_step="-")
    series = make_series(tmp_path / "patches")
    plan = replace(real_plan(tmp_path, {"micromamba": "", "git": ""}, series), layout=layout, steps=(step,))
    with pytest.raises(error) as caught:
        run_full(plan, actions_of(tmp_path, series), Silent())
    assert not list(layout.work.glob("*pytorch*"))
    if not full:
        assert caught.value.value.count("Permission denied") == 3
        assert caught.value.value.endswith("; and 7 more")


def test_libraries_get_the_names_cmake_looks_for(tmp_path):
    packages = tmp_path / "site-packages"
    for name in ("nvidia/nccl/lib/libnccl.so.2", "nvidia/nccl/lib/__init__.py", "nvidia/nccl/include/nccl.h"):
        (packages / name).parent.mkdir(parents=True, exist_ok=True)
        (packages / name).write_text(name)
    link_libraries(packages, ["nvidia/nccl"], tmp_path / "linked")
    found = sorted(str(path.relative_to(tmp_path / "linked")) for path in (tmp_path / "linked").rglob("*.*"))
    assert found == ["include/nccl.h", "lib/libnccl.so", "lib/libnccl.so.2"]
    assert (tmp_path / "linked/lib/libnccl.so").read_text() == "nvidia/nccl/lib/libnccl.so.2"


def test_a_package_that_is_not_installed_is_named(tmp_path):
    with pytest.raises(PrerequisiteMissing, match="nvidia/cudnn"):
        link_libraries(tmp_path, ["nvidia/cudnn"], tmp_path / "linked")


def test_library_paths_lead_from_each_folder_to_nvidias():
    assert rpath_of("torch/lib/libc10.so", ["nvidia/nccl/lib"]) == "$ORIGIN/../../nvidia/nccl/lib:$ORIGIN"
    assert rpath_of("torch/_C.cpython-311-x86_64-linux-gnu.so", ["cusparselt/lib"]) == (
        "$ORIGIN/../cusparselt/lib:$ORIGIN:$ORIGIN/lib"
    )


def test_only_torchs_own_libraries_are_touched():
    names = [
        "torch/_C.cpython-311-x86_64-linux-gnu.so", "torch/lib/libc10.so", "torch/lib/libgomp-a34b3233.so.1",
        "functorch/_C.so", "torch/include/a.h", "torch/lib/readme.txt", "torch/bin/x.so", "torch/testing/_x.so",
    ]  # fmt: skip
    assert shared_libraries(names) == tuple(names[:3])


def test_the_platform_is_the_newest_glibc_any_library_wants():
    assert platform_tag([(2, 17), (2, 28), (0, 0)]) == "manylinux_2_28_x86_64"
    assert platform_tag([(0, 0)]) == "linux_x86_64"


def test_a_build_that_left_no_wheel_or_two_is_refused(tmp_path):
    with pytest.raises(WheelInvalid, match="0 wheels"):
        built_wheel(tmp_path)
    (tmp_path / "torch-1-py3-none-any.whl").touch()
    (tmp_path / "torch-2-py3-none-any.whl").touch()
    with pytest.raises(WheelInvalid, match="2 wheels"):
        built_wheel(tmp_path)


# --- the whole plan, with fakes for git, the environment and patchelf ---

VERSION = "2.6.0+cu124.m8d1"
CPP = """
extern "C" const char* m8d_patch_info();
extern "C" const char* m8d_patch_info() {
  __attribute__((used)) static const char info[] = "m8d-patch-info:INFO";
  return info;
}
"""


def compiled(folder: Path, name: str, source: str, *flags: str) -> bytes:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "x.cpp").write_text(source)
    subprocess.run(
        ["g++", "-shared", "-fPIC", "-O1", "-o", str(folder / name), str(folder / "x.cpp"), *flags],
        check=True,
        timeout=60,
    )
    return (folder / name).read_bytes()


def wheel_bytes(contents: dict[str, bytes]) -> bytes:
    info = f"torch-{VERSION}.dist-info"
    files = {
        **contents,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: torch\nVersion: {VERSION}\n\nText\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: false\nTag: cp311-cp311-linux_x86_64\n",
    }
    rows = []
    for name, data in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        rows.append(f"{name},sha256={digest},{len(data)}")
    files[f"{info}/RECORD"] = "\n".join([*rows, f"{info}/RECORD,,", ""]).encode()
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return stream.getvalue()


@pytest.fixture
def machine(tmp_path):
    """Fakes that log their calls: micromamba (which runs what it is given), git, the environment's Python, patchelf."""
    log = tmp_path / "calls"
    info = json.dumps({"schema": 1, "torch": "2.6.0", "topics": ["marker"]}).replace('"', '\\"')
    contents = {
        "torch/__init__.py": b"",
        "torch/version.py": f"__version__ = '{VERSION}'\ndebug = False\ncuda = '12.4'\ngit_version = '{'c' * 40}'\nhip = None\n".encode(),
        "torch/lib/libtorch_cuda.so": compiled(
            tmp_path / "cc", "libtorch_cuda.so", CPP.replace("INFO", info)
        ),
        "torch/lib/libc10.so": compiled(tmp_path / "cc", "libc10.so", "int c10() { return 0; }"),
    }
    compiled(tmp_path / "cc", "libgomp.so.1", "int gomp() { return 0; }", "-Wl,-soname,libgomp.so.1")
    built = tmp_path / f"torch-{VERSION}-cp311-cp311-linux_x86_64.whl"
    built.write_bytes(wheel_bytes(contents))
    make_tree(tmp_path / "upstream")
    python = program(
        tmp_path / "python",
        f"""echo "python $*" >> "{log}"
site="$(dirname "$0")/../lib/python3.11/site-packages"
case "$*" in
  *"pip install"*) for p in nvidia/cudnn nvidia/nccl cusparselt; do mkdir -p "$site/$p/lib" "$site/$p/include"; done;;
  "setup.py build --cmake-only") test -n "$USE_CUDA" || exit 4; mkdir -p build; touch build/CMakeCache.txt;;
  "setup.py bdist_wheel"*) grep -q patched torch/a.cpp || exit 5
    test ! -e "{tmp_path}/fail-build" || {{ echo "ninja: build stopped"; exit 1; }}
    mkdir -p "$4"; cp "{built}" "$4";;
esac""",
    )
    patchelf = program(tmp_path / "patchelf", f'echo "patchelf $*" >> "{log}"')
    mamba = program(
        tmp_path / "bin/micromamba",
        f"""echo "micromamba $1" >> "{log}"
case "$1" in
  create) mkdir -p "$4/bin" "$4/lib"; cp "{tmp_path}/cc/libgomp.so.1" "$4/lib"; cp "{python}" "$4/bin/python"; cp "{patchelf}" "$4/bin/patchelf";;
  run) shift 3; exec "$@";;
esac""",
    )
    git = program(
        tmp_path / "bin/git",
        f'echo "git $1" >> "{log}"\nfor last; do :; done\ncp -r "{tmp_path}/upstream" "$last"',
    )
    return {"log": log, "micromamba": mamba, "git": git}


def real_plan(tmp_path, machine, series, **changes):
    text = "- python={python}\n"
    options = FullOptions(
        Route(RouteKind.MICROMAMBA, machine["micromamba"]), "3.11", tmp_path / "out", 4, **changes
    )
    inputs = Inputs(series.digest, text, ("r.txt", "a\n"), ("n.txt", "b\n"))
    plan = plan_full(
        replace(make_target(), build=1, series=series.digest), RECIPE, options, inputs, cxx11_abi=True
    )
    sources = plan.steps[1]
    fake = tuple(
        replace(p, argv=(machine["git"], *p.argv[1:])) if isinstance(p, Command) else p for p in sources.parts
    )
    return replace(plan, steps=(plan.steps[0], replace(sources, parts=fake), *plan.steps[2:]))


def actions_of(tmp_path, series):
    return StandardActions(make_target(), series, "", tmp_path / "patches", "0.1")


@pytest.mark.compiler
def test_the_whole_plan_makes_a_marked_wheel(tmp_path, machine):
    series = make_series(tmp_path / "patches")
    plan = real_plan(tmp_path, machine, series)
    result = run_full(plan, actions_of(tmp_path, series), Silent())
    assert result.wheel.name.startswith(f"torch-{VERSION}-cp311-cp311-")
    assert result.wheel.parent == tmp_path / "out"
    wheel = open_wheel(result.wheel)
    marker = json.loads(wheel.read("torch/m8d.json"))
    assert (marker["mode"], marker["local"], marker["overlay"]) == ("full", "cu124.m8d1", None)
    assert wheel.read(LOADER_ENTRY) == loader_text()
    assert [topic["name"] for topic in marker["topics"]] == ["marker"]
    assert marker["topics"][0]["sha256"] == series.patches[0].sha256
    (stated,) = (json.loads(wheel.read(name)) for name in wheel.entries if name.endswith(STATEMENT_NAME))
    assert "GCC" in stated["predicate"]["buildDefinition"]["internalParameters"]["compiler"]
    statement = verify_wheel(result.wheel).statement
    assert Resource("torch/a.cpp", git_blob(SOURCE), "gitBlob") in statement.inputs
    assert "unverified" not in statement.tools
    assert any(name.endswith("/NOTICE.multiworld") for name in wheel.entries)
    assert any(name.endswith("/LICENSE.multiworld") for name in wheel.entries)
    said = machine["log"].read_text()
    assert said.count("patchelf --force-rpath --set-rpath $ORIGIN/../../nvidia/cublas/lib:") == 2
    assert "git clone" in said
    assert not (plan.layout.work / "scratch").exists()


@pytest.mark.compiler
def test_a_failed_compilation_is_gone_on_with_and_nothing_before_it_is_done_again(tmp_path, machine):
    series = make_series(tmp_path / "patches")
    plan = real_plan(tmp_path, machine, series)
    (tmp_path / "fail-build").touch()
    with pytest.raises(CommandFailed) as caught:
        run_full(plan, actions_of(tmp_path, series), Silent())
    assert "could not compile PyTorch" in str(caught.value)
    assert "ninja: build stopped" in caught.value.tail
    assert "smaller --jobs" in caught.value.next_step
    (tmp_path / "fail-build").unlink()
    result = run_full(plan, actions_of(tmp_path, series), Silent())
    assert result.ran == ("wheel", "finish", "inspect")
    said = machine["log"].read_text()
    assert said.count("git clone") == said.count("micromamba create") == 1


@pytest.mark.compiler
def test_a_finished_build_is_only_inspected_again(tmp_path, machine):
    series = make_series(tmp_path / "patches")
    plan = real_plan(tmp_path, machine, series)
    first = run_full(plan, actions_of(tmp_path, series), Silent())
    second = run_full(plan, actions_of(tmp_path, series), Silent())
    assert second.ran == ("inspect",)
    assert second.wheel == first.wheel
    first.wheel.unlink()
    assert run_full(plan, actions_of(tmp_path, series), Silent()).ran == ("finish", "inspect")
    # An overlay build is none, wherever it came from.
    overlay = patched_wheel(tmp_path).path
    shutil.copy(overlay, first.wheel.with_name(first.wheel.name.replace("linux", "newer_linux")))
    assert run_full(plan, actions_of(tmp_path, series), Silent()).wheel == first.wheel
    shutil.copy(overlay, first.wheel)
    assert run_full(plan, actions_of(tmp_path, series), Silent()).ran == ("finish", "inspect")


@pytest.mark.compiler
def test_another_series_replaces_the_one_in_the_tree(tmp_path, machine):
    series = make_series(tmp_path / "patches")
    run_full(real_plan(tmp_path, machine, series), actions_of(tmp_path, series), Silent())
    patch = tmp_path / "patches/v2.6.0/0001-marker.patch"
    patch.write_text(patch.read_text().replace("Reason: A test.", "Reason: Another test."))
    other = load_series(tmp_path / "patches", "2.6.0")
    result = run_full(real_plan(tmp_path, machine, other), actions_of(tmp_path, other), Silent())
    assert result.kept == ("environment", "sources")
    marker = json.loads(open_wheel(result.wheel).read("torch/m8d.json"))
    assert marker["topics"][0]["sha256"] == other.patches[0].sha256


def rebuilt(tmp_path, **libraries):
    """Put other libraries into the wheel that the fake build leaves."""
    built = next(tmp_path.glob("torch-*.whl"))
    with zipfile.ZipFile(built) as archive:
        contents = {name: archive.read(name) for name in archive.namelist() if ".dist-info" not in name}
    built.write_bytes(
        wheel_bytes(contents | {f"torch/lib/{name}.so": data for name, data in libraries.items()})
    )


@pytest.mark.compiler
def test_a_library_without_the_patches_is_refused(tmp_path, machine):
    series = make_series(tmp_path / "patches")
    rebuilt(tmp_path, libtorch_cuda=compiled(tmp_path / "cc", "x.so", "int x() { return 0; }"))
    with pytest.raises(CheckFailed, match="says nothing of patches"):
        run_full(real_plan(tmp_path, machine, series), actions_of(tmp_path, series), Silent())
    assert not list((tmp_path / "out").glob("*.whl"))


@pytest.mark.compiler
def test_a_library_with_the_other_cxx_abi_is_refused(tmp_path, machine):
    series = make_series(tmp_path / "patches")
    old = 'extern "C" void f() __asm__("_ZN3c106detail14torchCheckFailEPKcS2_jRKSs"); void f() {}'
    rebuilt(tmp_path, libc10=compiled(tmp_path / "cc", "x.so", old))
    with pytest.raises(CheckFailed, match="_GLIBCXX_USE_CXX11_ABI=0") as caught:
        run_full(real_plan(tmp_path, machine, series), actions_of(tmp_path, series), Silent())
    assert caught.value.rule == "the official wheel has 1"


@pytest.mark.compiler
def test_the_openmp_runtime_comes_along_if_it_is_needed(tmp_path, machine):
    series = make_series(tmp_path / "patches")
    flags = ("-Wl,--no-as-needed", f"-L{tmp_path}/cc", "-l:libgomp.so.1")
    rebuilt(tmp_path, libtorch_cpu=compiled(tmp_path / "cc", "x.so", "int x() { return 0; }", *flags))
    result = run_full(real_plan(tmp_path, machine, series), actions_of(tmp_path, series), Silent())
    assert (
        open_wheel(result.wheel).read("torch/lib/libgomp.so.1") == (tmp_path / "cc/libgomp.so.1").read_bytes()
    )


@pytest.mark.compiler
def test_without_patchelf_the_wheel_is_not_finished(tmp_path, machine):
    series = make_series(tmp_path / "patches")
    plan = real_plan(tmp_path, machine, series)
    (tmp_path / "patchelf").unlink()
    (tmp_path / "bin/micromamba").write_text(
        (tmp_path / "bin/micromamba").read_text().replace('; cp "' + str(tmp_path / "patchelf"), '; : "')
    )
    with pytest.raises(PrerequisiteMissing, match="no patchelf"):
        run_full(plan, actions_of(tmp_path, series), Silent())


@pytest.mark.compiler
@pytest.mark.git
def test_a_password_in_the_url_of_git_is_never_shown(tmp_path, machine):
    url, series = "https://me:secret@mirror/pytorch.git", make_series(tmp_path / "patches")
    program(Path(machine["git"]), f'env > "{tmp_path}/env"; echo "fatal: git $*"; exit 128')
    plan = real_plan(tmp_path, machine, series, git_url=url)
    assert [step.key for step in plan.steps] == [
        step.key for step in real_plan(tmp_path, machine, series, git_url=url.replace("secret", "new")).steps
    ]
    with pytest.raises(CommandFailed) as caught:
        run_full(plan, actions_of(tmp_path, series), Silent())
    log = (plan.layout.logs / "sources.log").read_text()
    assert "https://mirror/pytorch.git" in log
    for said in (log, str(caught.value), caught.value.tail, json.dumps(plan.as_json()), repr(plan)):
        assert "secret" not in said
    told = [line for line in (tmp_path / "env").read_text().splitlines() if line.startswith("GIT_")]
    assert f"GIT_CONFIG_KEY_0=url.{url}.insteadOf" in told
    asked = subprocess.run(
        ["/usr/bin/env", *told, "git", "ls-remote", "--get-url", "https://mirror/pytorch.git"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert asked.stdout.strip() == url  # what git makes of it


@pytest.mark.compiler
def test_the_output_folder_is_held_while_the_wheel_is_written(tmp_path, machine, monkeypatch):
    """An overlay build in the same folder removes what killed runs have left there."""
    series = make_series(tmp_path / "patches")
    real = actions.finish_wheel

    def finish(plan, *more, **options):
        with pytest.raises(BuildBusy, match="finish torch"), hold(plan.layout.out, what="build an overlay"):
            pass
        return real(plan, *more, **options)

    monkeypatch.setattr(actions, "finish_wheel", finish)
    result = run_full(real_plan(tmp_path, machine, series), actions_of(tmp_path, series), Silent())
    assert "finish" in result.ran


@pytest.mark.compiler
def test_a_wheel_of_another_version_is_refused(tmp_path, machine):
    series = make_series(tmp_path / "patches")
    plan = replace(real_plan(tmp_path, machine, series), version="2.6.0+cu124.m8d9")
    with pytest.raises(CheckFailed, match=r"the built wheel is 2\.6\.0\+cu124\.m8d1"):
        run_full(plan, actions_of(tmp_path, series), Silent())


@pytest.mark.compiler
@pytest.mark.parametrize("clone", [True, False])
def test_a_wheel_of_another_commit_is_refused_and_one_of_an_unknown_commit_says_so(tmp_path, machine, clone):
    series = make_series(tmp_path / "patches")
    actions = replace(actions_of(tmp_path, series), target=replace(make_target(), commit="d" * 40))
    plan = replace(real_plan(tmp_path, machine, series), known_commit=clone)
    if clone:
        with pytest.raises(CheckFailed, match=f"is of commit {'c' * 40}"):
            run_full(plan, actions, Silent())
        assert not list((tmp_path / "out").glob("*.whl"))
    else:
        made = run_full(plan, actions, Silent()).wheel
        assert verify_wheel(made).statement.tools["unverified"] == "pytorch"


@pytest.mark.git
@pytest.mark.parametrize("clone", [True, False])
def test_sources_that_are_no_clone_make_an_unverified_wheel(repository, tmp_path, clone):
    tree = make_tree(tmp_path / "tree")
    if clone:
        commit_all(tree)
    said = execute(repository, "--torch", "2.6.0", "--source", str(tree), "--plan")[1]
    assert ("m8d1.unverified, built in" in said) != clone


@pytest.mark.compiler
def test_a_tree_of_ones_own_is_copied_and_stays_as_it_is(tmp_path, machine):
    series = make_series(tmp_path / "patches")
    own = make_tree(tmp_path / "own")
    result = run_full(
        real_plan(tmp_path, machine, series, source=str(own)), actions_of(tmp_path, series), Silent()
    )
    assert result.wheel is not None
    assert (own / "torch/a.cpp").read_text() == SOURCE
    assert sorted(path.name for path in own.iterdir()) == [
        ".gitmodules", "setup.py", "third_party", "torch", "version.txt",
    ]  # fmt: skip
    assert "git clone" not in machine["log"].read_text()


# --- the command line ---


@pytest.fixture
def repository(tmp_path):
    series = make_series(tmp_path / "patches")
    (tmp_path / "patches/targets.toml").write_text(f"""schema = 1
[[target]]
version = "2.6.0"
tag = "v2.6.0"
commit = "{"c" * 40}"
build = 1
series = "{series.digest}"
status = "applies"
topics = ["marker"]
abi = {{ cxx11_abi = false, abi_version = 11, std = "gnu++17", cuda = "12.4" }}
[target.files]
"torch/a.cpp" = "{git_blob(SOURCE)}"
""")
    return Settings.load(
        cache=tmp_path / "cache",
        patches=tmp_path / "patches",
        out=tmp_path / "out",
        jobs=2,
        environ={"CXX": "g++"},
    )


def execute(settings, *words):
    parser = argparse.ArgumentParser()
    command.configure_parser(parser)
    stream = io.StringIO()
    rc = command.execute(parser.parse_args(words), settings, Console(file=stream, width=80))
    return rc, stream.getvalue()


def test_plan_prints_every_step_and_runs_none(repository, tmp_path):
    rc, said = execute(repository, "--torch", "2.6.0", "--plan", "--env", "conda", "--python", "3.12")
    assert rc == 0
    for number, name in enumerate(
        ("environment", "sources", "patches", "requirements", "configure", "wheel", "finish"), 1
    ):
        assert any(line.startswith(f"{number}. ") and f"[{name}," in line for line in said.splitlines())
    assert "setup.py bdist_wheel" in said
    assert "_GLIBCXX_USE_CXX11_ABI=0" in said
    assert "full-2.6.0-cu124-cp312" in said
    assert not (tmp_path / "out").exists()


def test_plan_as_json_has_steps_and_problems(repository):
    _, said = execute(
        repository, "--torch", "2.6.0", "--plan", "--json", "--env", "mamba", "--jobs", "100000"
    )
    read = json.loads(said)
    assert [step["id"] for step in read["steps"]][-1] == "inspect"
    assert "memory" in {problem["code"] for problem in read["problems"]}


def test_a_machine_that_cannot_is_refused_with_every_reason_and_nothing_is_made(repository, tmp_path):
    with pytest.raises(PreflightFailed) as caught:
        execute(repository, "--torch", "2.6.0", "--jobs", "100000", "--python", "3.9", "--source", "distro")
    text = str(caught.value)
    assert all(part in text for part in ("100000 jobs", "Python 3.9", "source package"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("inside", ["out/deep", "out/link"])
def test_a_folder_in_the_tree_that_is_copied_is_refused(repository, tmp_path, inside):
    """The copy would be copied into itself."""
    tree = make_tree(tmp_path / "tree")
    out = tree / inside
    if inside.endswith("link"):
        out = tmp_path / "link"
        out.symlink_to(tree / "third_party")
    words = ("--torch", "2.6.0", "--source", str(tree), "--out", str(out))
    with pytest.raises(
        PreflightFailed, match=r"(?s)neither lies in the other.*outside of the tree with --out"
    ):
        execute(repository, *words)
    assert "neither lies in the other" in execute(repository, *words, "--plan")[1]
    assert not list(tree.rglob("full-*"))
    assert "neither lies" not in execute(repository, *words[:4], "--out", str(tmp_path), "--plan")[1]


def test_a_tree_in_the_folder_where_it_is_built_is_refused(repository, tmp_path):
    """The step that copies it removes that folder first."""
    plan = json.loads(execute(repository, "--torch", "2.6.0", "--plan", "--json")[1])
    tree = make_tree(Path(plan["work"]) / "pytorch")
    with pytest.raises(PreflightFailed, match="neither lies in the other"):
        execute(repository, "--torch", "2.6.0", "--source", str(tree), "--fresh")
    assert (tree / "setup.py").exists()


@pytest.mark.parametrize("more", [(), ("--fresh",)])
def test_the_room_that_an_earlier_run_takes_counts_as_there(repository, tmp_path, monkeypatch, more):
    facts = command.read_machine(tmp_path, "g++")
    monkeypatch.setattr(command, "read_machine", lambda *_: replace(facts, free=40 * 2**30))
    monkeypatch.setattr(command, "taken_by", lambda work: 60 * 2**30 * work.is_dir())
    words = ("--torch", "2.6.0", "--plan", "--json", *more)
    said = json.loads(execute(repository, *words)[1])
    assert "disk" in {problem["code"] for problem in said["problems"]}
    Path(said["work"]).mkdir(parents=True)
    said = json.loads(execute(repository, *words)[1])
    assert "disk" not in {problem["code"] for problem in said["problems"]}


def test_a_tree_with_compiled_objects_is_never_removed_unasked(repository):
    """Of another --env, say: it is hours of work."""
    words = ("--torch", "2.6.0", "--plan", "--json")

    def plan(*more):
        return json.loads(execute(repository, *words, *more)[1])

    def refused(*more):
        return [each["found"] for each in plan(*more)["problems"] if each["code"] == "earlier"]

    made = plan("--env", "mamba")
    tree = Path(made["work"]) / "pytorch"
    finished = {step["id"]: {"key": step["key"], "seconds": 1} for step in made["steps"][:2]}
    for path in (tree / "setup.py", tree.parent / "env/bin/python"):
        path.parent.mkdir(parents=True)
        path.touch()
    (tree.parent / "state.json").write_text(json.dumps({"schema": 1, "steps": finished}))
    assert not refused("--env", "venv")  # nothing is compiled there
    (tree / "build").mkdir()
    assert not refused("--env", "mamba")
    assert not refused("--env", "mamba", "--archs", "9.0")  # they stay in the tree
    assert refused("--env", "venv") == [f"{tree}, and what is compiled there"]
    assert not refused("--env", "venv", "--fresh")
    with pytest.raises(PreflightFailed, match="an earlier run made it with other options"):
        execute(repository, "--torch", "2.6.0", "--env", "venv")


@pytest.mark.compiler
def test_the_command_builds_and_says_how_to_install(repository, tmp_path, machine, monkeypatch):
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    monkeypatch.setattr("m8d_build.full.preflight.DISK_BYTES", 0)
    monkeypatch.setattr("m8d_build.cli.full.preflight", lambda _need, _machine: [])
    rc, said = execute(repository, "--torch", "2.6.0", "--env", "micromamba", "--python", "3.11")
    assert rc == 0
    wheel = next((tmp_path / "out").glob("torch-*.whl"))
    assert f"wheel:    {wheel}" in said
    assert hashlib.sha256(wheel.read_bytes()).hexdigest() in said
    assert "topics:   marker" in said
    assert "pip install" in said
