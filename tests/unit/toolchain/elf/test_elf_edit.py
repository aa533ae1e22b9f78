"""The ELF editor: nothing moves, nothing else changes, and nothing is written twice."""

from __future__ import annotations

import stat
import subprocess
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kits.elf_fixtures import Bench, build, run_python, shared_bench

from m8d_build.elf.edit import Edit, Editor, apply_to_file, patched, patched_chunks
from m8d_build.elf.image import Image, open_image
from m8d_build.elf.read import facts_of, read_library
from m8d_build.errors import AlreadyGrafted, ElfInvalid, OutputUnwritable

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.compiler

ANSWER = "_ZN4c10d6answerEv"


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return shared_bench(tmp_path_factory)


@pytest.fixture(scope="module")
def library(bench: Bench) -> bytes:
    return bench.library.read_bytes()


def edited(data: bytes, *, needed: str = "", hide: tuple[str, ...] = ()) -> tuple[bytes, tuple[Edit, ...]]:
    editor = Editor(Image(data, "library"))
    if needed:
        editor.add_needed(needed)
    editor.hide_symbols(hide)
    return patched(data, editor.edits), editor.edits


def test_needed_comes_last_in_a_spare_slot(library: bytes) -> None:
    before = facts_of(Image(library, "before"))
    data, edits = edited(library, needed="nccl.so.2")
    after = facts_of(Image(data, "after"))
    assert after.needed == (*before.needed, "nccl.so.2")
    assert after.spare_slots == before.spare_slots - 1
    assert (len(data), len(edits), len(edits[0].new)) == (len(library), 1, 16)
    assert (after.symbols, after.rpath, after.soname) == (before.symbols, before.rpath, before.soname)


def test_slots_are_used_up_one_by_one(library: bytes) -> None:
    editor = Editor(Image(library, "library"))
    names = ["nccl.so.2", "ccl.so.2", "cl.so.2", "l.so.2", ".so.2", "so.2", "o.2", ".2", "2"]
    spare = editor.table.spare
    assert 0 < spare < len(names)
    for name in names[:spare]:
        editor.add_needed(name)
    with pytest.raises(ElfInvalid, match="no spare entry"):
        editor.add_needed(names[spare])
    after = facts_of(Image(patched(library, editor.edits), "after"))
    assert list(after.needed[-spare:]) == names[:spare]
    assert after.spare_slots == 0


@pytest.mark.parametrize("name", ["", "nccl.so.3", "libnccl.so.2x"])
def test_a_name_that_is_not_there_cannot_be_needed(library: bytes, name: str) -> None:
    with pytest.raises(ElfInvalid, match="no string"):
        Editor(Image(library, "library")).add_needed(name)


def test_what_is_needed_already_is_refused(library: bytes) -> None:
    with pytest.raises(AlreadyGrafted):
        Editor(Image(library, "library")).add_needed("libnccl.so.2")
    data, _ = edited(library, needed="nccl.so.2")
    with pytest.raises(AlreadyGrafted):
        Editor(Image(data, "library")).add_needed("nccl.so.2")


def test_hiding_twice_is_refused_and_never_undoes(library: bytes) -> None:
    data, _ = edited(library, hide=(ANSWER,))
    assert facts_of(Image(data, "after")).unfindable == {ANSWER}
    with pytest.raises(AlreadyGrafted, match="hides _ZN4c10d6answerEv already"):
        edited(data, hide=(ANSWER,))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nobody", "does not define nobody"),
        ("ncclGetVersion", "does not define"),
        ("_ZZN4c10d6sharedEvE5value", "UNIQUE"),
    ],
)
def test_what_cannot_be_hidden_is_refused(library: bytes, name: str, message: str) -> None:
    with pytest.raises(ElfInvalid, match=message):
        edited(library, hide=(name,))


def test_changes_that_overlap_are_refused(library: bytes) -> None:
    editor = Editor(Image(library, "library"))
    editor.replace(0x100, b"\1\2\3\4")
    editor.replace(0x100, b"\1\2\3\4")
    editor.replace(0x104, b"\5")
    for offset, new in ((0x103, b"\1\2"), (0x0FE, b"\1\2\3"), (0x100, b"\1\2\3\5")):
        with pytest.raises(ElfInvalid, match="twice"):
            editor.replace(offset, new)
    with pytest.raises(ElfInvalid, match="truncated"):
        editor.replace(len(library) - 1, b"\1\2")
    assert [edit.offset for edit in editor.edits] == [0x100, 0x104]


def test_writing_refuses_a_file_that_has_changed(library: bytes, tmp_path: Path) -> None:
    _, edits = edited(library, hide=(ANSWER,))
    data = bytearray(library)
    data[edits[0].offset] ^= 0x10
    source = tmp_path / "changed.so"
    source.write_bytes(data)
    with pytest.raises(ElfInvalid, match="when the changes were recorded"):
        patched(bytes(data), edits)
    with pytest.raises(ElfInvalid, match="when the changes were recorded"):
        apply_to_file(source, source, edits)
    with pytest.raises(ElfInvalid, match="no bytes"):
        patched(library[: edits[0].offset], edits)
    assert source.read_bytes() == data
    assert [path.name for path in tmp_path.iterdir()] == ["changed.so"]


