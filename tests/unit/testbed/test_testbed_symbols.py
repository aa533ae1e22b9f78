"""The names the double must have: read from libraries and headers, and made into stubs."""

from __future__ import annotations

import subprocess

import pytest
from bed.errors import BedError
from bed.symbols import declared, defined, is_ours, stubs_source, symbols, wanted


@pytest.mark.parametrize("name", ["cudaMalloc", "__cudaRegisterFunction", "cuInit", "ncclAllReduce"])
def test_names_of_cuda_and_nccl_are_ours(name):
    assert is_ours(name)


@pytest.mark.parametrize(
    "name", ["cublasCreate_v2", "cudnnCreate", "cuFileRead", "malloc", "my_cudaMalloc", "curandCreate"]
)
def test_names_that_look_alike_are_not(name):
    assert not is_ours(name)


def test_what_headers_declare_and_what_their_macros_rename():
    cuda = """
    #define cuMemFree                           cuMemFree_v2
    #define cuStreamQuery __CUDA_API_PTSZ(cuStreamQuery)
    #define CUDA_VERSION 13000
    CUresult CUDAAPI cuInit(unsigned int Flags);
    CUresult CUDAAPI cuMemFree(CUdeviceptr dptr);
    """
    nccl = "ncclResult_t  ncclCommAbort(ncclComm_t comm);\nncclResult_t pncclCommAbort(ncclComm_t comm);"
    assert declared(cuda) == {"cuMemFree", "cuMemFree_v2", "cuStreamQuery", "cuInit"}
    assert declared(nccl) == {"ncclCommAbort"}


def test_a_stub_for_each_name_in_order():
    source = stubs_source({"ncclSend", "cudaIpcGetMemHandle"})
    assert source.splitlines()[-3:] == [
        'long cudaIpcGetMemHandle() { return m8d_bed_cuda_stub("cudaIpcGetMemHandle"); }',
        'long ncclSend() { return m8d_bed_nccl_stub("ncclSend"); }',
        "}",
    ]
    assert source == stubs_source(["cudaIpcGetMemHandle", "ncclSend"])


@pytest.mark.compiler
def test_what_a_unit_and_a_library_use_and_define(tmp_path):
    source = tmp_path / "unit.c"
    source.write_text(
        "int cudaFree(void*); extern int cublasCreate_v2(void);"
        "static int cudaHidden(void) { return cublasCreate_v2(); }"
        "int cudaMalloc(void) { return cudaFree(0) + cudaHidden(); } int other(void) { return 1; }"
    )
    unit, library = tmp_path / "unit.o", tmp_path / "libtorch_cuda.so"
    subprocess.run(["g++", "-x", "c", "-fPIC", "-c", source, "-o", unit], check=True)
    subprocess.run(["g++", "-shared", "-o", library, unit], check=True)
    runtime = tmp_path / "libcudart.so.13"
    runtime.write_bytes(library.read_bytes())

    assert defined([unit]) == {"cudaMalloc", "other"}
    assert {"cudaFree", "cublasCreate_v2"} <= symbols(library)[0]
    # Of torch's libraries what they use, of CUDA's what they define.
    assert wanted([library], []) == {"cudaFree"}
    assert wanted([runtime], ["CUresult CUDAAPI cuInit(unsigned);"]) == {"cudaMalloc", "cuInit"}


def test_a_file_that_is_no_library(tmp_path):
    broken = tmp_path / "libtorch_cuda.so"
    broken.write_bytes(b"not a library")
    with pytest.raises(BedError, match=r"libtorch_cuda.so is no ELF file"):
        symbols(broken)
