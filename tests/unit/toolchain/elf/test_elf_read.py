"""What is read of an ELF file, against binutils; and that damage of any kind is ElfInvalid."""

from __future__ import annotations

import re
import subprocess
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kits.elf_fixtures import OVERLAY, Bench, build, compile_object, link, shared_bench

from m8d_build.elf.dynamic import DynamicTable, Tag
from m8d_build.elf.hashes import GnuHash, gnu_hash, unfindable_hash
from m8d_build.elf.image import Image, open_image
from m8d_build.elf.names import Entity, entity_of, is_own, scope_of
from m8d_build.elf.read import (
    compilers,
    facts_of,
    glibc_floor,
    read_constant,
    read_library,
    read_object,
    read_symtab,
    required_versions,
)
from m8d_build.errors import ElfInvalid

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.compiler


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return shared_bench(tmp_path_factory)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A small library's bytes; it has versions, weak and thread-local symbols, and a build id."""
    folder = tmp_path_factory.mktemp("small")
    (folder / "small.cpp").write_text(
        '#include <cstdio>\n#define API __attribute__((visibility("default")))\n'
        'extern "C" { API thread_local int depth = 3; API int level = 1;\n'
        "API __attribute__((weak)) int soft() { return level; }\n"
        'API int hard() { std::puts("hard"); return soft() + depth; } }\n'
    )
    object_file = compile_object(folder / "small.cpp", folder / "small.o")
    return link(
        folder / "small.so", object_file, "-Wl,--build-id=0xabcdef01", "-Wl,-rpath,/somewhere"
    ).read_bytes()


def readelf(path: Path, *flags: str) -> str:
    return subprocess.run(["readelf", "-W", *flags, path], capture_output=True, text=True, check=True).stdout


ROW = re.compile(r"\s*\d+: ([0-9a-f]+)\s+(\S+) (\w+)\s+(\w+)\s+(\w+)\s+(\S+) ?(\S*)")


def rows(text: str, table: str) -> list[tuple[int, int, str, str, str, bool, str]]:
    found = []
    for block in text.split("Symbol table '")[1:]:
        if block.startswith(table):
            for line in block.splitlines()[2:]:
                value, size, kind, binding, visibility, section, name = ROW.match(
                    line.split("  [")[0]
                ).groups()
                bare, _, version = name.replace("@@", "@").partition("@")
                found.append(
                    (
                        int(value, 16),
                        int(size, 0),
                        kind,
                        binding,
                        visibility,
                        section != "UND",
                        f"{bare} {version}",
                    )
                )
    return found


def as_rows(symbols) -> list[tuple[int, int, str, str, str, bool, str]]:
    return [
        (s.value, s.size, s.kind, s.binding, s.visibility, s.defined, f"{s.name} {s.version}")
        for s in symbols
    ]


def test_dynamic_symbols_are_what_readelf_shows(bench: Bench) -> None:
    shown = rows(readelf(bench.library, "--dyn-syms"), ".dynsym")
    assert len(shown) > 20
    assert as_rows(read_library(bench.library).symbols) == shown


def test_all_symbols_are_what_readelf_shows(bench: Bench) -> None:
    for path, symbols in (
        (bench.library, read_symtab(bench.library)),
        (bench.unit_object, read_object(bench.unit_object).symbols),
    ):
        shown = rows(readelf(path, "-s"), ".symtab")
        assert len(shown) > 20
        for ours, theirs in zip(as_rows(symbols), shown, strict=True):
            assert ours[:6] == theirs[:6]
            # readelf names sections, which the table does not; linkers write versions into the names of .symtab.
            assert (
                ours[2] == "SECTION"
                or ours[6].replace("@@", "@").replace("@", " ").split() == theirs[6].split()
            )