def test_a_copy_keeps_the_mode_and_the_source(library: bytes, tmp_path: Path) -> None:
    source, target = tmp_path / "a.so", tmp_path / "b.so"
    source.write_bytes(library)
    source.chmod(0o751)
    data, edits = edited(library, hide=(ANSWER,))
    apply_to_file(source, target, edits)
    assert (source.read_bytes(), target.read_bytes()) == (library, data)
    assert stat.S_IMODE(target.stat().st_mode) == 0o751
    apply_to_file(source, source, edits)
    assert source.read_bytes() == data


def test_an_output_folder_that_is_not_there_is_unwritable(bench: Bench, tmp_path: Path) -> None:
    with pytest.raises(OutputUnwritable):
        apply_to_file(bench.library, tmp_path / "absent" / "b.so", ())


@given(data=st.data())
def test_streaming_makes_the_same_changes_whatever_the_chunks(library: bytes, data: st.DataObject) -> None:
    whole, edits = edited(library, needed="nccl.so.2", hide=(ANSWER, "_ZTVN4c10d5FaultE"))
    marks = [edge + step for edit in edits for edge in (edit.offset, edit.end) for step in (-1, 0, 1)]
    cuts = sorted(data.draw(st.sets(st.integers(0, len(library)) | st.sampled_from(marks), max_size=12)))
    bounds = list(zip([0, *cuts], [*cuts, len(library)], strict=True))
    chunks = [library[low:high] for low, high in bounds]
    out = list(patched_chunks(chunks, edits[::-1]))
    assert [len(chunk) for chunk in out] == [high - low for low, high in bounds]
    assert b"".join(out) == whole


NAME = st.from_regex(r"[a-z_][a-z0-9_]{0,30}", fullmatch=True).filter(
    lambda name: name not in {"_init", "_fini"}
)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(names=st.sets(NAME, min_size=1, max_size=60), weak=st.integers(0, 3), data=st.data())
def test_on_random_libraries_every_other_byte_and_symbol_stays(
    tmp_path_factory: pytest.TempPathFactory, names: set[str], weak: int, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("random")
    every = sorted(f"s_{name}" for name in names)
    lines = [".text"]
    for number, name in enumerate(every):
        lines += [f".{'weak' if weak and number % 4 < weak else 'globl'} {name}", f".type {name}, @function",
                  f"{name}: movl ${number}, %eax", "ret", f".size {name}, . - {name}"]  # fmt: skip
    lines += [
        ".globl wants",
        ".type wants, @function",
        "wants: jmp elsewhere@PLT",
        '.section .note.GNU-stack,"",@progbits',
        "",
    ]
    (folder / "random.s").write_text("\n".join(lines))
    path = folder / "random.so"
    build(
        "-shared",
        "-nostdlib",
        "-Wl,--hash-style=gnu",
        "-Wl,-soname,some-random.so",
        folder / "random.s",
        "-o",
        path,
    )
    hide = tuple(data.draw(st.sets(st.sampled_from(every))))
    original = path.read_bytes()
    before = read_library(path)
    with open_image(path) as image:
        editor = Editor(image)
        editor.add_needed("random.so")
        editor.hide_symbols(hide)
    apply_to_file(path, path, editor.edits)
    after, changed = read_library(path), path.read_bytes()
    assert len(editor.edits) == len(hide) + 1
    allowed = {at for edit in editor.edits for at in range(edit.offset, edit.end)}
    assert len(changed) == len(original)
    assert {at for at, (a, b) in enumerate(zip(original, changed, strict=True)) if a != b} <= allowed
    assert after.symbols == before.symbols
    assert after.unfindable == set(hide)
    assert after.needed == (*before.needed, "random.so")


def test_the_dynamic_linker_sees_it_the_same_way(bench: Bench, tmp_path: Path) -> None:
    source = "\n".join(f'extern "C" int f{n}() {{ return {n}; }}' for n in range(200))
    (tmp_path / "many.cpp").write_text(source)
    path = tmp_path / "many.so"
    build("-shared", "-fPIC", "-Wl,--hash-style=gnu", tmp_path / "many.cpp", "-o", path)
    hide = {f"f{n}" for n in range(0, 200, 3)}
    with open_image(path) as image:
        editor = Editor(image)
        editor.hide_symbols(hide)
    apply_to_file(path, path, editor.edits)
    done = run_python(
        'import ctypes; l = ctypes.CDLL("./many.so"); print(*(n for n in range(200) if not hasattr(l, f"f{n}")))',
        tmp_path,
    )
    assert {f"f{n}" for n in done.stdout.split()} == hide, done.stderr
    shown = subprocess.run(["nm", "-D", path], capture_output=True, text=True, check=True).stdout
    assert all(f" {name}\n" in shown for name in hide)
