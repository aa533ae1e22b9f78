"""The graft on libraries compiled here: who binds to what, in real processes, and what is refused."""

from __future__ import annotations

import errno
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest
from kits.elf_fixtures import OVERLAY, Bench, build, compile_object, link, run_python, shared_bench

from m8d_build.elf.image import open_image
from m8d_build.elf.read import read_library, read_object
from m8d_build.elf.symbols import Symbol
from m8d_build.errors import AlreadyGrafted, CheckFailed, DiskFull, ElfInvalid, OutputUnwritable
from m8d_build.overlay import graft as graft_module
from m8d_build.overlay.graft import (
    export_names,
    graft,
    graft_edits,
    merge_definitions,
    plan_graft,
    version_script,
)

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.compiler

ANSWER, LEVEL = "_ZN4c10d6answerEv", "_ZN4c10d5levelE"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """The library as it came, an extension linked against it, and an overlay; nothing is grafted."""
    bench = shared_bench(tmp_path_factory)
    if not bench.overlay.exists():
        names = export_names(read_object(bench.unit_object).definitions, read_library(bench.library).exports)
        bench.link_overlay(script=version_script(names))
        bench.link_extension()
    return bench


@pytest.fixture
def bench(original: Bench, tmp_path: Path) -> Bench:
    return original.copy(tmp_path / "bench")


@pytest.fixture
def grafted(bench: Bench) -> Bench:
    graft(bench.library, bench.library, bench.overlay)
    return bench


def load_and_ask(bench: Bench, order: str) -> str:
    done = run_python(
        f"""
import ctypes
loaded = {{name: ctypes.CDLL("./" + name) for name in {order.split()!r}}}
old, ext = loaded["libold.so"], loaded["ext.so"]
places = set()
for function in (old.address_of_shared, old.where_says_the_unit, ext.ext_shared):
    function.restype = ctypes.c_void_p
    places.add(function())
print(old.ask(), old.read_level(), old.ask_group(), old.ask_pointer(), old.stays(), ext.ext_ask(), ext.ext_level(), len(places))
""",
        bench.folder,
    )
    return done.stdout.strip() or done.stderr


ORDERS = (
    "libold.so ext.so",
    "ext.so libold.so",
    f"{OVERLAY} libold.so ext.so",
    f"ext.so {OVERLAY} libold.so",
)
EVERYONE_NEW = "2 222 2 2 7 22 22 1"


def test_everyone_gets_the_old_code_before_the_graft(bench: Bench) -> None:
    assert load_and_ask(bench, "libold.so ext.so") == "1 111 1 1 7 11 11 1"


@pytest.mark.parametrize("order", ORDERS)
def test_everyone_gets_the_overlay_whatever_is_loaded_first(grafted: Bench, order: str) -> None:
    assert load_and_ask(grafted, order) == EVERYONE_NEW


def test_only_asking_for_the_overlay_would_not_be_enough(bench: Bench) -> None:
    result = graft_edits(bench.library, bench.overlay)
    data = bytearray(bench.library.read_bytes())
    needed = max(result.edits, key=lambda edit: len(edit.new))
    data[needed.offset : needed.end] = needed.new
    bench.library.write_bytes(data)
    assert load_and_ask(bench, "libold.so ext.so").startswith("1 ")


def test_an_extension_linked_against_the_grafted_library_gets_the_overlay(grafted: Bench) -> None:
    (grafted.folder / "ext.so").unlink()
    grafted.link_extension()  # with -z defs
    assert OVERLAY not in read_library(grafted.folder / "ext.so").needed
    assert load_and_ask(grafted, "ext.so libold.so") == EVERYONE_NEW


