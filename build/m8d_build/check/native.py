"""The probes' native parts: preloaded libraries, and an extension linked against a wheel's libraries."""

from __future__ import annotations

import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from m8d_build import proc
from m8d_build.errors import PrerequisiteMissing

if TYPE_CHECKING:
    from collections.abc import Iterator

    from m8d_build.environments.venvs import Environment

__all__ = [
    "PROBES", "build_extension", "build_preload", "extension_command", "nccl_library", "preloadable",
]  # fmt: skip

PROBES = Path(__file__).with_name("probes")
_TIMEOUT = 300.0  # seconds; each takes about one
_NEXT = "Look at the log; another compiler is named by M8D_CXX"


def build_preload(compiler: str, name: str, into: Path, log: Path) -> Path:
    """Compile a library that is preloaded under probes; return its path.

    Args:
        compiler: the C++ compiler's command.
        name: "one_gpu" or "exits": a source in probes/.
        into: the folder it goes to.
        log: where the compiler writes.

    Raises:
        CommandFailed: the compiler failed.
    """
    made = into / f"{name}.so"
    source = PROBES / f"{name}.cpp"
    proc.run(
        [compiler, "-std=c++17", "-O1", "-fPIC", "-shared", source, "-o", made, "-ldl", "-lpthread"],
        what=f"compile {source.name} for the probes",
        log=log,
        timeout=_TIMEOUT,
        next_step=_NEXT,
    )
    return made


@contextmanager
def preloadable(library: Path) -> Iterator[Path]:
    """Yield a path of a library that LD_PRELOAD can hold: there a name ends at a space or a colon."""
    if not {" ", ":"} & set(str(library)):
        yield library
        return
    # Not in TMPDIR, which may have them, too. /tmp may forbid to load what is in it: that is a link alone.
    with tempfile.TemporaryDirectory(prefix="m8d-preload-", dir="/tmp") as folder:
        link = Path(folder, library.name)
        link.symlink_to(library.absolute())
        yield link


def build_extension(compiler: str, made: Path, *, linked: Environment, run: Environment, log: Path) -> Path:
    """Compile the AutoNcclGroup extension; return its path.

    Args:
        compiler: the C++ compiler's command.
        made: the library's path.
        linked: whose libraries it is linked against.
        run: whose libraries it finds when it is loaded.
        log: where the compiler writes.

    Raises:
        CommandFailed: the compiler or linker failed; an undefined symbol is such a failure.
        PrerequisiteMissing: an environment has no libnccl.
    """
    proc.run(
        extension_command(
            compiler,
            made,
            link_folders=(linked.torch / "lib", nccl_library(linked.site).parent),
            run_folders=(run.torch / "lib", nccl_library(run.site).parent),
            nccl=nccl_library(linked.site).name,
        ),
        what=f"link an extension against {linked.name}",
        log=log,
        timeout=_TIMEOUT,
        next_step=_NEXT,
    )
    return made


def extension_command(
    compiler: str, made: Path, *, link_folders: tuple[Path, ...], run_folders: tuple[Path, ...], nccl: str
) -> list[str]:
    """Return the compiler's arguments: undefined symbols are refused, no library is dropped as unneeded."""
    return [
        compiler, "-std=c++17", "-O1", "-fPIC", "-shared", str(PROBES / "group.cpp"), "-o", str(made),
        "-Wl,-z,defs", "-Wl,--no-as-needed",
        *(f"-L{folder}" for folder in link_folders),
        # not -Wl: a comma in the path would part it
        *(word for folder in run_folders for word in ("-Xlinker", "-rpath", "-Xlinker", str(folder))),
        "-ltorch_cuda", f"-l:{nccl}", "-ldl",
    ]  # fmt: skip


def nccl_library(site: Path) -> Path:
    """Return the NCCL library beside an installed torch.

    Raises:
        PrerequisiteMissing: there is none.
    """
    found = sorted((site / "nvidia" / "nccl" / "lib").glob("libnccl.so.*"))
    if not found:
        raise PrerequisiteMissing(
            f"{site} has no nvidia/nccl/lib/libnccl.so.*",
            rule="the checks need the NCCL that the wheel depends on",
            next_step="Give a CUDA wheel, or a stock environment with its nvidia packages",
        )
    return found[0]
