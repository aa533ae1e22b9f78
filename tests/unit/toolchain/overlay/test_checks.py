"""The checks on libraries compiled here: same symbols, no direct use of old definitions, same class layouts."""

from __future__ import annotations

import re
import subprocess
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from kits.elf_fixtures import FLAGS, build, compile_object, link

from m8d_build.elf.image import open_image
from m8d_build.elf.read import ObjectFile, read_library, read_object, read_symtab
from m8d_build.elf.references import code_references
from m8d_build.errors import CheckFailed, CommandFailed, ElfInvalid
from m8d_build.overlay.address_ranges import SymbolMap, window_of
from m8d_build.overlay.layouts import ClassProbe, probe_source, read_layouts, same_layouts
from m8d_build.overlay.stale import StaleUse, no_stale_uses, stale_uses
from m8d_build.overlay.symbol_parity import strong_symbols_equal, symbol_differences

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.compiler

HEADER = """
#pragma once
#include <vector>
#define API __attribute__((visibility("default")))
#define FAR __attribute__((noinline))
namespace c10d {
struct API Group {
  Group(); virtual ~Group(); virtual int answer(); int other(); void unused(); static int level;
#ifdef MORE_VIRTUAL
  virtual int extra() { return 3; }
#endif
};
API int open(); API extern int limit; API extern int wide[WIDTH];
int secret(); int deeper(); __attribute__((visibility("hidden"))) extern int state;
FAR inline int passes() { return secret() + 1; }
FAR inline int harmless() { return 4; }
inline int& counter() { static int value = 0; return value; }
}
"""
UNIT = """
#include "unit.h"
namespace c10d {
static FAR int quiet(std::vector<int>& all) { all.push_back(2); return all.back(); }
int Group::level = 1; int limit = 5; int wide[WIDTH]; int state = 1;
Group::Group() { counter()++; }
Group::~Group() {}
#ifndef WITHOUT_OTHER
int Group::other() { return 3; }
#endif
int Group::answer() { return limit; }
#ifndef WITHOUT_UNUSED
void Group::unused() { limit++; }
#endif
FAR int secret() { return ++state; }
FAR int deeper() { return secret() + harmless() + passes(); }
#ifdef EXTRA
API int added() { return 9; }
#endif
int open() { std::vector<int> all; return quiet(all) + deeper(); }
}
"""
BEFORE = '#include "unit.h"\nnamespace before { static FAR int mine(int a) { return a * 3; } API int first(int a) { return mine(a); } }\n'
DEFAULTS = ("-DWIDTH=4", "-O2")