def test_facts(bench: Bench, small: bytes) -> None:
    library = read_library(bench.library)
    assert library.soname == "libold.so"
    assert library.needed[0] == "libnccl.so.2"
    assert (library.rpath, library.runpath) == ("$ORIGIN", "")
    assert (library.gnu_hash, library.sysv_hash, library.symbolic, library.prelinked) == (
        True,
        False,
        False,
        False,
    )
    slots = int(re.search(r"DYNAMIC +\S+ \S+ \S+ (\S+)", readelf(bench.library, "-l"))[1], 16) // 16
    used = int(re.search(r"contains (\d+) entries", readelf(bench.library, "-d"))[1])  # the end included
    assert library.spare_slots == slots - used >= 1
    assert library.unfindable == frozenset()
    tiny = facts_of(Image(small, "small"))
    assert tiny.build_id == "abcdef01"
    assert tiny.exports["depth"].kind == "TLS"
    assert tiny.exports["soft"].binding == "WEAK"
    assert "/somewhere" in {tiny.rpath, tiny.runpath}
    assert "puts" not in tiny.exports


def test_versions_are_what_readelf_shows(bench: Bench) -> None:
    shown = set(re.findall(r"Name: GLIBC_(\d+)\.(\d+)", readelf(bench.library, "-V")))
    floor = max((int(major), int(minor)) for major, minor in shown)
    assert glibc_floor(bench.library) == floor
    wanted = required_versions(bench.library)
    assert wanted["GLIBC"][:2] == floor
    assert wanted["GLIBCXX"] >= (3, 4)


def test_a_library_that_wants_nothing_has_no_floor(tmp_path: Path) -> None:
    (tmp_path / "none.c").write_text("int one(void) { return 1; }\n")
    build("-x", "c", "-shared", "-fPIC", "-nostdlib", tmp_path / "none.c", "-o", tmp_path / "none.so")
    assert glibc_floor(tmp_path / "none.so") == (0, 0)
    assert required_versions(tmp_path / "none.so") == {}


def test_a_library_names_its_compilers_unless_it_is_stripped_of_that(tmp_path: Path) -> None:
    (tmp_path / "one.c").write_text("int one(void) { return 1; }\n")
    library, bare = tmp_path / "one.so", tmp_path / "bare.so"
    build("-x", "c", "-shared", "-fPIC", tmp_path / "one.c", "-o", library)
    said = compilers(library)
    assert said
    assert len(set(said)) == len(said)
    for each in said:
        assert each in readelf(library, "-p", ".comment")
    subprocess.run(["objcopy", "--remove-section", ".comment", library, bare], check=True)
    assert compilers(bare) == ()


@pytest.mark.parametrize(
    ("name", "floor"), [("GLIBC_ABI_DT_RELR", (2, 36)), ("GLIBC_2.34", (2, 34)), ("GLIBC_PRIVATE", None)]
)
def test_version_names_without_a_number(tmp_path: Path, name: str, floor: tuple[int, int] | None) -> None:
    (tmp_path / "m.map").write_text(f"{name} {{ global: *; }};\n")
    (tmp_path / "libc.cpp").write_text('extern "C" int puts_like() { return 1; }\n')
    (tmp_path / "user.cpp").write_text('extern "C" int puts_like(); int user() { return puts_like(); }\n')
    build(
        "-shared",
        "-fPIC",
        "-nostdlib",
        tmp_path / "libc.cpp",
        "-o",
        tmp_path / "libfake.so",
        f"-Wl,--version-script={tmp_path / 'm.map'}",
    )
    build(
        "-shared",
        "-fPIC",
        "-nostdlib",
        tmp_path / "user.cpp",
        tmp_path / "libfake.so",
        "-o",
        tmp_path / "user.so",
    )
    if floor is None:
        with pytest.raises(ElfInvalid, match="GLIBC_PRIVATE"):
            glibc_floor(tmp_path / "user.so")
    else:
        assert glibc_floor(tmp_path / "user.so") == floor


