import subprocess

import pytest
from kits.fakewheel import CMAKE, CPU_FLAGS, METADATA, contents, target_of, write_wheel

from m8d_build.errors import ElfInvalid, WheelInvalid, WheelMismatch
from m8d_build.targets import Abi
from m8d_build.wheel.facts import cxx11_abi_of, pinned_requirements, read_facts
from m8d_build.wheel.wheelfile import open_wheel

pytestmark = pytest.mark.compiler

C10 = """
#include <string>
namespace c10::detail {
__attribute__((visibility("default"))) void torchCheckFail(const char*, const char*, unsigned, const std::string&) {}
}
"""


def compile_library(folder, name, source, *flags):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.cpp").write_text(source)
    path = folder / name
    subprocess.run(
        ["g++", "-shared", "-fPIC", "-std=gnu++17", *flags, "-o", path, folder / f"{name}.cpp"], check=True
    )
    return path.read_bytes()


@pytest.fixture(scope="module")
def libraries(tmp_path_factory):
    folder = tmp_path_factory.mktemp("libs")
    cpu = f'const char* config[] = {{"CXX_FLAGS", " {CPU_FLAGS.decode()} "}};\n'
    pybind = 'const char* key = "__pybind11_internals_v4_gcc_libstdcpp_cxxabi1011__";\n'
    return {
        "torch/lib/libc10.so": compile_library(folder, "libc10.so", C10, "-D_GLIBCXX_USE_CXX11_ABI=0"),
        "torch/lib/libtorch_cpu.so": compile_library(folder, "libtorch_cpu.so", cpu),
        "torch/lib/libtorch_python.so": compile_library(folder, "libtorch_python.so", pybind),
        "torch/lib/libtorch_cuda.so": compile_library(
            folder, "libtorch_cuda.so", "#include <pthread.h>\nvoid f() { pthread_exit(0); }\n"
        ),
        "new-abi": compile_library(folder, "new", C10, "-D_GLIBCXX_USE_CXX11_ABI=1"),
    }


def wheel_of(tmp_path, libraries, **more):
    known = {name: data for name, data in libraries.items() if name.startswith("torch/")}
    return open_wheel(write_wheel(tmp_path / "wheel", contents(**{**known, **more})))


def test_the_facts_of_a_wheel(tmp_path, libraries):
    facts = read_facts(wheel_of(tmp_path, libraries), scratch=tmp_path)
    assert (facts.torch, facts.local, facts.cuda) == ("2.6.0", "cu124", "12.4")
    assert (facts.python_tag, facts.abi_tag, facts.platforms) == ("cp311", "cp311", ("manylinux1_x86_64",))
    assert facts.abi == Abi(False, 11, "gnu++17", "12.4")
    assert facts.cxx_flags == CPU_FLAGS.decode()
    assert facts.pybind_abi == "_gcc_libstdcpp_cxxabi1011"
    assert facts.nccl == "2.21.5"
    assert dict(facts.requirements) == {"nvidia-cuda-runtime-cu12": "12.4.127", "nvidia-nccl-cu12": "2.21.5"}
    assert [library.name for library in facts.libraries] == sorted(
        n for n in libraries if n.startswith("torch/")
    )
    assert facts.libraries[0].size == len(libraries["torch/lib/libc10.so"])
    assert facts.glibc == max(library.glibc for library in facts.libraries) > (2, 0)
    facts.check_against(target_of())
    assert [path.name for path in tmp_path.iterdir()] == ["wheel"]


def test_an_unpacked_wheel_gives_the_same_facts(tmp_path, libraries):
    wheel = wheel_of(tmp_path, libraries)
    for name, data in libraries.items():
        (tmp_path / "site" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "site" / name).write_bytes(data)
    assert read_facts(wheel, installed=tmp_path / "site") == read_facts(wheel)
    (tmp_path / "site/torch/lib/libc10.so").write_bytes(b"other")
    with pytest.raises(WheelInvalid, match=r"libc10\.so is not the wheel's"):
        read_facts(wheel, installed=tmp_path / "site")


