"""Command line of ``m8d-run``: torch's own parser for torchrun's options, and the launcher's options."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.distributed.argparse_util import check_env, env
from torch.distributed.run import get_args_parser

from multiworld import __version__, settings
from multiworld._net.listen_address import host_and_port
from multiworld.errors import MultiworldError
from multiworld.run.errors import ArgumentsError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["TOLD_APART", "Options", "build_parser", "parse"]

_DESCRIPTION = """\
Start workers as torchrun does, and start a failed one again alone, in its place, while the others run on.
A command line of torchrun works when its first word is changed. `m8d-run status` asks the launchers that run
here; `m8d-run scale` and `m8d-run retire` start and retire workers of a running run; `m8d-run make-authority`
makes what the nodes of a secure run share.\
"""
_MAX_RESTARTS = (
    "How often a worker that failed is started again: each worker so many times, with --restart group all "
    "together. (default: 0, the first failure ends the run)"
)


_OLDER_PORT = 29500
"""Torch's default of --master-port up to 2.6 at least; it is None on 2.13."""


@dataclass(frozen=True)
class Options:
    """Options of the command line.

    Attributes:
        torch: torchrun's own options, as its parser returns them.
        restart: "worker" or "group".
        worlds: path of the worlds file; None: none.
        ui: whether to show the live view.
        web: "HOST:PORT" to serve the page at; None: it is not served.
        log_format: "text" or "json".
        verbose: whether a text log has every event.
        restart_backoff, restart_backoff_max: seconds; see `multiworld.run.workers.restarts`.
        on_node_loss: "continue" or "stop".
        node_hang_timeout: seconds without a sign of life after which a node counts as lost.
        grace: seconds between a signal to workers and SIGKILL; None: torch's shutdown timeout.
        drain: seconds that workers have to retire when the launcher gets SIGTERM; 0: they get it at once.
        secure: whether all connections have to be TLS.
        authority: path of the folder of the authority that signs for the run's processes; None: none is
            given.
        certificate_days: for which certificates are valid that the launcher makes.
        preload: modules that one process imports, and workers are forked of; (): each worker starts anew.
        given: names of those of torchrun's options that were given, of `TOLD_APART`.
    """

    torch: argparse.Namespace
    restart: str
    worlds: str | None
    ui: bool
    web: str | None
    log_format: str
    verbose: bool
    restart_backoff: float
    restart_backoff_max: float
    on_node_loss: str
    node_hang_timeout: float
    grace: float | None
    drain: float = 0.0
    secure: bool = False
    authority: str | None = None
    certificate_days: float = 2.0
    preload: tuple[str, ...] = ()
    given: frozenset[str] = frozenset()


TOLD_APART: dict[str, Any] = {
    "nproc_per_node": "1",
    "nnodes": "1:1",
    "rdzv_backend": "static",
    "rdzv_endpoint": "",
    "rdzv_id": "none",
    "node_rank": 0,
    "master_addr": "127.0.0.1",
    "local_addr": None,
}
"""Options whose absence means something else than torch's default, and that default."""


def build_parser() -> argparse.ArgumentParser:
    """Return torch's parser with the launcher's options, which PET_<NAME> sets too, all but --use-env."""
    parser = get_args_parser()
    if parser.get_default("master_port") == _OLDER_PORT:  # torchrun's own: a run that is alone takes any port
        parser.set_defaults(master_port=None)
    parser.prog = "m8d-run"
    parser.description = _DESCRIPTION
    own = parser.add_argument_group("fault domains")

    def add(name: str, **more: Any) -> None:
        names = dict.fromkeys([f"--{name}", f"--{name.replace('-', '_')}"])
        own.add_argument(*names, **{"action": env, "type": str, **more})

    add(
        "restart",
        default="worker",
        metavar="{worker,group}",
        help="What starts again when a worker fails: that worker alone, or all of them as under torchrun. "
        "--max-restarts counts for each worker, or for the group. (default: worker)",
    )
    add(
        "worlds",
        default=None,
        metavar="FILE.toml",
        help="Roles, and worlds between their workers; the script joins its worlds with "
        "multiworld.join_all(). The number of a role may be a range: m8d-run scale changes it.",
    )
    add("ui", action=check_env, type=None, help="Show the run live on the terminal (needs rich).")
    add(
        "web",
        default=None,
        nargs="?",
        const="127.0.0.1:0",
        metavar="HOST:PORT",
        help="Serve a page that shows the run, at an address that the log has (needs m8d[web]; default: a "
        "free port of this host alone). m8d-run web serves it for a run that was started without.",
    )
    add(
        "log-format",
        default="text",
        metavar="{text,json}",
        help="Of the launcher's own log on standard error. (default: text)",
    )
    add(
        "verbose",
        action=check_env,
        type=None,
        help="Log every event: worlds that are joined and become active, workers that end. Without it text "
        "has starts, failures, restarts, worlds that break and heal, and a summary; JSON always has "
        "everything.",
    )
    own.add_argument(
        "--version", action="version", version=f"m8d-run {__version__}", help="Print the version."
    )
    add(
        "restart-backoff",
        default=1.0,
        type=float,
        metavar="SECONDS",
        help="Before the second restart in a row of a worker that does not come up; doubled for each further "
        "one. (default: 1)",
    )
    add(
        "restart-backoff-max",
        default=30.0,
        type=float,
        metavar="SECONDS",
        help="No restart waits for longer. (default: 30)",
    )
    add(
        "on-node-loss",
        default="continue",
        metavar="{continue,stop}",
        help="When a node is lost and no other can take its place: carry on with the rest, or end the run. "
        "(default: continue)",
    )
    add(
        "node-hang-timeout",
        default=5.0,
        type=float,
        metavar="SECONDS",
        help="Without a sign of life for so long, another node is lost. (default: 5)",
    )
    add(
        "grace",
        default=None,
        type=float,
        metavar="SECONDS",
        help="Between the signal that asks workers to end and SIGKILL. (default: torchrun's shutdown "
        "timeout, 30)",
    )
    add(
        "drain",
        default=0.0,
        type=float,
        metavar="SECONDS",
        help="When the launcher gets SIGTERM, first retire this node's workers that the run can do without, "
        "for at most so long; then the others get the signal. (default: 0, all get it at once)",
    )
    add(
        "secure",
        action=check_env,
        type=None,
        help="Have all connections in TLS 1.3, of processes that one authority signed for; the launcher "
        "makes one for this run (needs m8d[secure]). Several nodes share one: --authority, or M8D_TLS_CERT, "
        "M8D_TLS_KEY and M8D_TLS_CA, which also make a run secure.",
    )
    add(
        "authority",
        default=None,
        metavar="DIR",
        help="As --secure, with the authority that m8d-run make-authority DIR made.",
    )
    add(
        "certificate-days",
        default=2.0,
        type=float,
        metavar="DAYS",
        help="Certificates that the launcher makes are valid for so long, and are renewed when half of it is "
        "over. (default: 2)",
    )
    add(
        "preload",
        default="",
        metavar="MODULE[,MODULE...]",
        help="Import these modules once, in a process that workers are then forked of: they start in "
        "milliseconds, also after a failure, and share the modules' memory. Modules must not start threads "
        "or ask CUDA for anything when they are imported; torch and transformers do not.",
    )
    own.add_argument(
        "--use-env",
        "--use_env",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="As torchrun: the script finds its local rank in LOCAL_RANK. --no-use-env: it gets "
        "--local-rank=N as well, as from torch.distributed.launch without --use-env.",
    )
    for action in parser._actions:  # noqa: SLF001  (argparse offers no way to ask for an option)
        if action.dest == "max_restarts":
            action.help = _MAX_RESTARTS
        if action.dest in TOLD_APART and settings.environment(f"PET_{action.dest.upper()}") is None:
            action.default = None  # parse() puts it back, and knows that it was not given
    return parser


