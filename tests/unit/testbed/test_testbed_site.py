"""What the test bed finds out about an interpreter, and what it says when something is not there."""

from __future__ import annotations

import sys

import pytest
from bed.errors import BedError
from bed.site import look, nccl_version

NCCL_H = '#define NCCL_MAJOR 2\n#define NCCL_MINOR 21\n#define NCCL_PATCH 5\n#define NCCL_SUFFIX ""\n'
CUDA_HEADERS = ("cuda_runtime_api.h", "driver_types.h", "cuda.h")


@pytest.fixture
def python(tmp_path):
    """An interpreter that has only what lies in tmp_path/site."""
    (tmp_path / "site").mkdir()
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\nPYTHONPATH="{tmp_path}/site" exec "{sys.executable}" -S "$@"\n')
    script.chmod(0o755)
    return script


@pytest.fixture
def install(tmp_path):
    def install(*, torch="2.6.0+cu124", cuda="12.4", folder="cuda_runtime", headers=CUDA_HEADERS, nccl=True):
        site = tmp_path / "site"
        (site / "torch" / "lib").mkdir(parents=True)
        (site / "torch" / "__init__.py").write_text("raise RuntimeError('torch was imported')")
        (site / "torch" / "version.py").write_text(f"__version__ = {torch!r}\ncuda = {cuda!r}\n")
        (site / "torch" / "lib" / "libtorch_cuda.so").touch()
        if folder:
            (site / "nvidia" / folder / "include").mkdir(parents=True)
            (site / "nvidia" / folder / "lib").mkdir()
            (site / "nvidia" / folder / "lib" / f"libcudart.so.{cuda.split('.')[0]}").touch()
            for name in headers:
                (site / "nvidia" / folder / "include" / name).touch()
        if nccl:
            (site / "nvidia" / "nccl" / "include").mkdir(parents=True)
            (site / "nvidia" / "nccl" / "include" / "nccl.h").write_text(NCCL_H)
        return site

    return install


@pytest.mark.parametrize(
    ("torch", "cuda", "folder"), [("2.6.0+cu124", "12.4", "cuda_runtime"), ("2.14.1+cu130", "13.0", "cu13")]
)
def test_a_cuda_build(python, install, torch, cuda, folder):
    site = install(torch=torch, cuda=cuda, folder=folder)
    found = look(python)
    assert (found.torch, found.cuda, found.nccl, found.root) == (torch, cuda, "2.21.5", site)
    assert found.cuda_major == int(cuda[:2])
    assert found.includes == (site / "nvidia" / folder / "include", site / "nvidia" / "nccl" / "include")
    assert [path.name for path in found.libraries()] == ["libtorch_cuda.so", f"libcudart.so.{cuda[:2]}"]


def test_no_torch(python):
    with pytest.raises(BedError, match=r"has no torch.*Install one"):
        look(python)


def test_a_build_for_the_cpu(python, install):
    install(torch="2.13.0+cpu", cuda=None, folder="", nccl=False)
    with pytest.raises(BedError, match=r"torch 2\.13\.0\+cpu of .* is a build without CUDA"):
        look(python)


def test_a_cuda_that_is_not_modelled(python, install):
    install(torch="2.1.0+cu118", cuda="11.8", folder="")
    with pytest.raises(BedError, match=r"built for CUDA 11.8.*models CUDA 12 and 13"):
        look(python)


def test_no_wheel_of_nccl(python, install):
    install(nccl=False)
    with pytest.raises(BedError, match=r"NCCL.*not installed.*nvidia/nccl/include"):
        look(python)


def test_no_wheel_of_the_runtime(python, install):
    install(folder="")
    with pytest.raises(BedError, match=r"CUDA's runtime.*not installed.*nvidia/cuda_runtime/include"):
        look(python)


def test_a_missing_header_is_named(python, install):
    install(headers=("cuda_runtime_api.h", "cuda.h"))
    with pytest.raises(BedError, match=r"has no driver_types\.h"):
        look(python)


def test_no_such_interpreter(tmp_path):
    with pytest.raises(BedError, match=r"could not be asked for its torch.*Name the interpreter itself"):
        look(tmp_path / "nowhere" / "python")


def test_an_interpreter_that_fails(tmp_path):
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\necho 'shared library not found' >&2\nexit 127\n")
    script.chmod(0o755)
    with pytest.raises(BedError, match="shared library not found"):
        look(script)


def test_a_header_without_a_version():
    assert nccl_version("#define NCCL_MAJOR 2\n") == ""