def test_a_program_linked_before_the_graft_reads_the_overlays_variable_through_its_copy(bench: Bench) -> None:
    (bench.folder / "main.cpp").write_text(
        '#include "unit.h"\n#include <cstdio>\nextern "C" int ask(); extern "C" int read_level();\n'
        'int main() { c10d::level += 3; std::printf("%d %d %d", c10d::level, ask(), read_level()); }\n'
    )
    main = bench.folder / "main"
    build("-std=gnu++17", "-O1", "-fno-pie", "-no-pie", "-DANSWER=1", bench.folder / "main.cpp", "-o", main,
          f"-L{bench.folder}", "-l:libold.so", "-Wl,-rpath,$ORIGIN", f"-Wl,-rpath-link,{bench.folder}")  # fmt: skip
    relocations = subprocess.run(["readelf", "-rW", main], capture_output=True, text=True, check=True).stdout
    assert "R_X86_64_COPY" in relocations
    graft(bench.library, bench.library, bench.overlay)
    done = subprocess.run([main], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "5 2 522", done.stderr


def test_exceptions_and_types_cross_the_two_libraries(grafted: Bench) -> None:
    (grafted.folder / "cross.cpp").write_text(
        '#include "unit.h"\n#include <typeinfo>\n'
        "namespace c10d { std::shared_ptr<Fault> fault(); }\n"
        'extern "C" API int cross() { try { throw *c10d::fault(); } catch (c10d::Fault& f) { return f.code; } }\n'
    )
    compile_object(grafted.folder / "cross.cpp", grafted.folder / "cross.o", "-DANSWER=1")
    link(grafted.folder / "cross.so", grafted.folder / "cross.o", f"-L{grafted.folder}", "-l:libold.so",
         "-Wl,-z,defs", "-Wl,-rpath,$ORIGIN", f"-Wl,-rpath-link,{grafted.folder}")  # fmt: skip
    done = run_python('import ctypes; print(ctypes.CDLL("./cross.so").cross())', grafted.folder)
    assert done.stdout.strip() == "2", done.stderr


@pytest.mark.parametrize("first", ["libold.so", "ext.so"])
def test_a_missing_overlay_stops_loading(grafted: Bench, first: str) -> None:
    grafted.overlay.unlink()
    done = run_python(f'import ctypes; ctypes.CDLL("./{first}"); print("loaded")', grafted.folder)
    assert "loaded" not in done.stdout
    assert f"{OVERLAY}: cannot open shared object file" in done.stderr


def test_only_the_recorded_bytes_change(original: Bench, grafted: Bench) -> None:
    result = graft_edits(original.library, original.overlay)
    before, after = bytearray(original.library.read_bytes()), grafted.library.read_bytes()
    assert len(before) == len(after)
    assert result.changed_bytes == sum(a != b for a, b in zip(before, after, strict=True)) > 0
    for edit in result.edits:
        assert before[edit.offset : edit.end] == edit.old
        before[edit.offset : edit.end] = edit.new
    assert bytes(before) == after


def test_what_is_hidden_is_what_the_overlay_replaces(original: Bench) -> None:
    hide = set(graft_edits(original.library, original.overlay).plan.hide)
    assert {ANSWER, LEVEL, "_ZN4c10d5depthE", "_ZTVN4c10d5GroupE", "_ZTIN4c10d5FaultE"} <= hide
    assert not any("stays" in name or "ask" in name for name in hide)
    assert "_ZZN4c10d6sharedEvE5value" not in hide  # unique: one in the whole process
    assert not any("St" in name[:6] for name in hide)


def test_hidden_names_stay_in_the_symbol_table_for_the_linker(original: Bench, grafted: Bench) -> None:
    before, after = read_library(original.library), read_library(grafted.library)
    assert after.symbols == before.symbols
    assert ANSWER in after.unfindable
    assert not before.unfindable


def test_a_second_graft_is_refused_and_changes_nothing(grafted: Bench, tmp_path: Path) -> None:
    before = grafted.library.read_bytes()
    for target in (grafted.library, tmp_path / "twice.so"):
        with pytest.raises(AlreadyGrafted, match="already"):
            graft(grafted.library, target, grafted.overlay)
    assert grafted.library.read_bytes() == before
    assert not (tmp_path / "twice.so").exists()


def test_a_second_graft_under_another_name_is_refused(grafted: Bench) -> None:
    other = grafted.folder / "other.so"
    shutil.copy(grafted.overlay, other)
    with pytest.raises(AlreadyGrafted, match=r"hides \d+ symbols already"):
        graft(grafted.library, grafted.library, other)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["-Wl,-Bsymbolic"], "Bsymbolic"),
        (["-Wl,--hash-style=both"], "both .gnu.hash and .hash"),
        (["-Wl,--hash-style=sysv"], "no .gnu.hash"),
        (["-Wl,-rpath,/nowhere"], r"\$ORIGIN"),
        (["-Wl,-z,nodynamic-undefined-weak", "-Wl,--spare-dynamic-tags=1"], "no spare entry"),
    ],
)
def test_a_library_linked_so_that_the_graft_would_not_hold_is_refused(
    bench: Bench, flags: list[str], message: str
) -> None:
    if "-Wl,-rpath,/nowhere" in flags:
        bench.library.write_bytes(bench.library.read_bytes().replace(b"$ORIGIN\0", b"$NOWHER\0"))
    else:
        bench.link_library(*flags)
    with pytest.raises(ElfInvalid, match=message):
        graft(bench.library, bench.library, bench.overlay)


