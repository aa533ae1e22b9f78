"""A torch of a few kilobytes: sources, official wheel with real libraries, a package it pins, patches, target.

Everything the overlay build looks at is there and real (ELF, RECORD, blob ids, diffs); only the code is small. It
lets the whole build run in seconds, and be broken at every point.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

from kits import fakewheel

from m8d_build.files.blobs import blob_id
from m8d_build.series.read import load_series

PYTHON = f"cp{sys.version_info.major}{sys.version_info.minor}"
CXX = os.environ.get("CXX") or shutil.which("g++") or "c++"
FLAGS = (
    "-std=gnu++17", "-D_GLIBCXX_USE_CXX11_ABI=0", "-fabi-version=11", "-O2", "-fPIC", "-fvisibility=hidden",
    "-fvisibility-inlines-hidden", "-DNDEBUG",
)  # fmt: skip

SOURCES = {
    "version.txt": "2.6.0a0\n",
    "torch/csrc/cuda/nccl.h": """#pragma once
#define TORCH_CUDA_CPP_API __attribute__((visibility("default")))
namespace torch::cuda::nccl {
struct TORCH_CUDA_CPP_API AutoNcclGroup {
  AutoNcclGroup();
  ~AutoNcclGroup();
  int depth_;
};
TORCH_CUDA_CPP_API int answer();
}
""",
    "torch/csrc/cuda/nccl.cpp": """#include <nccl.h>
#include <torch/csrc/cuda/nccl.h>
namespace torch::cuda::nccl {
AutoNcclGroup::AutoNcclGroup() : depth_(1) {}
AutoNcclGroup::~AutoNcclGroup() {}
int answer() {
  return toy_nccl();
}
}
""",
    "torch/distributed/distributed_c10d.py": 'SAYS = "stock"\n',
    "torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp": """#pragma once
#include <memory>
#include <string>
#define TORCH_API __attribute__((visibility("default")))
namespace c10d {
class NCCLComm {
  int rank_ = 0;
};
class TORCH_API ProcessGroupNCCL {
 public:
  class WorkNCCL {
    int seq_ = 0;
  };
  struct Options {
    int timeout = 0;
  };
  virtual ~ProcessGroupNCCL();
  virtual std::string name();
  static int count();
};
struct Writer {
  std::string text = "a text that is too long to be kept inside the string itself";
};
class TORCH_API DebugInfoWriter {
 public:
  static const std::string& text();

 private:
  static std::unique_ptr<Writer> writer_;
};
}
""",
    "torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp": """#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>
#include <vector>
#include <torch/csrc/distributed/c10d/control_plane/Handlers.hpp>
namespace c10d {
control_plane::RegisterHandler handler{
    "toy", [](const control_plane::Request&, control_plane::Response&) {}};
int hidden_helper(int value) {
  return value + 1;
}
ProcessGroupNCCL::~ProcessGroupNCCL() {}
std::string ProcessGroupNCCL::name() {
  return "stock";
}
int ProcessGroupNCCL::count() {
  return hidden_helper(1);
}
std::unique_ptr<Writer> DebugInfoWriter::writer_ = nullptr;
const std::string& DebugInfoWriter::text() {
  if (!writer_) {
    writer_ = std::make_unique<Writer>();
  }
  return writer_->text;
}
}
""",
    "torch/csrc/distributed/c10d/control_plane/Handlers.hpp": """#pragma once
