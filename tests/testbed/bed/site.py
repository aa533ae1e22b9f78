"""Which torch an interpreter has, and where the headers are that came with it. Imports no torch."""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from bed.errors import BedError

__all__ = ["TorchSite", "look"]

# nvidia-nccl-*: nccl/; nvidia-cuda-runtime-cu12: cuda_runtime/; nvidia-cuda-runtime for 13: cu13/.
CUDA_FOLDERS = {12: "cuda_runtime", 13: "cu13"}
NEEDED = {"cuda": ("cuda_runtime_api.h", "driver_types.h", "cuda.h"), "nccl": ("nccl.h",)}
ASK_SECONDS = 60
# Finding a package imports nothing of it; torch/version.py is a few assignments.
QUESTION = """
import importlib.util, json, runpy, sys
torch = importlib.util.find_spec("torch")
nvidia = importlib.util.find_spec("nvidia")
facts = {"nvidia": list(nvidia.submodule_search_locations or []) if nvidia else []}
if torch is not None and torch.origin:
    from pathlib import Path
    folder = Path(torch.origin).parent
    version = runpy.run_path(str(folder / "version.py"))
    facts |= {"root": str(folder.parent), "torch": str(version["__version__"]), "cuda": version.get("cuda")}
json.dump(facts, sys.stdout)
"""


@dataclass(frozen=True)
class TorchSite:
    """A torch for CUDA, as installed.

    Attributes:
        python: the interpreter.
        torch: "2.6.0+cu124".
        cuda: "12.4".
        root: the folder that holds ``torch/``.
        nccl: the version in nccl.h, "2.21.5".
        includes: the folders of the CUDA and the NCCL headers.
    """

    python: Path
    torch: str
    cuda: str
    root: Path
    nccl: str
    includes: tuple[Path, ...]

    @property
    def cuda_major(self) -> int:
        return int(self.cuda.split(".", maxsplit=1)[0])

    def libraries(self) -> list[Path]:
        """Return the libraries whose CUDA and NCCL symbols matter: torch's, CUDA's runtime, NCCL."""
        found = sorted((self.root / "torch" / "lib").glob("lib*.so"))
        for folder in self.includes:
            for pattern in ("libcudart.so.*", "libnccl.so.*"):
                found += sorted((folder.parent / "lib").glob(pattern))
        return found


def look(python: Path) -> TorchSite:
    """Ask an interpreter for its torch, and find the headers it came with.

    Raises:
        BedError: it does not start; it has no torch, one for the CPU, or one for a CUDA that is not modelled; the
            wheel of CUDA's runtime or of NCCL is not there, or lacks a header.
    """
    facts = _ask(python)
    if "torch" not in facts:
        raise BedError(
            f"{python} has no torch",
            rule="the test bed stands under an installed CUDA build of torch",
            next_step=f"Install one: {python} -m pip install torch",
        )
    torch, cuda = facts["torch"], facts["cuda"]
    if not cuda:
        raise BedError(
            f"torch {torch} of {python} is a build without CUDA",
            rule="the test bed stands in for CUDA and NCCL, which only a CUDA build calls",
            next_step="Name the interpreter of a CUDA build",
        )
    folder = CUDA_FOLDERS.get(int(cuda.split(".", maxsplit=1)[0]))
    if folder is None:
        raise BedError(
            f"torch {torch} of {python} is built for CUDA {cuda}",
            rule=f"the test bed models CUDA {' and '.join(map(str, CUDA_FOLDERS))}",
            next_step="Use a build for one of them",
        )
    nvidia = [Path(place) for place in facts["nvidia"]]
    includes = (
        _headers(nvidia, folder, "cuda", python, "CUDA's runtime (nvidia-cuda-runtime)"),
        _headers(nvidia, "nccl", "nccl", python, "NCCL (nvidia-nccl)"),
    )
    return TorchSite(
        python=python,
        torch=torch,
        cuda=cuda,
        root=Path(facts["root"]),
        nccl=nccl_version((includes[1] / "nccl.h").read_text(encoding="utf-8")),
        includes=includes,
    )


def nccl_version(header: str) -> str:
    """Return the version that nccl.h states ("2.21.5"), "" if it states none."""
    numbers = dict(re.findall(r"^#define NCCL_(MAJOR|MINOR|PATCH) (\d+)", header, re.MULTILINE))
    return ".".join(numbers[part] for part in ("MAJOR", "MINOR", "PATCH")) if len(numbers) == 3 else ""


def _ask(python: Path) -> dict[str, object]:
    try:
        answer = subprocess.run(
            [python, "-c", QUESTION], capture_output=True, text=True, timeout=ASK_SECONDS, check=True
        )
        return json.loads(answer.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as exc:
        said = (getattr(exc, "stderr", "") or "").strip().splitlines()
        raise BedError(
            f"{python} could not be asked for its torch: {said[-1] if said else exc}",
            rule="it must be a Python interpreter that starts",
            next_step="Name the interpreter itself, such as ENVIRONMENT/bin/python",
        ) from exc


def _headers(nvidia: list[Path], folder: str, kind: str, python: Path, wheel: str) -> Path:
    """Return the first include folder that is there, with every header that the double needs."""
    for place in nvidia:
        include = place / folder / "include"
        if not include.is_dir():
            continue
        missing = [name for name in NEEDED[kind] if not (include / name).is_file()]
        if missing:
            raise BedError(
                f"{include} has no {', '.join(missing)}",
                rule=f"the wheel of {wheel} brings it, and the double is compiled with it",
                next_step=f"Install that wheel again, with {python} -m pip install --force-reinstall",
            )
        return include
    raise BedError(
        f"the wheel of {wheel} is not installed for {python}: no nvidia/{folder}/include",
        rule="the double is compiled with the headers that came with torch",
        next_step="Install torch with its dependencies, not with --no-deps",
    )