def test_an_object_says_its_source_and_what_it_defines(bench: Bench) -> None:
    unit = read_object(bench.unit_object)
    assert unit.source == "unit.cpp"
    strong = {name for name, symbol in unit.definitions.items() if symbol.strong}
    assert {"_ZN4c10d6answerEv", "_ZN4c10d5levelE", "_ZN4c10d6secretEv"} <= strong
    assert unit.definitions["_ZN4c10d6secretEv"].visibility == "HIDDEN"
    assert unit.definitions["_ZZN4c10d6sharedEvE5value"].binding == "UNIQUE"
    assert unit.definitions["_ZTVN4c10d5FaultE"].binding == "WEAK"
    assert unit.section_of(unit.definitions["_ZN4c10d6answerEv"]) == ".text"
    assert not any("quiet" in name for name in unit.definitions)
    assert any("quiet" in s.name and s.binding == "LOCAL" and s.file == "unit.cpp" for s in unit.symbols)


def test_statics_are_told_apart_by_file(bench: Bench) -> None:
    symbols = read_symtab(bench.library)
    files = {s.name: (s.file, s.group > 0) for s in symbols if s.binding == "LOCAL" and s.kind == "FUNC"}
    assert files["_ZN4c10dL5quietERSt6vectorIiSaIiEE"] == ("unit.cpp", True)
    assert files["_ZN4c10d6secretEv"] == ("", False)  # hidden, made local by the linker: no file's static


def test_constants_are_read_from_an_object(tmp_path: Path) -> None:
    (tmp_path / "c.cpp").write_text(
        'extern "C" { extern const int five[2] = {5, -1}; int later[4]; int calls() { return 1; } }\n'
    )
    path = compile_object(tmp_path / "c.cpp", tmp_path / "c.o", "-fvisibility=default")
    definitions = read_object(path).definitions
    assert read_constant(path, definitions["five"]) == b"\x05\0\0\0\xff\xff\xff\xff"
    with pytest.raises(ElfInvalid, match="no bytes for later"):
        read_constant(path, definitions["later"])


def test_lookup_finds_exactly_the_defined_names(bench: Bench) -> None:
    with open_image(bench.library) as image:
        table = DynamicTable(image)
        names = [s.name for s in table.symbols]
        assert table.hash is not None
        for symbol in table.symbols[1:]:
            found = list(table.hash.lookup(symbol.name, names))
            assert found == ([symbol.number] if symbol.defined else [])
        assert not list(table.hash.lookup("nobody", names))


@pytest.mark.parametrize(
    ("name", "value"), [("", 0x1505), ("printf", 0x156B2BB8), ("exit", 0x7C967E3F), ("syscall", 0xBAC212A0)]
)
def test_gnu_hash_of_known_names(name: str, value: int) -> None:
    assert gnu_hash(name.encode()) == value


@given(st.binary(max_size=200))
def test_gnu_hash_is_the_loop_of_its_definition(name: bytes) -> None:
    value = 5381
    for byte in name:
        value = (value * 33 + byte) & 0xFFFFFFFF
    assert gnu_hash(name) == value


@given(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1), st.integers(1, 2**20))
def test_an_unfindable_hash_is_never_the_names_own(stored: int, own: int, buckets: int) -> None:
    new = unfindable_hash(stored, own, buckets)
    assert 0 <= new < 2**32
    assert new & 1 == stored & 1
    assert new >> 1 != own >> 1
    assert unfindable_hash(new, own, buckets) == new
    if buckets > 2:
        assert {(new & ~1) % buckets, (new | 1) % buckets}.isdisjoint({own % buckets})


def test_a_library_with_the_old_hash_alone_is_read(bench: Bench, tmp_path: Path) -> None:
    path = link(tmp_path / "old.so", bench.unit_object, "-Wl,--hash-style=sysv")
    library = read_library(path)
    assert (library.gnu_hash, library.sysv_hash) == (False, True)
    assert "_ZN4c10d6answerEv" in library.exports