def test_the_new_string_abi_is_seen(tmp_path, libraries):
    assert cxx11_abi_of(libraries["torch/lib/libc10.so"]) is False
    assert cxx11_abi_of(libraries["new-abi"]) is True
    assert cxx11_abi_of(libraries["new-abi"] + libraries["torch/lib/libc10.so"]) is None
    more = {
        "torch/lib/libc10.so": libraries["new-abi"],
        "torch/lib/libtorch_cpu.so": libraries["torch/lib/libtorch_cuda.so"],
        "torch/share/cmake/Torch/TorchConfig.cmake": b"  CXX_STANDARD 20\n",
    }
    facts = read_facts(wheel_of(tmp_path, libraries, **more))
    assert facts.abi == Abi(True, 0, "gnu++20", "12.4")
    assert facts.cxx_flags == ""


@pytest.mark.parametrize("where", ["library", "cmake"])
def test_a_wheel_that_says_two_abis_is_refused(tmp_path, libraries, where):
    more = (
        {"torch/lib/libc10.so": libraries["new-abi"]}
        if where == "library"
        else {"torch/share/cmake/Torch/TorchConfig.cmake": CMAKE.replace(b"ABI=0", b"ABI=1")}
    )
    with pytest.raises(WheelMismatch, match=r"_GLIBCXX_USE_CXX11_ABI is .* in libc10\.so"):
        read_facts(wheel_of(tmp_path, libraries, **more))


@pytest.mark.parametrize(
    ("abi", "message"),
    [
        (Abi(True, 11, "gnu++17", "12.4"), "has cxx11_abi False.*says cxx11_abi True"),
        (Abi(False, 0, "gnu++17", "12.4"), "has abi_version 11.*says abi_version 0"),
        (Abi(False, 11, "gnu++20", "12.4"), r"has std gnu\+\+17.*says std gnu\+\+20"),
        (Abi(False, 11, "gnu++17", "12.6"), r"has cuda 12\.4.*says cuda 12\.6"),
    ],
)
def test_a_target_that_says_otherwise_is_refused_with_both_values(tmp_path, libraries, abi, message):
    facts = read_facts(wheel_of(tmp_path, libraries))
    with pytest.raises(WheelMismatch, match=message):
        facts.check_against(target_of(abi=abi))
    facts.check_against(target_of(abi=None))


def test_a_library_that_is_no_library_is_refused(tmp_path, libraries):
    with pytest.raises(ElfInvalid):
        read_facts(wheel_of(tmp_path, libraries, **{"torch/lib/libextra.so": b"not ELF"}))
    with pytest.raises(WheelInvalid, match="is empty"):
        read_facts(wheel_of(tmp_path / "2", libraries, **{"torch/lib/libextra.so": b""}))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"torch/lib/libc10.so": None}, r"lacks a libc10\.so"),
        ({"torch/share/cmake/Torch/TorchConfig.cmake": b""}, "lacks a CXX_STANDARD"),
    ],
)
def test_what_a_torch_wheel_must_have_is_missed(tmp_path, libraries, more, message):
    given = {name: data or libraries["torch/lib/libtorch_cuda.so"] for name, data in more.items()}
    if not given.get("torch/share/cmake/Torch/TorchConfig.cmake", b"x"):
        given["torch/share/cmake/Torch/TorchConfig.cmake"] = b""
    with pytest.raises(WheelInvalid, match=message):
        read_facts(wheel_of(tmp_path, libraries, **given))


def test_only_exact_requirements_are_pins(tmp_path):
    lines = b"Requires-Dist: A.B_c==1.0\nRequires-Dist: d>=1,<2\nRequires-Dist: e==1,!=2\nRequires-Dist: f\n"
    text = METADATA.replace(b"Requires-Dist: filelock\n", lines)
    wheel = open_wheel(write_wheel(tmp_path, contents(**{"torch-2.6.0.dist-info/METADATA": text})))
    assert list(pinned_requirements(wheel)) == ["a-b-c", "nvidia-cuda-runtime-cu12", "nvidia-nccl-cu12"]


def test_a_requirement_that_is_none_is_refused(tmp_path):
    text = METADATA.replace(b"filelock", b"== nothing ==")
    wheel = open_wheel(write_wheel(tmp_path, contents(**{"torch-2.6.0.dist-info/METADATA": text})))
    with pytest.raises(WheelInvalid, match="METADATA requires"):
        pinned_requirements(wheel)