def parse(argv: Sequence[str]) -> Options:
    """Read a command line.

    Raises:
        ArgumentsError: a value breaks a rule.
        SystemExit: argparse found a fault (2), or was asked for help (0).
    """
    args = build_parser().parse_args(list(argv))
    args.rdzv_id = args.rdzv_id or None  # of a variable that is not set: nodes with an id each never meet
    options = Options(
        torch=args,
        restart=_one_of("--restart", args.restart, "worker", "group"),
        worlds=args.worlds,
        ui=args.ui,
        web=_address(args.web),
        log_format=_one_of("--log-format", args.log_format, "text", "json"),
        verbose=args.verbose,
        restart_backoff=_seconds("--restart-backoff", args.restart_backoff),
        restart_backoff_max=_seconds("--restart-backoff-max", args.restart_backoff_max),
        on_node_loss=_one_of("--on-node-loss", args.on_node_loss, "continue", "stop"),
        node_hang_timeout=_seconds("--node-hang-timeout", args.node_hang_timeout, least=0.3),
        grace=None if args.grace is None else _seconds("--grace", args.grace),
        drain=_seconds("--drain", args.drain),
        secure=args.secure,
        authority=args.authority or None,
        certificate_days=_days("--certificate-days", args.certificate_days),
        preload=_modules(args.preload),
        given=frozenset(name for name in TOLD_APART if getattr(args, name) is not None),
    )
    for name in TOLD_APART.keys() - options.given:
        setattr(args, name, TOLD_APART[name])
    for name in (
        "restart",
        "worlds",
        "ui",
        "web",
        "log_format",
        "verbose",
        "restart_backoff",
        "restart_backoff_max",
    ):
        delattr(args, name)
    for name in ("on_node_loss", "node_hang_timeout", "grace", "drain"):
        delattr(args, name)
    for name in ("secure", "authority", "certificate_days", "preload"):
        delattr(args, name)
    if args.no_python and not args.use_env:
        raise ArgumentsError(
            "--no-python with --no-use-env",
            rule="A program that is not run by Python gets no --local-rank, as under "
            "torch.distributed.launch",
            next_step="Leave one of them out",
        )
    return options


def _address(web: str | None) -> str | None:
    try:
        if web is not None:
            host_and_port(web)
    except MultiworldError as exc:
        raise ArgumentsError(f"--web {web}", rule=exc.rule or "", next_step=exc.next_step or "") from exc
    return web


def _modules(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    for name in names:
        if not all(part.isidentifier() for part in name.split(".")):
            raise ArgumentsError(
                f"--preload {name}",
                rule="It has names of modules, separated by commas",
                next_step="As in --preload torch,transformers",
            )
    return names


def _one_of(name: str, value: str, *known: str) -> str:
    if value not in known:
        raise ArgumentsError(
            f"{name} {value}", rule=f"It is one of {', '.join(known)}", next_step="Give one of them"
        )
    return value


def _days(name: str, value: float) -> float:
    if not (math.isfinite(value) and 0.0001 <= value <= 365.0):
        raise ArgumentsError(
            f"{name} {value:g}", rule="It is a number of days, from 0.0001 to 365", next_step="Change it"
        )
    return value


def _seconds(name: str, value: float, least: float = 0.0) -> float:
    if not (math.isfinite(value) and value >= least):
        raise ArgumentsError(
            f"{name} {value:g}", rule=f"It is a number of seconds, at least {least:g}", next_step="Change it"
        )
    return value
