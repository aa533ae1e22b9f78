"""A full build's environment, decided: how it is created, how programs run in it, its variables."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from m8d_build.full.recipes import Recipe

__all__ = [
    "SWITCHES",
    "UNSET",
    "Route",
    "RouteKind",
    "build_variables",
    "create_commands",
    "inside",
    "render_environment",
]


class RouteKind(str, Enum):
    """What makes the build environment."""

    CONDA = "conda"
    MAMBA = "mamba"
    MICROMAMBA = "micromamba"
    VENV = "venv"


@dataclass(frozen=True)
class Route:
    """How the build environment is made.

    Attributes:
        kind: what makes it.
        program: its full path; for a venv, the Python it is made from.
        compiler: full path of g++ (venv alone; conda brings its own).
        cuda_home: the CUDA toolkit (venv alone).
    """

    kind: RouteKind
    program: str
    compiler: str = ""
    cuda_home: str = ""


# What every build gets. Names and values of pytorch/builder release/2.5, manywheel/build_cuda.sh and
# build_common.sh (the case of CUDA 12 with NVIDIA's libraries from PyPI), and of pytorch/pytorch
# .ci/manywheel/build_env_setup.py, CUDA_BUILD_ENV_STATIC, which agree; what is ours says so.
SWITCHES: tuple[tuple[str, str], ...] = (
    ("TH_BINARY_BUILD", "1"),
    ("INSTALL_TEST", "0"),
    ("BUILD_TEST", "0"),  # ours: C++ tests are no part of the wheel (INSTALL_TEST=0), and take long
    ("USE_CUDA", "1"),
    ("USE_CUDNN", "1"),
    ("USE_DISTRIBUTED", "1"),
    ("USE_NCCL", "1"),
    ("USE_SYSTEM_NCCL", "1"),
    ("USE_STATIC_NCCL", "0"),
    ("USE_STATIC_CUDNN", "0"),
    ("ATEN_STATIC_CUDA", "0"),
    ("USE_CUDA_STATIC_LINK", "0"),
    ("USE_CUPTI_SO", "1"),
    ("USE_KINETO", "1"),
    # ours, to be the same on every machine: torch.__config__.show() of the official 2.6.0 wheel has these off
    ("USE_MPI", "0"),
    ("USE_GFLAGS", "0"),
    ("USE_GLOG", "0"),
    ("USE_ROCM", "0"),
    ("USE_NUMA", "0"),  # ours: no library of the official wheel needs libnuma
)

# What must not leak in: flags of the caller's shell, and those conda's compilers set on activation
# (-march=nocona, -Wl,--as-needed, -Wl,-z,now, which would make libraries that need a GPU's driver fail to
# load without one).
UNSET = (
    "CFLAGS",
    "CXXFLAGS",
    "CPPFLAGS",
    "LDFLAGS",
    "CMAKE_ARGS",
    "DEBUG",
    "REL_WITH_DEB_INFO",
    "PYTHONPATH",
)


def create_commands(route: Route, prefix: Path, file: Path) -> tuple[tuple[str, ...], ...]:
    """Return the commands that make the environment.

    Args:
        route: what makes it.
        prefix: where it goes; nothing is there.
        file: the filled-in conda environment file (not used for a venv).
    """
    if route.kind is RouteKind.VENV:
        return (
            (route.program, "-m", "venv", str(prefix)),
            (str(prefix / "bin" / "python"), "-m", "pip", "install", "--no-input", "--upgrade", "pip"),
        )
    if route.kind is RouteKind.MICROMAMBA:
        return ((route.program, "create", "--yes", "--prefix", str(prefix), "--file", str(file)),)
    return ((route.program, "env", "create", "--yes", "--prefix", str(prefix), "--file", str(file)),)


def inside(route: Route, prefix: Path) -> tuple[str, ...]:
    """Return the words that run the environment's Python in the environment, to be followed by its arguments."""
    unset = ("env", *(word for name in UNSET for word in ("-u", name)))
    python = str(prefix / "bin" / "python")
    if route.kind is RouteKind.VENV:
        return (*unset, python)
    keep = ("--no-capture-output",) if route.kind is RouteKind.CONDA else ()
    # set here, after activation has set its own: the environment's libraries need each other while linking
    libraries = f"LDFLAGS=-L{prefix}/lib -Wl,-rpath-link,{prefix}/lib"
    return (route.program, "run", *keep, "--prefix", str(prefix), *unset, libraries, python)