class Site:
    """A folder in which a library is built from the unit, a file before it, and one after it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "unit.h").write_text(HEADER)
        (folder / "unit.cpp").write_text(UNIT)
        (folder / "before.cpp").write_text(BEFORE)

    def unit(self, *flags: str, name: str = "ours.o") -> ObjectFile:
        return read_object(compile_object(self.folder / "unit.cpp", self.folder / name, *DEFAULTS, *flags))

    def library(self, after: str = "", *flags: str, unit: tuple[str, ...] = ()) -> Path:
        (self.folder / "after.cpp").write_text('#include "unit.h"\n' + after)
        objects = [
            compile_object(self.folder / f"{name}.cpp", self.folder / f"{name}.o", *DEFAULTS, *extra)
            for name, extra in (("before", ()), ("unit", unit), ("after", ()))
        ]
        return link(self.folder / "libold.so", *objects, *flags)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def differences(library: Path, *units: ObjectFile, additions: tuple[str, ...] = ()) -> list[str]:
    return symbol_differences(units, read_symtab(library), read_library(library).exports, additions=additions)


def hidden_names(library: Path, unit: ObjectFile) -> set[str]:
    """What a graft would hide."""
    return read_library(library).exports.keys() & unit.definitions.keys()


def test_the_same_unit_has_no_differences(site: Site) -> None:
    library, unit = site.library("API int last() { return c10d::open(); }"), site.unit()
    assert differences(library, unit) == []
    strong_symbols_equal([unit], read_symtab(library), read_library(library).exports)


def test_optimisation_makes_no_difference(site: Site) -> None:
    library = site.library("API int last() { return c10d::open(); }")
    assert differences(library, site.unit("-O1")) == []
    assert differences(library, site.unit("-Os", "-fno-inline")) == []


@pytest.mark.parametrize(
    ("flags", "wheel", "message"),
    [
        (("-DEXTRA",), (), "_ZN4c10d5addedEv is in ours, not in the wheel"),
        ((), ("-DEXTRA",), "_ZN4c10d5addedEv is in the wheel's unit.cpp, not in ours"),
        (("-DWITHOUT_OTHER",), (), "_ZN4c10d5Group5otherEv is in the wheel's unit.cpp, not in ours"),
        (("-DWITHOUT_UNUSED",), (), "_ZN4c10d5Group6unusedEv is in the wheel's unit.cpp, not in ours"),
        (("-UWIDTH", "-DWIDTH=8"), (), "_ZN4c10d4wideE has 32 bytes in ours, 16 in the wheel"),
        (("-DMORE_VIRTUAL",), (), "_ZTVN4c10d5GroupE has 48 bytes in ours, 40 in the wheel"),
        (
            ("-UAPI", "-fvisibility=default"),
            (),
            "_ZN4c10d6secretEv is exported in ours, and not so in the wheel",
        ),
    ],
)
def test_each_difference_is_named(
    site: Site, flags: tuple[str, ...], wheel: tuple[str, ...], message: str
) -> None:
    library, unit = site.library(unit=wheel), site.unit(*flags)
    found = differences(library, unit)
    assert message in found
    with pytest.raises(CheckFailed, match="no drop-in") as caught:
        strong_symbols_equal([unit], read_symtab(library), read_library(library).exports)
    assert message in caught.value.value


def test_each_exported_symbol_of_the_unit_would_be_missed(site: Site) -> None:
    library, unit = site.library(), site.unit()
    for lacking in [
        s for s in unit.definitions.values() if s.strong and s.visibility == "DEFAULT" and "Group" in s.name
    ]:
        fewer = replace(unit, symbols=tuple(s for s in unit.symbols if s.name != lacking.name))
        assert any(lacking.name in text for text in differences(library, fewer)), lacking.name


def test_additions_of_patches_are_expected_and_must_be_there(site: Site) -> None:
    library = site.library()
    assert differences(library, site.unit("-DEXTRA"), additions=("_ZN4c10d5addedEv",)) == []
    assert differences(library, site.unit(), additions=("_ZN4c10d5addedEv",)) == [
        "_ZN4c10d5addedEv is to be added by a patch, but is not there"
    ]


def test_code_of_another_file_inside_the_unit_is_named(site: Site) -> None:
    library, unit = site.library(), site.unit()
    symbols = read_symtab(library)
    inside = next(s for s in symbols if s.name == "_ZN4c10d6secretEv").value
    moved = [s._replace(value=inside + 1) if "mine" in s.name else s for s in symbols]
    found = symbol_differences([unit], moved, read_library(library).exports)
    assert found == ["_ZN6beforeL4mineEi of before.cpp lies inside the wheel's unit.cpp"]


def test_a_stripped_library_cannot_be_compared(site: Site) -> None:
    library = site.library("", "-s")
    assert differences(library, site.unit()) == [
        "the library has no .symtab, so its own copy cannot be compared"
    ]
    with pytest.raises(CheckFailed, match=r"no \.symtab"):
        stale_uses(library, read_symtab(library), [site.unit()], (), accepted={})


def test_two_files_of_one_name_are_told_apart(site: Site) -> None:
    other = site.folder / "sub"
    other.mkdir()
    (other / "unit.cpp").write_text("static __attribute__((noinline)) int odd(int a) { return a * a; }\n"
                                    '__attribute__((visibility("default"))) int even(int a) { return odd(a) + 1; }\n')  # fmt: skip
    library = site.library("", compile_object(other / "unit.cpp", site.folder / "sub.o").as_posix())
    assert differences(library, site.unit()) == []
    units = [site.unit(), read_object(site.folder / "sub.o")]
    assert differences(library, *units) == []
    groups = [window_of(unit, SymbolMap(read_symtab(library))).group for unit in units]
    assert len(set(groups)) == 2
    assert 0 not in groups


JUMPS = """asm(".text\\n.globl jumps\\n.type jumps, @function\\njumps: testl %edi, %edi\\n"
    "jne _ZN4c10d6secretEv\\nret\\n.size jumps, . - jumps");"""

STALE = [
    ("API int last() { return c10d::open() + c10d::limit; }", None),  # by name: the graft turns it
    ("API int last() { return c10d::secret() + 1; }", ("_Z4lastv", "secret")),  # call
    ("API int last() { return c10d::secret(); }", ("_Z4lastv", "secret")),  # jump
    (JUMPS, ("jumps", "secret")),  # conditional jump
    (  # from a static function of another file
        "static FAR int mid(int a) { return a * c10d::secret(); } API int last() { return mid(3) + mid(4); }",
        ("_ZL3midi", "secret"),
    ),
    ("API auto last() { return &c10d::secret; }", ("_Z4lastv", "secret")),  # lea
    ("API int last() { return c10d::state; }", ("_Z4lastv", "state")),  # mov
    ("API void last() { c10d::state = 7; }", ("_Z4lastv", "state")),  # with an immediate operand after it
    ("API int (*table[2])() = {c10d::harmless, c10d::deeper};", ("table", "deeper")),  # pointer in data
    ("API int last() { return c10d::passes(); }", ("_Z4lastv", "passes")),  # through an inline function
    (
        "FAR inline int twice() { return c10d::passes(); } API int last() { return twice(); }",
        ("_Z5twicev", "passes"),
    ),
    ("API int last() { return c10d::harmless(); }", None),  # inline code that reaches nothing of the unit
    (
        "API int last() { return c10d::counter()++; }",
        ("_Z4lastv", "_ZZN4c10d7counterEvE5value"),
    ),  # hidden static
]


@pytest.mark.parametrize(("after", "expected"), STALE)
def test_direct_uses_from_outside_the_unit(site: Site, after: str, expected: tuple[str, str] | None) -> None:
    unit = site.unit()
    library = site.library(after)
    uses = stale_uses(library, read_symtab(library), [unit], hidden_names(library, unit), accepted={})
    if expected is None:
        assert uses == []
        return
    assert [use.user for use in uses] == [expected[0]]
    assert expected[1] in uses[0].target
    with pytest.raises(CheckFailed, match=f"{expected[0]} uses"):
        no_stale_uses(library, read_symtab(library), [unit], (), accepted={})


def test_the_way_through_an_inline_function_is_told(site: Site) -> None:
    library, unit = site.library("API int last() { return c10d::passes(); }"), site.unit()
    uses = stale_uses(library, read_symtab(library), [unit], (), accepted={})
    assert uses == [StaleUse("_Z4lastv", "_ZN4c10d6passesEv", "_ZN4c10d6secretEv")]


def test_an_accepted_definition_may_be_used(site: Site) -> None:
    library, unit = site.library("API int last() { return c10d::secret(); }"), site.unit()
    no_stale_uses(library, read_symtab(library), [unit], (), accepted={"_ZN4c10d6secretEv": "it only counts"})


def test_a_unit_that_joins_the_overlay_ends_its_uses(site: Site) -> None:
    library = site.library("API int last() { return c10d::secret(); }")
    units = [site.unit(), read_object(site.folder / "after.o")]
    assert stale_uses(library, read_symtab(library), units, (), accepted={}) == []


def test_exported_functions_bound_by_the_linker_are_found(site: Site) -> None:
    library, unit = (
        site.library("API int last() { return c10d::open(); }", "-Wl,-Bsymbolic-functions"),
        site.unit(),
    )
    assert not read_library(library).symbolic
    uses = stale_uses(library, read_symtab(library), [unit], hidden_names(library, unit), accepted={})
    assert [(use.user, use.target) for use in uses] == [("_Z4lastv", "_ZN4c10d4openEv")]


# The constant's bytes read as "call secret()" from its third byte on.
CHANCE = """asm(".text\\n.globl chance\\n.type chance, @function\\nchance: .byte 0x48, 0xb8, 0xe8\\n"
    ".long _ZN4c10d6secretEv - . - 4\\n.byte 0, 0, 0\\nret\\n.size chance, . - chance");"""


def test_a_chance_hit_is_no_use(site: Site) -> None:
    library, unit = site.library(CHANCE), site.unit()
    assert stale_uses(library, read_symtab(library), [unit], (), accepted={}) == []


def test_among_data_a_chance_hit_stands(site: Site) -> None:
    library, unit = site.library(CHANCE.replace("\\nret", "\\n.byte 0x06, 0x06\\nret")), site.unit()
    uses = stale_uses(library, read_symtab(library), [unit], (), accepted={})
    assert [use.user for use in uses] == ["chance"]


def test_without_a_disassembler_a_chance_hit_stands(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    library, unit = site.library(CHANCE), site.unit()
    monkeypatch.setenv("PATH", str(site.folder))
    uses = stale_uses(library, read_symtab(library), [unit], (), accepted={})
    assert [use.user for use in uses] == ["chance"]


@pytest.mark.parametrize("chunk", [1 << 18, 64, 7, 5])
def test_references_are_those_the_disassembler_shows(
    site: Site, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    monkeypatch.setattr("m8d_build.elf.references.CHUNK", chunk)
    library = site.library(
        "API int last(int a) { if (a > c10d::state) return c10d::secret(); c10d::state = 9; return c10d::deeper(); }"
        + JUMPS
    )
    symbols = {s.name: s for s in read_symtab(library)}
    targets = {
        symbols[name].value: name for name in ("_ZN4c10d6secretEv", "_ZN4c10d6deeperEv", "_ZN4c10d5stateE")
    }
    with open_image(library) as image:
        found = {(ref.at, targets[ref.target]) for ref in code_references(image, targets)}
    shown = subprocess.run(["objdump", "-dw", library], capture_output=True, text=True, check=True).stdout
    expected = re.findall(r"<(_ZN4c10d(?:6secretEv|6deeperEv|5stateE))>$", shown, re.MULTILINE)
    assert sorted(name for _, name in found) == sorted(expected)
    assert len(found) >= 8


PROBES = (ClassProbe("shapes::Outer", ("first", "hidden_")), ClassProbe("shapes::Outer::Inner", ("y",)))
SHAPES = """
#pragma once
namespace shapes {
class Outer {
 public:
  virtual ~Outer();
  int first;
 private:
  struct Inner { char x; %s long y; };
  Inner inner_;
  int hidden_;
};
}
"""


def shape_folder(folder: Path, extra: str) -> Path:
    (folder / "shapes").mkdir(parents=True)
    (folder / "shapes" / "outer.h").write_text(SHAPES % extra)
    return folder


class Compiler:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.runs = 0

    def __call__(self, source: str, include: Path) -> Path:
        self.runs += 1
        text, target = self.folder / f"probe{self.runs}.cpp", self.folder / f"probe{self.runs}.o"
        text.write_text(source)
        build(*FLAGS, f"-I{include}", "-c", text, "-o", target)
        return target


def test_layouts_are_read_without_running_anything(tmp_path: Path) -> None:
    include = shape_folder(tmp_path / "a", "")
    probe = Compiler(tmp_path)(probe_source(["shapes/outer.h"], PROBES), include)
    assert read_layouts(probe, PROBES) == {
        "size of shapes::Outer": 40, "alignment of shapes::Outer": 8,
        "offset of shapes::Outer::first": 8, "offset of shapes::Outer::hidden_": 32,
        "size of shapes::Outer::Inner": 16, "alignment of shapes::Outer::Inner": 8,
        "offset of shapes::Outer::Inner::y": 8,
    }  # fmt: skip


def test_equal_headers_have_equal_layouts(tmp_path: Path) -> None:
    a, b = shape_folder(tmp_path / "a", ""), shape_folder(tmp_path / "b", "/* a comment */")
    compiler = Compiler(tmp_path)
    assert (
        same_layouts(["shapes/outer.h"], PROBES, compiler, official=a, patched=b)["size of shapes::Outer"]
        == 40
    )
    assert compiler.runs == 2


def test_a_changed_layout_is_named(tmp_path: Path) -> None:
    a, b = shape_folder(tmp_path / "a", ""), shape_folder(tmp_path / "b", "long added;")
    with pytest.raises(CheckFailed, match="size of shapes::Outer was 40, is 48") as caught:
        same_layouts(["shapes/outer.h"], PROBES, Compiler(tmp_path), official=a, patched=b)
    assert "offset of shapes::Outer::Inner::y was 8, is 16" in caught.value.value
    assert "first" not in caught.value.value


def test_a_probe_without_constants_is_refused(tmp_path: Path) -> None:
    empty = compile_object(write(tmp_path / "e.cpp", "int one() { return 1; }\n"), tmp_path / "e.o")
    with pytest.raises(CheckFailed, match="no constant for shapes::Outer"):
        read_layouts(empty, PROBES)
    with pytest.raises(ElfInvalid):
        read_layouts(write(tmp_path / "text.o", "no object"), PROBES)


def test_a_probe_that_does_not_compile_says_so(tmp_path: Path) -> None:
    def fail(source: str, include: Path) -> Path:
        raise CommandFailed("could not compile the probe")

    with pytest.raises(CommandFailed):
        same_layouts(["shapes/outer.h"], PROBES, fail, official=tmp_path, patched=tmp_path)


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path
