"""What an interpreter finds on this machine: its torch, its GPUs, driver and NCCL. Imports no torch itself."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bed.errors import BedError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Machine", "NoGpu", "look", "told"]

STAND_IN = "m8d test bed"
"""How the double's device calls itself: it must never be taken for a GPU."""

_ANSWER = 180.0
"""Seconds to import torch and to wake every GPU; some seconds are usual."""

_SMI = 30.0
_MARK = "m8d-machine:"
_QUESTION = f"""
import ctypes, importlib.util, json
facts = {{"found": importlib.util.find_spec("torch") is not None}}
if facts["found"]:
    import torch
    facts |= {{"torch": torch.__version__, "cuda": torch.version.cuda or "", "gpus": [], "why": ""}}
    if torch.version.cuda:
        try:
            torch.cuda.init()
            facts["gpus"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        except Exception as exc:
            facts["why"] = str(exc)
        try:
            version = ctypes.c_int()
            ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(version))
            facts["nccl"] = version.value
        except (OSError, AttributeError):
            facts["nccl"] = 0
print({_MARK!r} + json.dumps(facts))
"""


class NoGpu(BedError):
    """There is no GPU that this torch can use: nothing is wrong with what was asked, it just cannot be done here."""


@dataclass(frozen=True)
class Machine:
    """Where something was run.

    Attributes:
        gpus: their names, in order.
        driver: version of NVIDIA's driver, "" if it could not be learned.
        torch: "2.14.1+cu130".
        cuda: that torch was built for, "13.0".
        nccl: the library's own version, "2.30.7"; "" if it could not be learned.
    """

    gpus: tuple[str, ...]
    driver: str
    torch: str
    cuda: str
    nccl: str

    @property
    def gpu(self) -> str:
        """The GPUs in words: "4 x NVIDIA H200"."""
        kinds = {name: self.gpus.count(name) for name in dict.fromkeys(self.gpus)}
        return ", ".join(name if many == 1 else f"{many} x {name}" for name, many in kinds.items())


def look(python: Path, *, library: Path | None = None, timeout: float = _ANSWER) -> Machine:
    """Ask an interpreter.

    Args:
        python: which.
        library: the test bed's, where that stands in for hardware (a test of this code).
        timeout: seconds for its answer.

    Raises:
        NoGpu: its torch sees none.
        BedError: it does not answer, has no torch, or one for the CPU.
    """
    env = {key: value for key, value in os.environ.items() if not key.startswith(("LD_PRELOAD", "PYTHON"))}
    if library is not None:
        env["LD_PRELOAD"] = str(library)
    try:
        done = subprocess.run(
            [python, "-c", _QUESTION], capture_output=True, text=True, timeout=timeout, check=False, env=env,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except subprocess.TimeoutExpired as exc:
        raise BedError(
            f"{python} did not tell what GPUs it sees within {timeout:g} s",
            rule="importing torch and waking the GPUs takes some seconds",
            next_step="See whether `nvidia-smi` answers; a GPU that hangs needs its driver restarted",
        ) from exc
    except OSError as exc:
        raise BedError(
            f"{python} cannot be started: {exc.strerror}", rule="--gpu names an interpreter with torch"
        ) from exc
    answers = [line for line in done.stdout.splitlines() if line.startswith(_MARK)]
    if not answers:
        last = (done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"])[-1]
        raise BedError(
            f"{python} could not be asked for its GPUs: {last}",
            rule="it must import torch",
            next_step=f"Try {python} -c 'import torch'",
        )
    facts = json.loads(answers[-1].removeprefix(_MARK))
    return told(facts, python=python, driver=_driver(), stand_in=library is not None)


def told(
    facts: Mapping[str, Any], *, python: Path, driver: tuple[str, str], stand_in: bool = False
) -> Machine:
    """Judge what an interpreter told. Pure.

    Args:
        facts: its answer.
        python: which interpreter, for messages.
        driver: the driver's version, and, where there is none, why.
        stand_in: whether the test bed is wanted.

    Raises:
        NoGpu: there is none.
        BedError: no torch, or one without CUDA; or the test bed where hardware is wanted.
    """
    if not facts["found"]:
        raise BedError(
            f"{python} has no torch", rule="what is run is torch", next_step=f"{python} -m pip install torch"
        )
    if not facts["cuda"]:
        raise BedError(
            f"torch {facts['torch']} of {python} is a build without CUDA",
            rule="NCCL needs a build for CUDA",
            next_step="Name the interpreter of a CUDA build: --gpu NAME=PYTHON",
        )
    version, trouble = driver
    if not facts["gpus"]:
        raise NoGpu(
            f"no GPU here: {trouble or 'nvidia-smi names driver ' + version}; torch {facts['torch']} says: "
            f"{' '.join(str(facts['why']).split()) or 'none is visible'}",
            rule="these scenarios run NCCL on real GPUs",
            next_step="Run it on a machine that has one; without one there is the test bed, `nox -s testbed`",
        )
    if any(name.startswith(STAND_IN) for name in facts["gpus"]) and not stand_in:
        raise NoGpu(
            f"no GPU here: {facts['gpus'][0]}",
            rule="the test bed's figures are not hardware's",
            next_step="Take LD_PRELOAD out of the environment, or run `nox -s matrix`",
        )
    return Machine(
        tuple(facts["gpus"]), version, facts["torch"], facts["cuda"], _dotted(facts.get("nccl", 0))
    )


def _dotted(number: int) -> str:
    """Return "2.30.7" for 23007."""
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}" if number else ""


def _driver() -> tuple[str, str]:
    """Return the driver's version; if there is none, "" and why."""
    if version := _loaded(_read(Path("/proc/driver/nvidia/version"))):
        return version, ""
    program = shutil.which("nvidia-smi")
    if program is None:
        return "", "nvidia-smi is not installed"
    command = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SMI, check=False)
    except (OSError, subprocess.TimeoutExpired) as exc:
        return "", f"nvidia-smi does not answer ({type(exc).__name__})"
    said = " ".join((done.stdout.strip() or done.stderr.strip()).split())
    if done.returncode or not said:
        return "", f"nvidia-smi: {said or f'ended with {done.returncode}'}"
    return said.split()[0], ""


def _loaded(text: str) -> str:
    """Return the version that the kernel module tells of itself: "... Kernel Module for x86_64  580.159.04  ..."."""
    version = re.search(r"Kernel Module.*?\s(\d+(?:\.\d+)+)\s", text)
    return version[1] if version else ""


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