def render_environment(text: str, python: str) -> str:
    """Return a conda environment file with its Python version filled in."""
    return text.replace("- python={python}\n", f"- python={python}.*\n")


def build_variables(
    recipe: Recipe,
    route: Route,
    *,
    environment: Path,
    linked: Path,
    scratch: Path,
    version: str,
    archs: tuple[str, ...],
    jobs: int,
    cxx11_abi: bool,
) -> tuple[tuple[str, str], ...]:
    """Return the variables the build gets, in a fixed order.

    Args:
        recipe: how this version is built.
        route: where compiler and toolkit come from.
        environment: the build environment.
        linked: folder with NVIDIA's headers (``include``) and libraries (``lib``).
        scratch: folder for temporary files (nvcc's are large).
        version: of the wheel.
        archs: GPU architectures.
        jobs: compilers side by side.
        cxx11_abi: whether libstdc++'s C++11 ABI is used.
    """
    toolkit = route.cuda_home if route.kind is RouteKind.VENV else str(environment)
    found = {
        "PYTORCH_BUILD_VERSION": version,
        "PYTORCH_BUILD_NUMBER": "1",  # from 2 on, tools/generate_torch_version.py appends .postN
        **dict(SWITCHES),
        **dict(recipe.switches),
        "_GLIBCXX_USE_CXX11_ABI": "1" if cxx11_abi else "0",
        "TORCH_CUDA_ARCH_LIST": ";".join(archs),
        "TORCH_NVCC_FLAGS": " ".join(recipe.cuda.nvcc),
        "PYTORCH_EXTRA_INSTALL_REQUIREMENTS": " | ".join(_conditional(r) for r in recipe.requires),
        "MAX_JOBS": str(jobs),
        "CUDA_HOME": toolkit,
        "CMAKE_PREFIX_PATH": str(environment),
        # where mkl-static and mkl-include are; the official build has them in /opt/intel
        "CMAKE_INCLUDE_PATH": str(environment / "include"),
        "CMAKE_LIBRARY_PATH": str(environment / "lib"),
        "NCCL_INCLUDE_DIR": str(linked / "include"),
        "NCCL_LIB_DIR": str(linked / "lib"),
        "CUDNN_INCLUDE_DIR": str(linked / "include"),
        "CUDNN_LIBRARY": str(linked / "lib"),
        "CUSPARSELT_INCLUDE_DIR": str(linked / "include"),
        "CUSPARSELT_LIBRARY": str(linked / "lib"),
        "TMPDIR": str(scratch),
    }
    if route.kind is RouteKind.VENV:
        bins = (environment / "bin", Path(toolkit) / "bin", Path(route.compiler).parent)
        system = (Path("/usr/local/bin"), Path("/usr/bin"), Path("/bin"))
        found["PATH"] = ":".join(dict.fromkeys(str(folder) for folder in (*bins, *system)))
        found["CC"] = _c_compiler(route.compiler)
        found["CXX"] = route.compiler
        found["CUDAHOSTCXX"] = route.compiler
        found["USE_MAGMA"] = "0"  # PyPI has no MAGMA; torch.linalg then uses cuSOLVER alone
    elif not recipe.magma:
        found["USE_MAGMA"] = "0"
    else:
        found["MAGMA_HOME"] = str(environment)
    return tuple(found.items())


def _c_compiler(compiler: str) -> str:
    path = Path(compiler)
    return str(path.with_name(path.name.replace("g++", "gcc").replace("clang++", "clang")))


def _conditional(requirement: str) -> str:
    """Return a requirement that holds on Linux x86_64 alone, as the official wheels have it."""
    name, _, marker = requirement.partition(";")
    here = "platform_system == 'Linux' and platform_machine == 'x86_64'"
    return f"{name.strip()}; {here} and {marker.strip()}" if marker else f"{name.strip()}; {here}"