#include <functional>
#include <string>
namespace c10d::control_plane {
struct Request {};
struct Response {};
using HandlerFunc = std::function<void(const Request&, Response&)>;
__attribute__((visibility("default"))) void registerHandler(const std::string& name, HandlerFunc f);
class __attribute__((visibility("default"))) RegisterHandler {
 public:
  RegisterHandler(const std::string& name, HandlerFunc f) {
    registerHandler(name, f);
  }
};
}
""",
}
# The rest of libtorch_cuda, and of the other libraries.
CUDA_REST = """#include <torch/csrc/cuda/nccl.h>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>
#define API extern "C" __attribute__((visibility("default")))
API int toy_answer() { return torch::cuda::nccl::answer(); }
API int toy_name() { return c10d::ProcessGroupNCCL().name() == "patched"; }
API int toy_write() { return static_cast<int>(c10d::DebugInfoWriter::text().size()); }
"""
CPU = """#include <torch/csrc/distributed/c10d/control_plane/Handlers.hpp>
#define API __attribute__((visibility("default")))
namespace c10d::control_plane {
static int registered = 0;
void registerHandler(const std::string&, HandlerFunc) { ++registered; }
extern "C" API int toy_registered() { return registered; }
}
extern "C" API const char* toy_flags() {
  return " -D_GLIBCXX_USE_CXX11_ABI=0 -fabi-version=11 -fvisibility-inlines-hidden -O2 -fPIC";
}
"""
C10 = """#include <string>
namespace c10::detail {
__attribute__((visibility("default"))) void torchCheckFail(const char*, const char*, unsigned, const std::string&) {}
}
"""
NCCL = 'extern "C" __attribute__((visibility("default"))) int toy_nccl() { return 20; }\n'
MARKER = r"""
extern "C" TORCH_CUDA_CPP_API const char* m8d_patch_info();
extern "C" const char* m8d_patch_info() {
  static constexpr char prefix[] = "m8d-patch-info:";
  __attribute__((used)) static const char info[] =
      "m8d-patch-info:{\"schema\":1,\"torch\":\"2.6.0\",\"topics\":[\"cleanup-only\",\"marker\"]}";
  return info + sizeof(prefix) - 1;
}
"""
HEADER = """Topic: {topic}
Reason: to see it done.
Upstream: not reported
Ends: {ends}
Drop-when: never.
Send: nothing
Licence: context lines are PyTorch's, BSD-3-Clause
---
"""


@dataclass(frozen=True)
class Toy:
    """The parts of one toy.

    Attributes:
        tree: its sources.
        wheel: its official wheel.
        patches: folder with targets.toml and the series.
        packages: folder with the package it pins, for pip's --find-links.
    """

    tree: Path
    wheel: Path
    patches: Path
    packages: Path


def make_toy(folder: Path) -> Toy:
    """Make sources, libraries, wheel, package, patches and target."""
    tree = folder / "pytorch"
    for name, text in SOURCES.items():
        path = tree / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    packages = folder / "packages"
    libraries = _libraries(tree, folder / "lib", packages)
    wheel = make_wheel(folder / "official", libraries)
    toy = Toy(tree, wheel, folder / "patches", packages)
    write_patches(toy, folder / "diff")
    write_target(toy)
    return toy


def make_wheel(folder: Path, libraries: dict[str, bytes], **changes: bytes) -> Path:
    """Write the official wheel for the Python that runs this."""
    files = fakewheel.contents()
    for entry, old, new in (
        ("torch-2.6.0.dist-info/METADATA", b"nvidia-nccl-cu12 (==2.21.5)", b"toy-nccl (==1.0)"),
        ("torch-2.6.0.dist-info/WHEEL", b"cp311-cp311", f"{PYTHON}-{PYTHON}".encode()),
    ):
        assert old in files[entry]
        files[entry] = files[entry].replace(old, new)
    files |= {f"torch/lib/{name}": data for name, data in libraries.items()}
    files |= {
        f"torch/include/{n}": t.encode() for n, t in SOURCES.items() if n.endswith(("nccl.h", "NCCL.hpp"))
    }
    files |= {n: t.encode() for n, t in SOURCES.items() if n.endswith(".py")}
    files |= changes
    return fakewheel.write_wheel(folder, files, name=fakewheel.NAME.replace("cp311", PYTHON))


def write_patches(toy: Toy, scratch: Path) -> None:
    """Write a series of two: one that changes behaviour in two files, and the marker."""
    series = toy.patches / "v2.6.0"
    series.mkdir(parents=True, exist_ok=True)
    shutil.copytree(toy.tree, scratch)
    _git(scratch, "init", "--quiet")
    _git(scratch, "add", "--all")
    _git(scratch, "commit", "--quiet", "-m", "base")
    for number, (topic, ends, edit) in enumerate(
        (("cleanup-only", "D1", _clean_up), ("marker", "-", _mark)), 1
    ):
        edit(scratch)
        diff = _git(scratch, "diff", "-U1", "--full-index", "HEAD")
        _git(scratch, "commit", "--quiet", "--all", "-m", topic)
        (series / f"{number:04}-{topic}.patch").write_text(HEADER.format(topic=topic, ends=ends) + diff)
    (series / "series").write_text("0001-cleanup-only.patch\n0002-marker.patch\n")


def write_target(toy: Toy, **changes: str) -> None:
    """Write targets.toml; a change replaces one line's value."""
    files = [
        name
        for name in SOURCES
        if name.endswith(("version.txt", ".py", "Handlers.hpp")) or "nccl." in name or "NCCL" in name
    ]
    values = {
        "version": '"2.6.0"',
        "tag": '"v2.6.0"',
        "commit": f'"{fakewheel.COMMIT}"',
        "status": '"verified"',
        "defects": '["D1"]',
        "topics": '["cleanup-only", "marker"]',
        "pinned_packages": '["toy-nccl"]',
        "units": '[{ path = "torch/csrc/cuda/nccl.cpp" }, { path = "torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp",'
        ' defines = ["registerHandler=m8d_already_registered", "RegisterHandler=M8dAlreadyRegistered"] }]',
        "abi": '{ cxx11_abi = false, abi_version = 11, std = "gnu++17", cuda = "12.4" }',
        "build": "1",
        "series": f'"{load_series(toy.patches, "2.6.0").digest}"',
        **changes,
    }
    lines = [
        "schema = 1",
        "[[target]]",
        *(f"{key} = {value}" for key, value in values.items()),
        "[target.files]",
    ]
    lines += [f'"{name}" = "{blob_id(SOURCES[name].encode())}"' for name in files]
    (package,) = toy.packages.glob("*.whl")
    lines += ["[target.packages]", f'"toy-nccl==1.0" = "{hashlib.sha256(package.read_bytes()).hexdigest()}"']
    digest = hashlib.sha256(toy.wheel.read_bytes()).hexdigest()
    lines += [
        "[[target.wheels]]",
        f'filename = "{toy.wheel.name}"',
        f'sha256 = "{digest}"',
        'local = "cu124"',
    ]
    lines += [f'git_version = "{fakewheel.COMMIT}"']
    (toy.patches / "targets.toml").write_text("\n".join(lines) + "\n")


