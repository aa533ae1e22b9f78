"""The build of the double: what is compiled, when it is not, what stays in the cache, and what a failure says."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from bed import build as bed_build
from bed.build import LIBRARY, build, main, to_drop
from bed.errors import BedError
from bed.site import TorchSite

UNITS = {
    "control.cpp": """
        #include <nccl.h>
        #include <cuda_runtime_api.h>
        extern "C" long m8d_bed_cuda_stub(const char*) { return 801; }
        extern "C" long m8d_bed_nccl_stub(const char*) { return 5; }
        """,
    "memory.cpp": 'extern "C" int cudaMalloc() { return 0; }',
    "exports.map": "{ global: cuda*; cu[A-Z]*; nccl*; m8d_bed_*; local: *; };",
}


@pytest.fixture
def sources(tmp_path, monkeypatch):
    """A double of two small units, in the place of the real one."""
    folder = tmp_path / "src"
    folder.mkdir()
    for name, text in UNITS.items():
        (folder / name).write_text(text)
    monkeypatch.setattr(bed_build, "SOURCES", folder)
    return folder


@pytest.fixture
def site(tmp_path, monkeypatch):
    cuda, nccl = tmp_path / "cu13" / "include", tmp_path / "nccl" / "include"
    cuda.mkdir(parents=True)
    nccl.mkdir(parents=True)
    for name in ("cuda_runtime_api.h", "driver_types.h"):
        (cuda / name).write_text("#pragma once\n")
    (cuda / "cuda.h").write_text("int cuInit(unsigned);\n")
    (nccl / "nccl.h").write_text("int ncclSend(int);\nint cudaMalloc(void);\n")
    site = TorchSite(Path(sys.executable), "2.14.1+cu130", "13.0", tmp_path, "2.30.7", (cuda, nccl))
    monkeypatch.setattr(bed_build, "look", lambda python: site)
    monkeypatch.setattr(bed_build, "wanted", lambda libraries, headers: {"cudaMalloc", "cuInit", "ncclSend"})
    return site


@pytest.fixture
def make(tmp_path, sources, site):
    def make():
        said = []
        library = build(Path("python"), cache=tmp_path / "cache", say=said.append)
        return library, said

    return make


@pytest.mark.compiler
def test_it_is_compiled_once_and_lacks_nothing(make):
    library, said = make()
    assert library.name == LIBRARY
    assert library.parent.name.startswith("2.14.1+cu130-")
    assert said[-1].endswith("1 functions, 2 stubs")
    loaded = ctypes.CDLL(str(library))
    assert (loaded.cudaMalloc(), loaded.cuInit(), loaded.ncclSend()) == (0, 801, 5)
    assert make() == (library, [])


@pytest.mark.compiler
def test_torch_finds_it_under_the_drivers_name(make):
    library, _ = make()
    dynamic = subprocess.run(["readelf", "-d", library], capture_output=True, text=True, check=True).stdout
    assert "Library soname: [libcuda.so.1]" in dynamic
    assert "libstdc++" not in dynamic


@pytest.mark.compiler
@pytest.mark.parametrize("change", ["source", "header", "compiler flags"])
def test_what_it_is_made_of_changed(make, sources, site, change, monkeypatch):
    before, _ = make()
    if change == "source":
        (sources / "memory.cpp").write_text('extern "C" int cudaMalloc() { return 2; }')
    elif change == "header":
        (site.includes[0] / "cuda.h").write_text("int cuInit(unsigned); // newer\n")
    else:
        monkeypatch.setattr(bed_build, "FLAGS", (*bed_build.FLAGS, "-DM8D"))
    after, said = make()
    assert after != before
    assert said
    assert before.exists()


@pytest.mark.compiler
def test_several_at_once_build_it_once(make):
    results = []
    threads = [threading.Thread(target=lambda: results.append(make())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert len({library for library, _ in results}) == 1
    assert sorted(bool(said) for _, said in results) == [False, False, True]


@pytest.mark.compiler
def test_a_unit_that_does_not_compile(make, sources, tmp_path):
    (sources / "memory.cpp").write_text("int cudaMalloc( { }")
    with pytest.raises(BedError, match=r"(?s)could not compile memory\.cpp.*error:.*CXX"):
        make()
    assert [path.name for path in (tmp_path / "cache").iterdir() if path.is_dir()] == []


@pytest.mark.compiler
def test_headers_that_the_environment_names_are_not_used(make, site, tmp_path, monkeypatch):
    foreign = tmp_path / "toolkit"
    foreign.mkdir()
    (foreign / "cuda_runtime_api.h").write_text("#error the toolkit's\n")
    monkeypatch.setenv("CPATH", str(foreign))
    monkeypatch.setenv("CPLUS_INCLUDE_PATH", str(foreign))
    make()


def test_no_compiler(make, monkeypatch):
    monkeypatch.delenv("M8D_CXX", raising=False)
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(BedError, match=r"'no-such-compiler' is not on PATH.*CXX"):
        make()


def test_the_ones_used_last_stay():
    used = {Path(f"{number}"): float(number) for number in range(5)}
    assert to_drop(used, kept=3) == [Path("1"), Path("0")]
    assert to_drop(used, kept=5) == []


@pytest.mark.compiler
def test_old_ones_leave_the_cache(make, sources, tmp_path, monkeypatch):
    monkeypatch.setattr(bed_build, "KEPT", 2)
    for number in range(4):
        (sources / "memory.cpp").write_text(f'extern "C" int cudaMalloc() {{ return {number}; }}')
        library, _ = make()
    assert library.exists()
    assert len([path for path in (tmp_path / "cache").iterdir() if path.is_dir()]) == 2


def test_the_command_line(make, monkeypatch, capsys):
    assert main([]) == 2
    assert "usage" in capsys.readouterr().err

    def refuse(python, *, say):
        raise BedError(f"{python} has no torch", rule="it needs one")

    monkeypatch.setattr(bed_build, "build", refuse)
    assert main(["/python"]) == 1
    assert capsys.readouterr().err == "error: /python has no torch. it needs one.\n"
    monkeypatch.setattr(bed_build, "build", lambda python, *, say: Path("/cache/library.so"))
    assert main(["/python"]) == 0
    assert capsys.readouterr().out == "/cache/library.so\n"