def test_a_stripped_library_is_read(bench: Bench, tmp_path: Path) -> None:
    path = tmp_path / "stripped.so"
    subprocess.run(["strip", "-o", path, bench.library], check=True)
    assert read_symtab(path) == ()
    assert read_library(path).symbols[1:] == read_library(bench.library).symbols[1:]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ((0, b"MZ"), "begins with"),
        ((4, b"\x01"), "64-bit"),
        ((5, b"\x02"), "little-endian"),
        ((18, b"\xb7\x00"), "EM_AARCH64"),
        ((16, b"\x02\x00"), "ET_EXEC"),
        ((54, b"\x20\x00"), "program headers of 32 bytes"),
        ((32, b"\xff" * 7), "truncated or damaged"),
    ],
)
def test_what_is_no_shared_library_for_x86_64_is_refused(
    small: bytes, change: tuple[int, bytes], message: str
) -> None:
    data = bytearray(small)
    data[change[0] : change[0] + len(change[1])] = change[1]
    with pytest.raises(ElfInvalid, match=message) as caught:
        facts_of(Image(bytes(data), "changed.so"))
    assert "changed.so" in caught.value.value
    assert caught.value.rule
    assert caught.value.next_step


def test_files_that_cannot_be_mapped_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").write_bytes(b"")
    for path in (tmp_path / "empty", tmp_path / "absent", tmp_path):
        with pytest.raises(ElfInvalid):
            read_library(path)


def test_a_library_is_no_object_and_an_object_no_library(bench: Bench) -> None:
    with pytest.raises(ElfInvalid, match="ET_REL"):
        read_object(bench.library)
    with pytest.raises(ElfInvalid, match="ET_DYN"):
        read_library(bench.unit_object)


def read_everything(data: bytes) -> None:
    image = Image(data, "damaged")
    facts_of(image)
    for section in image.sections:
        assert isinstance(section.name, str)


@settings(max_examples=300)
@given(share=st.floats(0, 1, exclude_max=True))
def test_truncated_anywhere_is_elf_invalid(small: bytes, share: float) -> None:
    with pytest.raises(ElfInvalid):
        read_everything(small[: int(len(small) * share)])


@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_damage_anywhere_is_elf_invalid_or_harmless(small: bytes, data: st.DataObject) -> None:
    damaged = bytearray(small)
    for _ in range(data.draw(st.integers(1, 4))):
        # Headers and tables are a small part of the file, and where damage matters.
        at = data.draw(
            st.integers(0, 0x3FF)
            | st.integers(0, len(small) - 8)
            | st.integers(len(small) - 0x800, len(small) - 8)
        )
        damaged[at : at + 4] = data.draw(
            st.binary(min_size=4, max_size=4) | st.sampled_from([b"\0" * 4, b"\xff" * 4])
        )
    with suppress(ElfInvalid):
        read_everything(bytes(damaged))


def test_strings_and_sections_that_reach_past_their_end_are_refused(small: bytes) -> None:
    image = Image(small, "small")
    table = DynamicTable(image)
    soname = next(n for n, (tag, _) in enumerate(table.slots) if tag == Tag.SONAME)
    data = bytearray(small)
    data[table.offset + 16 * soname + 8 : table.offset + 16 * soname + 16] = (0xFFFFFF).to_bytes(8, "little")
    with pytest.raises(ElfInvalid, match=r"string at 16777215 of \.dynstr"):
        facts_of(Image(bytes(data), "damaged"))
    headers = int.from_bytes(small[40:48], "little")
    comment = next(n for n, section in enumerate(image.sections) if section.name == ".comment")
    data = bytearray(small)
    data[headers + 64 * comment + 32 : headers + 64 * comment + 40] = len(small).to_bytes(8, "little")
    with pytest.raises(ElfInvalid, match=r"section \.comment would need"):
        facts_of(Image(bytes(data), "damaged"))


def test_a_damaged_hash_table_is_refused(small: bytes) -> None:
    image = Image(small, "small")
    section = image.section(".gnu.hash")
    assert section is not None
    for layout in (b"\0\0\0\0", b"\xff\xff\xff\x7f"):
        data = bytearray(small)
        data[section.offset : section.offset + 4] = layout
        with pytest.raises(ElfInvalid):
            GnuHash(Image(bytes(data), "damaged"), section.offset)