def _clean_up(tree: Path) -> None:
    _replace(tree / "torch/csrc/cuda/nccl.cpp", "return toy_nccl();", "return toy_nccl() + 22;")
    _replace(tree / "torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp", '"stock"', '"patched"')
    _replace(tree / "torch/distributed/distributed_c10d.py", '"stock"', '"patched"')


def _mark(tree: Path) -> None:
    path = tree / "torch/csrc/cuda/nccl.cpp"
    path.write_text(path.read_text() + MARKER)


def _replace(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))


def _libraries(tree: Path, folder: Path, packages: Path) -> dict[str, bytes]:
    """Compile everything; the official libtorch_cuda.so holds the unpatched units."""
    folder.mkdir(parents=True)
    include = folder / "include"
    include.mkdir()
    (include / "nccl.h").write_text('#pragma once\nextern "C" int toy_nccl();\n')
    for name, text in {"rest": CUDA_REST, "cpu": CPU, "c10": C10, "nccl": NCCL, "c10_cuda": "\n"}.items():
        (folder / f"{name}.cpp").write_text(text)

    def link(name: str, sources: list[Path], *more: str) -> None:
        objects = []
        for source in sources:
            made = folder / f"{name}-{source.stem}.o"
            _run([CXX, *FLAGS, f"-I{tree}", f"-I{include}", "-c", str(source), "-o", str(made)])
            objects.append(str(made))
        _run([CXX, "-shared", *objects, "-o", str(folder / name), f"-Wl,-soname,{name}", "-Wl,--hash-style=gnu",
              "-Wl,--disable-new-dtags", "-Wl,-z,defs", *more])  # fmt: skip

    link("libnccl.so.2", [folder / "nccl.cpp"])
    link("libc10.so", [folder / "c10.cpp"])
    link("libc10_cuda.so", [folder / "c10_cuda.cpp"])
    link("libtorch_cpu.so", [folder / "cpu.cpp"])
    units = [tree / "torch/csrc/cuda/nccl.cpp", tree / "torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp"]
    others = [str(folder / n) for n in ("libc10.so", "libc10_cuda.so", "libtorch_cpu.so", "libnccl.so.2")]
    rpath = "-Wl,-rpath,$ORIGIN/../../nvidia/nccl/lib:$ORIGIN"
    link("libtorch_cuda.so", [*units, folder / "rest.cpp"], "-Wl,--no-as-needed", *others, rpath)

    packages.mkdir()
    with zipfile.ZipFile(packages / "toy_nccl-1.0-py3-none-any.whl", "w") as archive:
        entries = {
            "nvidia/nccl/include/nccl.h": (include / "nccl.h").read_bytes(),
            "nvidia/nccl/lib/libnccl.so.2": (folder / "libnccl.so.2").read_bytes(),
            "toy_nccl-1.0.dist-info/METADATA": b"Metadata-Version: 2.1\nName: toy-nccl\nVersion: 1.0\n",
            "toy_nccl-1.0.dist-info/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        }
        for name, data in entries.items():
            archive.writestr(name, data)
        archive.writestr(
            "toy_nccl-1.0.dist-info/RECORD", fakewheel.record_of(entries, "toy_nccl-1.0.dist-info")
        )
    names = ("libtorch_cuda.so", "libtorch_cpu.so", "libc10.so", "libc10_cuda.so")
    return {name: (folder / name).read_bytes() for name in names}


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr


def _git(folder: Path, *arguments: str) -> str:
    own = ["-c", "user.name=toy", "-c", "user.email=toy@example.org", "-c", "commit.gpgsign=false"]
    done = subprocess.run(
        ["git", *own, *arguments], cwd=folder, capture_output=True, text=True, check=True, timeout=60
    )
    return done.stdout
