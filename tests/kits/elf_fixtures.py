"""Small libraries compiled in the test, which stand for the official library, the overlay and their callers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

__all__ = [
    "CXX",
    "FLAGS",
    "OVERLAY",
    "Bench",
    "build",
    "compile_object",
    "link",
    "run_python",
    "shared_bench",
]

OVERLAY = "nccl.so.2"
CXX = os.environ.get("CXX") or shutil.which("g++") or "c++"
FLAGS = (
    "-std=gnu++17",
    "-O1",
    "-fPIC",
    "-fvisibility=hidden",
    "-fvisibility-inlines-hidden",
    "-Wall",
    "-Werror",
)

# One of the overlay's units. ANSWER tells old code (1) from new (2).
UNIT = """
#include <memory>
#include <vector>
#define API __attribute__((visibility("default")))
namespace c10d {
struct API Group {
  Group();
  virtual ~Group();
  virtual int answer();
  static int level;
  inline int doubled() { return 2 * answer(); }
};
API int answer();
API int* where();
API extern int level;
API extern thread_local int depth;
API inline int& shared() { static int value = ANSWER; return value; }
struct API Fault { virtual ~Fault() {} int code = ANSWER; };
}
#ifdef THE_UNIT
namespace c10d {
int secret() { static volatile int twice = 0; return ANSWER + 0 * ++twice; }
int level = ANSWER;
thread_local int depth = ANSWER;
int Group::level = ANSWER;
Group::Group() = default;
int* where() { return &shared(); }
Group::~Group() = default;
int Group::answer() { return ANSWER; }
__attribute__((noinline)) static int quiet(std::vector<int>& all) { all.push_back(ANSWER); return all.back(); }
int answer() { std::vector<int> all; return secret() - ANSWER + quiet(all); }
API std::shared_ptr<Fault> fault() { return std::make_shared<Fault>(); }
}
#endif
"""

# What stays in the official library: it calls the unit's exported functions, by name.
REST = """
#include "unit.h"
extern "C" API int ask() { return c10d::answer(); }
extern "C" API int read_level() { return c10d::level * 100 + c10d::Group::level * 10 + c10d::depth; }
extern "C" API int ask_group() { c10d::Group group; c10d::Group* any = &group; return any->answer(); }
extern "C" API int* address_of_shared() { return &c10d::shared(); }
extern "C" API int* where_says_the_unit() { return c10d::where(); }
extern "C" API int ask_pointer() { static int (*const volatile pointer)() = c10d::answer; return pointer(); }
extern "C" API int stays() { return 7; }
"""

EXTENSION = """
#include "unit.h"
struct Mine : c10d::Group { };
extern "C" API int ext_ask() { return c10d::answer() * 10 + Mine().doubled() / 2; }
extern "C" API int ext_level() { return c10d::level * 10 + c10d::depth; }
extern "C" API int* ext_shared() { return &c10d::shared(); }
"""


def build(*arguments: str | Path) -> None:
    """Run the compiler; its messages are the failure's text."""
    done = subprocess.run([CXX, *map(str, arguments)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def compile_object(source: Path, target: Path, *flags: str) -> Path:
    build(*FLAGS, *flags, "-c", source, "-o", target)
    return target


def link(target: Path, *inputs: str | Path) -> Path:
    build("-shared", f"-Wl,-soname,{target.name}", "-Wl,--hash-style=gnu", "-o", target, *inputs)
    return target


def run_python(program: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a program that loads libraries, in a process of its own: a library once loaded stays."""
    return subprocess.run(
        [sys.executable, "-c", program], cwd=cwd, capture_output=True, text=True, timeout=60, check=False
    )


@dataclass(frozen=True)
class Bench:
    """A folder with a library, an overlay for it, and an extension linked against the library before the graft.

    Attributes:
        folder: where they are.
    """

    folder: Path

    @property
    def library(self) -> Path:
        return self.folder / "libold.so"

    @property
    def overlay(self) -> Path:
        return self.folder / OVERLAY

    @property
    def unit_object(self) -> Path:
        return self.folder / "unit.o"

    @property
    def old_unit_object(self) -> Path:
        return self.folder / "old-unit.o"

    def copy(self, folder: Path) -> Bench:
        """Return the same in another folder, for a test that changes it."""
        shutil.copytree(self.folder, folder)
        return Bench(folder)

    def link_library(self, *flags: str) -> Path:
        return link(
            self.library,
            self.old_unit_object,
            self.folder / "rest.o",
            "-Wl,-rpath,$ORIGIN",
            "-Wl,--disable-new-dtags",
            "-Wl,--no-as-needed",
            f"-L{self.folder}",
            "-l:libnccl.so.2",
            *flags,
        )

    def link_overlay(self, *flags: str, script: str | None = None) -> Path:
        extra = []
        if script is not None:
            (self.folder / "overlay.map").write_text(script)
            extra.append(f"-Wl,--version-script={self.folder / 'overlay.map'}")
        return link(
            self.overlay,
            self.unit_object,
            "-Wl,-rpath,$ORIGIN",
            "-Wl,-z,defs",
            "-Wl,--no-as-needed",
            f"-L{self.folder}",
            "-l:libold.so",
            *extra,
            *flags,
        )

    def link_extension(self, name: str = "ext.so") -> Path:
        return link(
            self.folder / name,
            self.folder / "ext.o",
            "-Wl,-z,defs",
            "-Wl,-rpath,$ORIGIN",
            f"-L{self.folder}",
            f"-Wl,-rpath-link,{self.folder}",
            "-l:libold.so",
        )


def shared_bench(factory: pytest.TempPathFactory) -> Bench:
    """Return the bench of this test run; tests read it, and copy what they change."""
    whole = factory.getbasetemp() / "elf-bench"
    if whole.exists():
        return Bench(whole)
    folder = factory.mktemp("elf-bench-part")
    bench = Bench(folder)
    (folder / "unit.h").write_text("#pragma once\n" + UNIT)
    (folder / "unit.cpp").write_text('#define THE_UNIT\n#include "unit.h"\n')
    (folder / "rest.cpp").write_text(REST)
    (folder / "ext.cpp").write_text(EXTENSION)
    (folder / "nccl.cpp").write_text('extern "C" int ncclGetVersion() { return 1; }\n')
    compile_object(folder / "unit.cpp", bench.old_unit_object, "-DANSWER=1")
    compile_object(folder / "unit.cpp", bench.unit_object, "-DANSWER=2")
    compile_object(folder / "rest.cpp", folder / "rest.o", "-DANSWER=1")
    compile_object(folder / "ext.cpp", folder / "ext.o", "-DANSWER=1")
    link(
        folder / "libnccl.so.2",
        compile_object(folder / "nccl.cpp", folder / "nccl.o", "-fvisibility=default"),
    )
    bench.link_library()
    return Bench(folder.rename(whole))
