from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

import pytest

from m8d_build.errors import CommandFailed, CompilerMissing, DiskFull
from m8d_build.files.blobs import file_sha256
from m8d_build.overlay.compile import Compiled, compile_all, compiler_identity
from m8d_build.overlay.plan import CompileJob, Layout
from m8d_build.progress import Silent

pytestmark = pytest.mark.compiler


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return make_layout(tmp_path)


def make_layout(folder: Path) -> Layout:
    made = Layout(folder / "stage", folder / "source", folder / "work")
    for each in (made.stage, made.source, made.work):
        each.mkdir(parents=True)
    (made.stage / "unit.cpp").write_text(
        '#include "own.h"\n#include "late.h"\nint unit() { return OWN + LATE; }\n'
    )
    (made.stage / "own.h").write_text("#define OWN 1\n")
    (made.source / "late.h").write_text("#define LATE 2\n")
    (made.stage / "other.cpp").write_text("int other() { return 3; }\n")
    return made


def in_cache(layout: Layout, suffix: str, *, unit: str) -> Path:
    """Return the cache's object (".o") or manifest (".json") of a unit."""
    objects = layout.work.parent / "cache" / "objects"
    (manifest,) = (m for m in objects.glob("*.json") if json.loads(m.read_text())["unit"] == unit)
    return manifest.with_suffix(suffix)


def build(
    layout: Layout,
    *,
    identity: str = "g++ 1",
    toolbox: str = "t",
    units: tuple[str, ...] = ("unit.cpp", "other.cpp"),
    define: str = "X=1",
    compiler: str = "g++",
) -> dict[str, Compiled]:
    flags = ("-O0", f"-D{define}", f"-I{layout.stage}", "-idirafter", str(layout.source))
    jobs = [CompileJob(unit, layout.stage / unit, flags, ("-O0", define)) for unit in units]
    compiled = compile_all(
        jobs,
        layout,
        compiler=compiler,
        identity=identity,
        toolbox_identity=toolbox,
        cache=layout.work.parent / "cache",
        log=layout.work / "build.log",
        workers=2,
        budget_mb=5000,
        report=Silent(),
    )
    assert [c.job.unit for c in compiled] == list(units)
    return {c.job.unit: c for c in compiled}


def test_a_second_build_without_changes_compiles_nothing(layout: Layout) -> None:
    first = build(layout)
    assert not any(c.cached for c in first.values())
    second = build(layout)
    assert all(c.cached for c in second.values())
    assert [c.path for c in second.values()] == [c.path for c in first.values()]


def test_objects_that_are_taken_are_in_use(layout: Layout) -> None:
    build(layout, units=("other.cpp",))
    kept = [in_cache(layout, suffix, unit="other.cpp") for suffix in (".o", ".json")]
    for path in kept:
        os.utime(path, (0, 0))
    build(layout, units=("other.cpp",))
    assert all(path.stat().st_mtime > 0 for path in kept)


@pytest.mark.parametrize("changed", ["stage/unit.cpp", "stage/own.h", "source/late.h"])
def test_whatever_a_unit_read_makes_it_anew_and_only_it(layout: Layout, changed: str) -> None:
    build(layout)
    path = layout.stage.parent / changed
    path.write_text(path.read_text() + "// changed\n")
    again = build(layout)
    assert not again["unit.cpp"].cached
    assert again["other.cpp"].cached


def test_a_patched_header_that_hides_one_of_the_toolbox_makes_its_unit_anew(layout: Layout) -> None:
    """The manifest says nothing of the header that was read before: the toolbox's digest stands for it."""
    include = layout.work / "include"
    include.mkdir()
    (include / "hidden.h").write_text("#define HIDDEN 1\n")
    (layout.source / "unpatched.cpp").write_text("#include <hidden.h>\nint unpatched = HIDDEN;\n")
    flags = (f"-I{layout.stage}", f"-I{include}")
    job = CompileJob("unpatched.cpp", layout.source / "unpatched.cpp", flags, ())

    def again() -> Compiled:
        (made,) = compile_all(
            [job], layout, compiler="g++", identity="i", toolbox_identity="t", cache=layout.work / "cache",
            log=layout.work / "build.log", workers=1, budget_mb=5000, report=Silent(),
        )  # fmt: skip
        return made

    before = again().path.read_bytes()
    assert again().cached
    (layout.stage / "hidden.h").write_text("#define HIDDEN 2\n")
    assert again().path.read_bytes() != before


