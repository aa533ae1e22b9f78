"""Reads the environment of a Slurm step: ``srun --ntasks-per-node=1 m8d-run ...``. Pure.

The variables are those of srun(1), "OUTPUT ENVIRONMENT VARIABLES".
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from multiworld.run.clusters.values import ClusterDefaults
from multiworld.run.errors import ArgumentsError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["first_host", "read"]

_FIRST_PORT, _PORTS = 15000, 10000
"""For steps without reserved ports: below the ports of outgoing connections (Linux: from 32768)."""
_STEPS = 1009
"""Distance of the ports of a job's steps: they differ from those of the next jobs, too."""


def read(environment: Mapping[str, str]) -> ClusterDefaults | None:
    """Return what a step of several nodes says; None: this is no such step.

    The first node of the step serves the rendezvous. A step that was requeued is another run.

    Raises:
        ArgumentsError: the step starts several launchers on one node.
    """
    job, step = environment.get("SLURM_JOB_ID", ""), environment.get("SLURM_STEP_ID", "")
    nodes = _number(environment.get("SLURM_STEP_NUM_NODES"))
    host = first_host(environment.get("SLURM_STEP_NODELIST", ""))
    if not (job and step) or nodes < 2 or not host or _number(environment.get("SLURM_HET_SIZE")) > 1:
        return None
    tasks = environment.get("SLURM_STEP_TASKS_PER_NODE", "1")
    if set(re.findall(r"\d+", re.sub(r"\(x\d+\)", "", tasks))) != {"1"}:
        raise ArgumentsError(
            f"SLURM_STEP_TASKS_PER_NODE={tasks}",
            rule="A node of a run has one launcher, which starts the node's workers",
            next_step="Give srun --ntasks-per-node=1, and m8d-run --nproc-per-node N; or, for separate runs, "
            "m8d-run --standalone",
        )
    reserved = re.match(r"\d+", environment.get("SLURM_STEP_RESV_PORTS", ""))
    port = int(reserved[0]) if reserved else _port(_number(job), _number(step))
    name = environment.get("SLURMD_NODENAME", "")
    restarts = _number(environment.get("SLURM_RESTART_COUNT"))
    return ClusterDefaults(
        scheduler="Slurm",
        run_id=f"slurm-{job}.{step}" + f"-r{restarts}" * (restarts > 0),
        nodes=nodes,
        endpoint=f"{host}:{port}",
        serves=name == host if name else environment.get("SLURM_NODEID") == "0",
    )


def first_host(nodes: str) -> str:
    """Return the first host of a list as Slurm writes it: "n[003-005,7],gpu1" has "n003" first."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    return re.sub(r"\[([^\]\-,]*)[^\]]*\]", r"\1", first[0] if first else "").strip()


def _port(job: int, step: int) -> int:
    return _FIRST_PORT + (job + _STEPS * step) % _PORTS


def _number(text: str | None) -> int:
    return int(text) if text and text.isdecimal() else 0