def test_versioned_definitions_are_refused(bench: Bench) -> None:
    (bench.folder / "versions.map").write_text("OLD_1 { global: *; };\n")
    bench.link_library(f"-Wl,--version-script={bench.folder / 'versions.map'}")
    with pytest.raises(ElfInvalid, match="version OLD_1"):
        graft(bench.library, bench.library, bench.overlay)


def test_protected_definitions_are_refused(bench: Bench) -> None:
    header = bench.folder / "unit.h"
    header.write_text(
        header.read_text().replace(
            "API int answer();", '__attribute__((visibility("protected"))) int answer();'
        )
    )
    compile_object(bench.folder / "unit.cpp", bench.old_unit_object, "-DANSWER=1")
    bench.link_library()
    with pytest.raises(ElfInvalid, match="PROTECTED"):
        graft(bench.library, bench.library, bench.overlay)


def test_a_name_that_is_no_suffix_in_dynstr_is_refused(bench: Bench) -> None:
    odd = link(
        bench.folder / "odd.so", bench.unit_object, "-Wl,--no-as-needed", f"-L{bench.folder}", "-l:libold.so"
    )
    with pytest.raises(ElfInvalid, match=r"ends in 'odd\.so'"):
        graft(bench.library, bench.library, odd)


def test_an_overlay_that_is_none_is_refused(bench: Bench) -> None:
    names = export_names(read_object(bench.unit_object).definitions, read_library(bench.library).exports)
    bench.link_overlay("-Wl,-soname,liar.so", script=version_script(names))
    with pytest.raises(CheckFailed, match="soname"):
        graft(bench.library, bench.library, bench.overlay)
    bench.link_overlay("-Wl,-Bsymbolic", script=version_script(names))
    with pytest.raises(CheckFailed, match="Bsymbolic"):
        graft(bench.library, bench.library, bench.overlay)
    bench.link_overlay(script="NEW_1 { global: *; };\n")
    with pytest.raises(CheckFailed, match="versions"):
        graft(bench.library, bench.library, bench.overlay)
    bench.link_overlay(script="{ local: *; };\n")
    with pytest.raises(CheckFailed, match="replaces nothing"):
        graft(bench.library, bench.library, bench.overlay)
    link(bench.overlay, bench.unit_object)
    with pytest.raises(CheckFailed, match=r"does not ask for libold\.so"):
        graft(bench.library, bench.library, bench.overlay)
    assert read_library(bench.library).unfindable == frozenset()


