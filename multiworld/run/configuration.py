"""`configure`: completes torchrun's options, and makes its configuration of them."""

from __future__ import annotations

import uuid
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.distributed.elastic.events.handlers import get_logging_handler
from torch.distributed.run import config_from_args, parse_min_max_nnodes

from multiworld.run.errors import ArgumentsError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from torch.distributed.launcher.api import LaunchConfig

    from multiworld.run.options import Options
    from multiworld.run.worldsfile.worlds_plan import WorldsPlan

__all__ = ["MOST", "check_preload", "configure"]

MOST = 100_000
"""Nodes, and workers of a node: as many workers as a worlds file may have."""

_LONGEST = 86_400
"""Seconds of --monitor-interval."""


def configure(
    options: Options, plan: WorldsPlan | None = None
) -> tuple[LaunchConfig, Callable[..., Any] | str, list[str]]:
    """Return torchrun's configuration, and the program (or function) with its arguments.

    Args:
        options: of the command line; ``options.torch`` is completed as torchrun does it.
        plan: of the worlds file; has the number of workers where --nproc-per-node is not given.

    Raises:
        ArgumentsError: torchrun would refuse the options, or the only node has another number of workers than
            the worlds file.
    """
    args = options.torch
    try:
        least, most = parse_min_max_nnodes(args.nnodes)
    except (ValueError, RuntimeError) as exc:
        raise ArgumentsError(
            f"--nnodes {args.nnodes}", rule="It is a number, or MIN:MAX", next_step="As in --nnodes 2:3"
        ) from exc
    if plan is not None and "nproc_per_node" not in options.given:
        args.nproc_per_node = str(_share(plan, least))
    if not options.given & {"rdzv_backend", "node_rank"} and args.rdzv_endpoint and most > 1:
        # torchrun's default is "static", where an endpoint without a node rank makes every node the first
        # one.
        args.rdzv_backend = "c10d"
    _complete_rendezvous(args, most)
    try:
        config, entrypoint, arguments = config_from_args(args)
    except (ValueError, RuntimeError, AssertionError, TypeError, OSError) as exc:
        raise ArgumentsError(
            str(exc) or type(exc).__name__,
            rule="torchrun does not take it either",
            next_step="See m8d-run --help",
        ) from exc
    if not entrypoint:
        raise ArgumentsError('--no-python ""', rule="A program follows it", next_step="Name the program")
    _check_sizes(config)
    handler = getattr(config, "event_log_handler", "null")
    try:
        get_logging_handler(handler)
    except KeyError:
        raise ArgumentsError(
            f"--event-log-handler {handler}",
            rule="torch.distributed.elastic.events has a handler of that name",
            next_step="Take null or console, or register it before",
        ) from None
    if plan is not None:
        _fits(plan, config.nproc_per_node, most)
    return config, entrypoint, arguments


def _check_sizes(config: LaunchConfig) -> None:
    """Refuse numbers with which torch's agent would fail with a bare assertion, or fill the memory."""
    asked = {
        "--nproc-per-node": (config.nproc_per_node, MOST),
        "--nnodes": (config.max_nodes, MOST),
        "--monitor-interval": (config.monitor_interval, _LONGEST),
    }
    for name, (value, most) in asked.items():
        if not 0 < value <= most:
            raise ArgumentsError(
                f"{name} {value}", rule=f"It is above 0, and at most {most}", next_step="Change it"
            )


def check_preload(options: Options, config: LaunchConfig, arguments: list[str]) -> None:
    """Check that workers can be forked of a process with modules imported, where --preload asks for it.

    Raises:
        ArgumentsError: another option makes workers that cannot.
    """
    if not options.preload:
        return
    args = options.torch
    others = {
        "--restart group": options.restart == "group",
        "--no-python": args.no_python,
        "--run-path": args.run_path,
        "--numa-binding": getattr(config, "numa_options", None) is not None,
    }
    if not any(others.values()) and arguments[1] != "-m":
        script = arguments[1]
        others[f"{script}, which is no file of Python,"] = Path(script).is_dir() or _is_archive(script)
    for other, given in others.items():
        if given:
            raise ArgumentsError(
                f"{other} with --preload {','.join(options.preload)}",
                rule="Only a script of Python, or -m MODULE, under --restart worker is forked",
                next_step="Leave one of them out",
            )


def _is_archive(script: str) -> bool:
    return Path(script).is_file() and zipfile.is_zipfile(script)


def _complete_rendezvous(args: argparse.Namespace, most: int) -> None:
    """Complete the rendezvous options as torchrun does, with one default of --master-port."""
    if args.rdzv_backend == "standalone":
        args.standalone = True
    alone = (
        args.rdzv_backend == "static" and not args.rdzv_endpoint and args.master_port is None and most == 1
    )
    if args.standalone or alone:
        args.rdzv_backend = "c10d"
        args.rdzv_endpoint = "localhost:0"
        args.rdzv_id = str(uuid.uuid4())
    if args.master_port is None:
        args.master_port = 29500


def _share(plan: WorldsPlan, nodes: int) -> int:
    """Return the workers per node with which `nodes` nodes have room for all workers that a run needs."""
    return -(-plan.least_workers // max(1, nodes))


def _fits(plan: WorldsPlan, share: int, most: int) -> None:
    """Check the number of workers of a single node; `MultiNode.settle` checks that of several."""
    if most == 1 and not plan.least_workers <= share <= plan.world_size:
        sizes = f"{plan.least_workers} to " * bool(plan.changing) + f"{plan.world_size}"
        raise ArgumentsError(
            f"--nproc-per-node {share} on one node, for {sizes} workers of {plan.path}",
            rule="One node has all workers of the worlds file",
            next_step=f"Leave --nproc-per-node out, or give {sizes}"
            + ", or change --nnodes" * (share < plan.least_workers),
        )
