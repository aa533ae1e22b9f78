"""`fill`: sets options that were not given to what the scheduler says of the nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.distributed.run import parse_min_max_nnodes

from multiworld.run.clusters.defaults import Given, read

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from multiworld.run.options import Options

__all__ = ["PREFIXES", "fill"]

PREFIXES = ("SLURM", "LWS_", "JOB_COMPLETION_INDEX", "POD_IP")
"""How the variables begin that are read."""

_STATIC = {"node_rank", "master_addr"}
"""Options of torchrun's static rendezvous, which has the nodes' numbers already."""


def fill(options: Options, environment: Mapping[str, str], full_name: Callable[[], str]) -> str:
    """Set options of a run of several nodes that were not given; return them for the log, "" if none.

    --standalone, and the options of a static rendezvous, leave all as it is. An endpoint is set for the c10d
    rendezvous alone.

    Args:
        options: of the command line; ``options.torch`` is changed.
        environment: the process's variables, at least those that begin with `PREFIXES`.
        full_name: returns the full name of this host.

    Raises:
        ArgumentsError: the scheduler started launchers in a way in which they cannot form a run.
    """
    args, given = options.torch, options.given
    backend = args.rdzv_backend if "rdzv_backend" in given else "c10d"
    if args.standalone or backend in {"standalone", "static"} or given & _STATIC:
        return ""
    try:
        most = parse_min_max_nnodes(args.nnodes)[1] if "nnodes" in given else None
    except (ValueError, RuntimeError):
        return ""  # `configure` says what is wrong
    serves_elsewhere = "rdzv_endpoint" in given or backend != "c10d"
    found = read(environment, Given(most, serves_elsewhere), full_name)
    if found is None:
        return ""
    values = {"nnodes": found.nodes, "rdzv_id": found.run_id, "local_addr": found.address}
    if not serves_elsewhere:
        values["rdzv_endpoint"] = found.endpoint
        if found.endpoint and "is_host" not in args.rdzv_conf:
            # torch would compare host names, which differ from those of the scheduler in some clusters.
            is_host = f"is_host={int(bool(found.serves))}"
            args.rdzv_conf = f"{args.rdzv_conf},{is_host}" if args.rdzv_conf else is_host
    set_now = {name: str(value) for name, value in values.items() if value and name not in given}
    for name, value in set_now.items():
        setattr(args, name, value)
    if not set_now:
        return ""
    said = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in set_now.items())
    return f"{found.scheduler} gives {said}"