def test_another_build_that_shares_the_cache_does_not_replace_the_objects_of_this_one(layout: Layout) -> None:
    """The keys have the names of headers, not what is in them: both builds' objects have the same."""
    folder = layout.work.parent
    other = Layout(folder / "other" / "stage", layout.source, folder / "other-work")
    shutil.copytree(layout.stage, other.stage)
    other.work.mkdir()
    (other.stage / "own.h").write_text("#define OWN 7\n")
    for _ in ("compiled", "from the cache"):
        own = build(layout)["unit.cpp"]
        before = own.path.read_bytes()
        assert build(other)["unit.cpp"].path.read_bytes() != before
        assert own.path.read_bytes() == before
        build(layout)
    assert build(layout)["unit.cpp"].cached


@pytest.mark.parametrize(
    "name", ["c#", "d$$1", "e f", "g:h", pytest.param(os.fsdecode(b"i\xff"), id="not UTF-8")]
)
def test_folders_with_names_that_make_would_read_otherwise(tmp_path: Path, name: str) -> None:
    layout = make_layout(tmp_path / name)
    build(layout)
    assert all(c.cached for c in build(layout).values())
    (layout.stage / "own.h").write_text("#define OWN 3\n")
    again = build(layout)
    assert not again["unit.cpp"].cached
    assert again["other.cpp"].cached


def test_a_manifest_that_does_not_name_the_units_own_source_is_not_used(layout: Layout) -> None:
    for unit in build(layout):
        manifest = in_cache(layout, ".json", unit=unit)
        manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "files": {}}))
    assert not any(c.cached for c in build(layout).values())


@pytest.mark.parametrize("change", [{"identity": "g++ 2"}, {"toolbox": "u"}, {"define": "X=2"}])
def test_another_compiler_flag_or_set_of_headers_makes_everything_anew(
    layout: Layout, change: dict[str, str]
) -> None:
    build(layout)
    assert not any(c.cached for c in build(layout, **change).values())  # type: ignore[arg-type]


def test_headers_that_only_the_users_environment_names_are_not_used(layout: Layout, monkeypatch) -> None:
    """They would come before those of the pinned packages, which are system headers."""
    foreign = layout.work / "foreign"
    foreign.mkdir()
    (foreign / "late.h").write_text("#error foreign\n")
    for name in ("CPATH", "CPLUS_INCLUDE_PATH"):
        monkeypatch.setenv(name, str(foreign))
    build(layout)


def test_the_compiler_keeps_its_own_files_in_the_work_folder(layout: Layout, monkeypatch) -> None:
    """A full /tmp was reported as a full disk of the cache."""
    monkeypatch.setenv("TMPDIR", str(layout.work / "no-such-folder"))
    fake = layout.work / "cxx"
    fake.write_text(
        f'#!/bin/sh\necho "$TMPDIR" > {layout.work}/said\ntouch "$TMPDIR/cc1.s" && exec g++ "$@"\n'
    )
    fake.chmod(0o755)
    build(layout, units=("other.cpp",), compiler=str(fake))
    place = Path((layout.work / "said").read_text().strip())
    assert layout.work in place.parents
    assert not place.exists()


def test_a_damaged_object_or_manifest_is_not_used(layout: Layout) -> None:
    build(layout)
    in_cache(layout, ".o", unit="unit.cpp").write_bytes(b"not an object")
    in_cache(layout, ".json", unit="other.cpp").write_text("{")
    assert not any(c.cached for c in build(layout).values())