NAMES = [
    ("_ZTVN4c10d8NCCLCommE", ("c10d", "NCCLComm"), Entity.TABLE, True),
    ("_ZN5torch4cuda4nccl6detail4initEv", ("torch", "cuda", "nccl", "detail", "init"), Entity.PLAIN, True),
    ("_ZN5torch4cuda4ncclE", ("torch", "cuda", "nccl"), Entity.PLAIN, True),
    ("_ZN5torch4cuda3foo", ("torch", "cuda", "foo"), Entity.PLAIN, False),
    ("_ZNKSt6vectorIN4c10d4WorkESaIS1_EE4sizeEv", ("std", "vector"), Entity.PLAIN, False),
    ("_ZNSsC1Ev", ("std",), Entity.PLAIN, False),
    ("_ZSt4moveIN4c10d4WorkEEvv", ("std", "move"), Entity.PLAIN, False),
    ("_ZZN4c10d3getEvE4flag", ("c10d", "get"), Entity.PLAIN, True),
    ("_ZGVZN4c10d3getEvE4flag", ("c10d", "get"), Entity.GUARD, True),
    ("_ZGVZZN4c10d3getEvENKUlvE_clEvE4flag", ("c10d", "get"), Entity.GUARD, True),
    ("_ZThn16_N4c10d4WorkD1Ev", ("c10d", "Work"), Entity.THUNK, True),
    ("_ZTv0_n24_N4c10d4WorkD1Ev", ("c10d", "Work"), Entity.THUNK, True),
    ("_ZTcv0_n24_v0_n32_N4c10d4Work5cloneEv", ("c10d", "Work", "clone"), Entity.THUNK, True),
    ("_ZTWN4c10d5depthE", ("c10d", "depth"), Entity.GUARD, True),
    ("_ZN4c10dL5quietEv", ("c10d", "quiet"), Entity.PLAIN, True),
    ("_ZN4c10d4nameB5cxx11Ev", ("c10d", "name"), Entity.PLAIN, True),
    ("_ZN4c10d4NameB5cxx113fooEv", ("c10d", "Name", "foo"), Entity.PLAIN, True),
    ("_ZNK4c10d7BackendD2Ev", ("c10d", "Backend"), Entity.PLAIN, True),
    ("_ZN4c10d3fooIiEEvT_", ("c10d", "foo"), Entity.PLAIN, True),
    ("_ZTIPFvvE", (), Entity.TABLE, False),
    ("c10d", ("c10d",), Entity.PLAIN, False),
    ("ncclGetVersion", ("ncclGetVersion",), Entity.PLAIN, False),
    ("_Z5c10d2v", ("c10d2",), Entity.PLAIN, False),
]


@pytest.mark.parametrize(("name", "scope", "entity", "own"), NAMES)
def test_scopes_of_mangled_names(name: str, scope: tuple[str, ...], entity: Entity, own: bool) -> None:
    assert (scope_of(name), entity_of(name), is_own(name)) == (scope, entity, own)


def test_scopes_agree_with_the_demangler(bench: Bench) -> None:
    names = sorted(
        {s.name for s in read_symtab(bench.library) if s.name.startswith("_Z") and "St" not in s.name}
    )
    shown = subprocess.run(
        ["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True
    ).stdout.splitlines()
    kinds = re.compile(
        r"^(?:(?:vtable|typeinfo|typeinfo name|guard variable|TLS (?:init|wrapper) function) for )"
    )
    assert len(names) > 20
    for name, text in zip(names, shown, strict=True):
        assert kinds.sub("", text).startswith("::".join(scope_of(name)[:2])), name


@given(st.text(alphabet="_ZNTVISGRthKLEB0123456789abc", max_size=40))
def test_any_text_has_a_scope(text: str) -> None:
    assert isinstance(scope_of("_Z" + text), tuple)


def test_the_overlays_name_is_a_suffix_of_a_string_that_is_there(bench: Bench) -> None:
    assert any(name.endswith(OVERLAY) for name in read_library(bench.library).needed)