@pytest.mark.parametrize(
    "error",
    [OSError(errno.ENOSPC, "No space left on device"), OSError(errno.EACCES, "no"), KeyboardInterrupt()],
)
def test_a_write_that_fails_leaves_nothing(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def fail(*_: object) -> None:
        raise error

    before = {path.name: path.read_bytes() for path in bench.folder.iterdir()}
    monkeypatch.setattr(shutil, "copyfile", fail)
    with pytest.raises((DiskFull, OutputUnwritable, KeyboardInterrupt)) as caught:
        graft(bench.library, bench.folder / "new.so", bench.overlay)
    wanted = {errno.ENOSPC: DiskFull, errno.EACCES: OutputUnwritable}.get(
        getattr(error, "errno", 0), KeyboardInterrupt
    )
    assert caught.type is wanted
    assert {path.name: path.read_bytes() for path in bench.folder.iterdir()} == before


def test_a_graft_that_does_not_hold_is_not_written(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "m8d_build.elf.edit.unfindable_hash", lambda stored, own, buckets: own & ~1 | stored & 1
    )
    before = bench.library.read_bytes()
    with pytest.raises(CheckFailed, match="still finds"):
        graft(bench.library, bench.library, bench.overlay)
    assert bench.library.read_bytes() == before


def test_the_checks_name_what_is_wrong(original: Bench, grafted: Bench) -> None:
    before, after, overlay = (read_library(p) for p in (original.library, grafted.library, grafted.overlay))
    plan = plan_graft(before, overlay, OVERLAY)
    graft_module.check_graft(before, after, overlay, plan)
    fewer = graft_module.GraftPlan(plan.needed, plan.hide[1:])
    with pytest.raises(CheckFailed, match=f"no longer finds {plan.hide[0]}"):
        graft_module.check_graft(before, after, overlay, fewer)
    with pytest.raises(CheckFailed, match="still finds stays"):
        graft_module.check_graft(
            before, after, overlay, graft_module.GraftPlan(plan.needed, (*plan.hide, "stays"))
        )
    with pytest.raises(CheckFailed, match="asks for"):
        graft_module.check_graft(before, before, overlay, plan)


def test_the_library_itself_is_never_written_by_the_edits_alone(bench: Bench) -> None:
    before = bench.library.read_bytes()
    assert graft_edits(bench.library, bench.overlay).edits
    assert bench.library.read_bytes() == before


def symbol(name: str, binding: str = "GLOBAL", kind: str = "FUNC", visibility: str = "DEFAULT") -> Symbol:
    return Symbol(1, name, 0x10, 8, binding, kind, visibility, 1)


EXPORT_RULES = [
    ("_ZN4c10d6answerEv", "GLOBAL", "FUNC", True, True),  # strong: ours
    ("_ZN3foo3barEv", "GLOBAL", "FUNC", False, True),  # strong, added by a patch
    ("_ZN4c10d4Work4waitEv", "WEAK", "FUNC", True, True),  # weak, of our namespaces
    ("_ZN5torch4cuda4nccl4sizeEv", "WEAK", "FUNC", True, True),
    ("_ZN4c10d4Work4waitEv", "WEAK", "FUNC", False, False),  # nobody could have bound to it
    ("_ZTVN4c10d4WorkE", "WEAK", "OBJECT", True, True),
    ("_ZThn16_N4c10d4WorkD1Ev", "WEAK", "FUNC", True, True),
    ("_ZTIN3c105ErrorE", "WEAK", "OBJECT", True, True),  # a table outside std
    ("_ZTISt9exception", "WEAK", "OBJECT", True, False),
    ("_ZNSt6vectorIiSaIiEE9push_backEOi", "WEAK", "FUNC", True, False),  # std code of this compiler
    ("_ZSt4moveIiEvv", "WEAK", "FUNC", True, False),
    ("_ZN3c103fooEv", "WEAK", "FUNC", True, False),
    ("_ZZNSt3fooEvE1x", "UNIQUE", "OBJECT", True, True),  # a static: one in the process
    ("_ZZNSt3fooEvE1x", "UNIQUE", "OBJECT", False, True),
    ("_ZGVZNSt3fooEvE1x", "WEAK", "OBJECT", True, True),  # its guard goes with it
    ("_ZNSt3foo1xE", "WEAK", "OBJECT", False, True),
]


@pytest.mark.parametrize(("name", "binding", "kind", "in_old", "exported"), EXPORT_RULES)
def test_export_rules(name: str, binding: str, kind: str, in_old: bool, exported: bool) -> None:
    names = export_names({name: symbol(name, binding, kind)}, {name: symbol(name)} if in_old else {})
    assert (names.exported, names.private) == (((name,), ()) if exported else ((), (name,)))


def test_hidden_definitions_are_neither_exported_nor_listed() -> None:
    names = export_names({"f": symbol("f", visibility="HIDDEN")}, {"f": symbol("f")})
    assert names == graft_module.ExportNames((), ())


def test_a_strong_definition_wins_over_a_weak_one() -> None:
    weak, strong = symbol("f", "WEAK"), symbol("f")
    assert (
        merge_definitions([{"f": weak}, {"f": strong}])
        == merge_definitions([{"f": strong}, {"f": weak}])
        == {"f": strong}
    )


def test_the_overlay_exports_exactly_what_the_version_script_says(original: Bench) -> None:
    names = export_names(
        read_object(original.unit_object).definitions, read_library(original.library).exports
    )
    assert set(read_library(original.overlay).exports) == set(names.exported)
    assert any(name.startswith("_ZTVSt") for name in names.private)
    assert version_script(graft_module.ExportNames((), ())) == "{ local: *; };\n"


def test_the_mapped_library_is_closed_again(original: Bench) -> None:
    with open_image(original.library) as image:
        data = image.data
    with pytest.raises(ValueError, match="closed"):
        len(data)