def test_the_manifest_names_what_was_read_by_place_and_digest(layout: Layout) -> None:
    build(layout, units=("unit.cpp",))
    files = json.loads(in_cache(layout, ".json", unit="unit.cpp").read_text())["files"]
    assert set(files) == {"stage:unit.cpp", "stage:own.h", "source:late.h"}


def test_a_compiled_unit_says_what_it_read_also_when_it_comes_from_the_cache(layout: Layout) -> None:
    for cached in (False, True):
        unit = build(layout)["unit.cpp"]
        assert unit.cached == cached
        assert unit.files["source:late.h"] == file_sha256(layout.source / "late.h")
        assert set(unit.files) == {"stage:unit.cpp", "stage:own.h", "source:late.h"}


def test_a_failing_compiler_says_what_and_where(layout: Layout) -> None:
    (layout.stage / "unit.cpp").write_text("int unit() { return missing_name; }\n")
    with pytest.raises(CommandFailed) as caught:
        build(layout, units=("unit.cpp",))
    assert "compile unit.cpp" in caught.value.value
    assert "missing_name" in caught.value.tail
    assert caught.value.log is not None
    assert "missing_name" in caught.value.log.read_text()
    assert not list((layout.work.parent / "cache" / "objects").glob("*.o"))


def test_a_compiler_that_is_not_there_is_named() -> None:
    with pytest.raises(CompilerMissing, match="no-such-compiler") as caught:
        compiler_identity("no-such-compiler")
    assert "M8D_CXX" in caught.value.next_step


def test_a_compiler_that_cannot_compile_is_refused(tmp_path: Path) -> None:
    fake = tmp_path / "fake-cxx"
    fake.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && echo fake 1.0 && exit 0\necho no C++17 here >&2\nexit 1\n'
    )
    fake.chmod(0o755)
    with pytest.raises(CompilerMissing) as caught:
        compiler_identity(str(fake))
    assert "no C++17 here" in caught.value.tail


def test_a_full_disk_is_no_fault_of_the_compilers(tmp_path: Path) -> None:
    fake = tmp_path / "fake-cxx"
    fake.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && echo fake 1.0 && exit 0\n'
        'echo "error writing to $TMPDIR/x.s: No space left on device" >&2\nexit 1\n'
    )
    fake.chmod(0o755)
    with pytest.raises(DiskFull, match=f"no room left under {tmp_path}/m8d-cxx-"):
        compiler_identity(str(fake), work=tmp_path)


def test_the_compiler_says_who_it_is() -> None:
    assert "g++" in compiler_identity("g++")
    assert "g++" in compiler_identity("g++", "gnu++20")


def test_a_compiler_too_old_for_the_targets_standard_is_refused() -> None:
    with pytest.raises(CompilerMissing, match=r"compile C\+\+99") as caught:
        compiler_identity("g++", "gnu++99")
    assert caught.value.rule == "a C++99 compiler is needed"


class Interrupting(Silent):
    """Presses Ctrl-C when the first unit is done."""

    def note(self, text: str) -> None:
        raise KeyboardInterrupt


def test_ctrl_c_ends_the_compilers_that_still_run(layout: Layout, tmp_path: Path) -> None:
    fake = tmp_path / "slow-cxx"
    fake.write_text(
        f'#!/bin/sh\ncase "$*" in *unit.cpp*) echo $$ > {tmp_path}/pid; sleep 600;; esac\n'
        f'while ! [ -s {tmp_path}/pid ]; do sleep 0.05; done\nexec g++ "$@"\n'
    )
    fake.chmod(0o755)
    jobs = [
        CompileJob(unit, layout.stage / unit, (f"-I{layout.stage}",), ())
        for unit in ("unit.cpp", "other.cpp")
    ]
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        compile_all(
            jobs, layout, compiler=str(fake), identity="i", toolbox_identity="t", cache=tmp_path / "cache",
            log=layout.work / "build.log", workers=2, budget_mb=5000, report=Interrupting(),
        )  # fmt: skip
    assert time.monotonic() - began < 60
    assert not Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}").exists()
