"""`launch`: one run from its options to its exit code, with torch's agent and all that it needs."""

from __future__ import annotations

import dataclasses
import inspect
import logging
import math
import socket
import sys
import time
import uuid
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from torch.distributed.elastic import events
from torch.distributed.elastic.agent.server.api import WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.events.handlers import get_logging_handler
from torch.distributed.elastic.metrics import initialize_metrics
from torch.distributed.elastic.metrics.api import MetricsConfig
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.api import RendezvousClosedError, RendezvousError

from multiworld import settings
from multiworld.errors import MultiworldError
from multiworld.run.clusters.filling import PREFIXES, fill
from multiworld.run.configuration import check_preload, configure
from multiworld.run.control.server import ControlServer
from multiworld.run.control.sockets import choose
from multiworld.run.descriptors import check_descriptors
from multiworld.run.elastic_feed import ElasticFeed
from multiworld.run.ends import End, child_failed
from multiworld.run.errors import WRONG, ArgumentsError, PlanError, RunError, used_up
from multiworld.run.events import EventBus, Note, RunEnded, RunStarted
from multiworld.run.nodes.handlers import etcd_handler, static_master, torch_handler
from multiworld.run.nodes.interface import NodesSpec
from multiworld.run.nodes.losses import ORPHANS_GRACE, Losses
from multiworld.run.nodes.multi import MultiNode
from multiworld.run.nodes.rendezvous import shut_down, stop_keeping_alive
from multiworld.run.nodes.secure_rendezvous import secure_handler
from multiworld.run.nodes.single import SingleNode
from multiworld.run.nodes.world_store import WorldStore
from multiworld.run.secure.opening import Secured, open_secure
from multiworld.run.secure.source import CertificateSource, choose_source
from multiworld.run.signals import Wake, numbers
from multiworld.run.view.log import EventLog
from multiworld.run.view.log_notes import take_notes
from multiworld.run.view.screen import NO_TERMINAL, open_screen
from multiworld.run.view.state import RunState
from multiworld.run.view.waiting import Waiting
from multiworld.run.web_page import WebPage, check_installed
from multiworld.run.workers.agent import AgentContext, WorkerAgent
from multiworld.run.workers.fork_client import ForkClient
from multiworld.run.workers.group_agent import GroupAgent
from multiworld.run.workers.logs import remove_empty
from multiworld.run.workers.reaper_client import ReaperClient
from multiworld.run.workers.restarts import Restarts
from multiworld.run.workers.scaler import Request
from multiworld.run.worldsfile.host_checks import check_backends, check_stores
from multiworld.run.worldsfile.load import load

if TYPE_CHECKING:
    from collections.abc import Callable
    from signal import Signals
    from typing import TextIO

    from torch.distributed.elastic.multiprocessing import LogsSpecs
    from torch.distributed.elastic.rendezvous import RendezvousHandler
    from torch.distributed.launcher.api import LaunchConfig

    from multiworld.run.nodes.interface import Nodes
    from multiworld.run.options import Options
    from multiworld.run.view.screen import Screen
    from multiworld.run.worldsfile.worlds_plan import WorldsPlan

__all__ = ["launch"]

_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
_HERE = "127.0.0.1"


@dataclass
class _Run:
    """Options, configuration and bus of one run; where its certificates come from."""

    options: Options
    config: LaunchConfig
    entrypoint: Callable[..., Any] | str
    arguments: list[str]
    plan: WorldsPlan | None
    bus: EventBus
    grace: float
    source: CertificateSource | None = None
    screen: Screen | None = None

    @property
    def logs_specs(self) -> LogsSpecs:
        """Log files of the workers."""
        if self.config.logs_specs is None:
            raise AssertionError("torch's configuration always has them")
        return self.config.logs_specs

    @property
    def most(self) -> int:
        """How many workers this node can have at most."""
        plan, config = self.plan, self.config
        return plan.world_size if plan is not None and config.max_nodes == 1 else config.nproc_per_node

    def note(self, level: int, text: str) -> None:
        """Publish a line of the run's log."""
        self.bus.publish(Note(time.time(), level, text))

    @property
    def name(self) -> str:
        """Name of the workers' program, for messages."""
        if not isinstance(self.entrypoint, str):
            return next(iter(self.arguments), self.entrypoint.__name__)
        if self.entrypoint == sys.executable:
            return next((arg for arg in self.arguments if not arg.startswith("-")), "")
        return self.entrypoint


def launch(options: Options, stream: TextIO) -> int:
    """Run the workers until they have ended; return the launcher's exit code.

    Args:
        options: of the command line; completed on the way.
        stream: of the log.

    Raises:
        RunError: the worlds file or an argument is wrong; nothing was started.
        MultiworldError: a variable ``M8D_*`` is wrong; nothing was started.
    """
    if options.drain and options.restart == "group":
        raise ArgumentsError(
            f"--drain {options.drain:g} with --restart group",
            rule="Workers retire one by one only under --restart worker",
            next_step="Leave one of them out",
        )
    plan = None
    if options.worlds is not None:
        plan = load(options.worlds)
        check_backends(plan)
    if options.web is not None:
        check_installed()
    places, planned = (None, None) if plan is None else (plan.places(), plan.ranks())
    state, bus = RunState(places=places, planned=planned), EventBus(signals=(SignalException,))
    bus.subscribe(state.apply)
    # JSON is for programs, and complete; text is for people, and short.
    as_json = options.log_format == "json"
    event_log = EventLog(stream, "json" if as_json else "text", verbose=as_json or options.verbose)
    with closing(event_log), ExitStack() as faces:
        faces.enter_context(event_log.with_handlers(_events_handler(options)))
        screen = open_screen(state) if options.ui else None
        if screen is not None and options.torch.tee == "0" and options.torch.redirects == "0":
            options.torch.tee = "3"  # workers' output is shown above the view
        cluster = fill(options, settings.environment_with(*PREFIXES), socket.getfqdn)
        config, entrypoint, arguments = configure(options, plan)
        faces.callback(remove_empty, None if options.torch.log_dir else config.logs_specs)
        check_preload(options, config, arguments)
        source = choose_source(
            secure=options.secure,
            authority=options.authority,
            files=bool(settings.load().tls_cert),
            nodes=config.max_nodes,
            run_id=config.run_id,
        )
        if plan is not None:
            _planned(options, config, plan)
            check_stores(plan)
        if screen is None:
            bus.subscribe(event_log)
        else:
            screen.start()
            faces.callback(screen.stop)
        faces.callback(take_notes(bus))
        if options.ui and screen is None:
            bus.publish(Note(time.time(), logging.WARNING, NO_TERMINAL))
        grace = getattr(config, "shutdown_timeout", None) if options.grace is None else options.grace
        run = _Run(
            options, config, entrypoint, arguments, plan, bus, float(30 if grace is None else grace), source,
            screen,
        )  # fmt: skip
        bus.publish(
            RunStarted(
                time.time(),
                config.run_id,
                options.restart,
                config.max_restarts,
                run.name,
                socket.gethostname(),
                secure=source is not None,
            )
        )
        if cluster:
            run.note(logging.INFO, cluster)
        try:
            end = _run_to_end(run, state)
        except BaseException as exc:
            bus.publish(RunEnded(time.time(), _code_of(exc), f"{type(exc).__name__}: {exc}"))
            raise
        with suppress(SignalException):  # the run has ended: a signal now changes nothing
            bus.publish(RunEnded(time.time(), end.code, end.reason))
        faces.close()  # the live view has ended before its terminal gets the report
        if end.report:
            event_log.say(end.report)
    return end.code


def _events_handler(options: Options) -> list[logging.Handler]:
    """Return torch's handler of events, which a logger has only from the first event on."""
    try:
        return [get_logging_handler(getattr(options.torch, "event_log_handler", "null"))]
    except KeyError:  # `configure` says so
        return []


def _code_of(error: BaseException) -> int:
    """Return the exit code with which `multiworld.run.main` ends for it."""
    return WRONG if isinstance(error, RunError) else 1


def _planned(options: Options, config: LaunchConfig, plan: WorldsPlan) -> None:
    if plan.changing and options.restart == "group":
        raise ArgumentsError(
            f"--restart group with role {plan.changing[0].name!r} of a range",
            rule="Workers come and go one by one only under --restart worker",
            next_step="Leave --restart out, or give the role one number of workers",
        )
    if config.max_nodes > 1 and plan.changing not in {(), plan.roles[-1:]}:
        raise ArgumentsError(
            f"role {plan.changing[0].name!r} of a range on several nodes",
            rule="There only the last role of the worlds file is one: nodes that come later have its ranks",
            next_step="Write it last in [roles], and give the others one number of workers",
        )
    if options.restart == "group" and config.max_nodes > 1:
        raise ArgumentsError(
            "--restart group with --worlds on several nodes",
            rule="Nodes agree on who has which role only under --restart worker",
            next_step="Leave --restart out",
        )


def _check_descriptors(run: _Run) -> None:
    """Raise `RunError` where there are too few to start the run; log it where its largest size needs more."""
    args, functions = run.options.torch, not isinstance(run.entrypoint, str)
    check_descriptors(run.config.nproc_per_node, args, functions=functions)
    if run.most == run.config.nproc_per_node:
        return
    try:
        check_descriptors(run.most, args, functions=functions)
    except RunError as error:
        run.note(logging.WARNING, f"it cannot be scaled up to its largest size: {error}")


def _run_to_end(run: _Run, state: RunState) -> End:
    """Run the agent; every expected end of a run becomes an exit code."""
    try:
        _check_descriptors(run)
        with ExitStack() as parts:
            return record(_run_agent)(run, state, parts) or End(1, "no reason was given")
    except ChildFailedError as failed:
        worlds = bool(state.snapshot()["worlds"])
        return child_failed(failed, run.config.max_restarts, run.options.restart, worlds=worlds)
    except SignalException as caught:
        return End(128 + int(caught.sigval), f"got {caught.sigval.name}")
    except KeyboardInterrupt:
        return End(130, "got SIGINT before any worker was started")
    except RendezvousClosedError:
        return _over(run.config)
    except RendezvousError as exc:
        why = f"{type(exc).__name__}: {exc}"
        return End(1, "the rendezvous failed", f"m8d-run: the rendezvous failed: {why}")
    except (ArgumentsError, PlanError):
        raise
    except MultiworldError as exc:
        return End(1, str(exc), f"m8d-run: {exc}")
    except (OSError, RuntimeError) as exc:
        if not used_up(exc):
            raise
        return End(
            1, str(exc), f"m8d-run: {exc}. The host has too little left: see ulimit -n, ulimit -u and df"
        )


def _over(config: LaunchConfig) -> End:
    """Return the end of a launcher that comes when its run is over for all nodes; torch's error is empty."""
    why = f"run {config.run_id!r} is over, and its id stays closed in the rendezvous's store"
    key = f"/v2/keys/torch/elastic/rendezvous/{config.run_id}"
    deleted = f", or delete {key} in etcd" if config.rdzv_backend == "etcd-v2" else ""
    return End(1, why, f"m8d-run: {why}. Give another --rdzv-id{deleted}")


def _run_agent(run: _Run, state: RunState, parts: ExitStack) -> End:
    config = run.config
    control_path = choose(config.run_id)
    secured = _secured(run, control_path, parts)
    # Before the rendezvous, which may wait long: the keys of a launcher that is killed meanwhile are removed.
    keys = "" if secured is None else secured.folder
    reaper = ReaperClient(_orphans_grace(run), time.monotonic, keys, _patience(run))
    parts.callback(reaper.close)
    forks = _forks(run, parts)
    # Likewise before it: a launcher that waits there answers probes, and m8d-run status.
    stores: list[Callable[[], str]] = []
    nodes: list[Nodes] = []
    commands: SimpleQueue[Request] = SimpleQueue()
    wake = Wake()
    parts.callback(wake.close)

    def command(
        said: dict[str, Any], answer: Callable[[dict[str, Any]], None], waits: Callable[[], bool]
    ) -> None:
        commands.put(Request(said, answer, waits))
        wake.rouse()

    control = ControlServer(
        control_path,
        run.plan,
        run.bus,
        state.snapshot,
        store=lambda: stores[0]() if stores else "",
        command=None if run.options.restart == "group" else command,
        others=lambda timeout: nodes[0].snapshots(timeout) if nodes else [],
    )
    control.start()
    faces = parts.enter_context(ExitStack())
    faces.callback(control.close)
    _show(run, Path(control.path), faces)
    handler, address, port = _rendezvous(run, secured, parts)
    parts.callback(stop_keeping_alive, handler)
    leave = parts.enter_context(ExitStack())
    # The rendezvous is left when no face answers any more.
    parts.callback(faces.close)
    shared = [field.name for field in dataclasses.fields(WorkerSpec) if hasattr(config, field.name)]
    asked: dict[str, Any] = {name: getattr(config, name) for name in shared}
    asked |= {
        "local_world_size": config.nproc_per_node,
        "rdzv_handler": handler,
        "entrypoint": run.entrypoint,
        "args": tuple(run.arguments),
        "master_addr": address,
        "master_port": port,
    }
    spec = WorkerSpec(**asked)
    environment = control.env()
    if settings.environment("M8D_RUN_ID") is None and (run_id := _run_id(config)):
        environment["M8D_RUN_ID"] = run_id
    if run.options.torch.log_dir and settings.environment("M8D_REPORTS") is None:
        environment["M8D_REPORTS"] = str(Path(run.options.torch.log_dir).absolute() / "reports")
    names = getattr(config, "signals_to_handle", None)
    if names is not None:
        # torch's agent reads it from its own environment, and so torchrun's workers have it too.
        environment["TORCHELASTIC_SIGNALS_TO_HANDLE"] = names
        settings.set_environment({"TORCHELASTIC_SIGNALS_TO_HANDLE": names})
    agent: WorkerAgent | GroupAgent
    if run.options.restart == "group":
        signals = numbers(names or _SIGNALS)
        agent = _group_agent(run, spec, reaper, environment, signals, stores, parts, secured)
    else:
        nodes.append(_nodes(run, spec, state, reaper))
        context = AgentContext(
            nodes=nodes[0],
            restarts=Restarts(
                config.max_restarts, run.options.restart_backoff, run.options.restart_backoff_max
            ),
            bus=run.bus,
            reaper=reaper,
            wake=wake,
            signals=numbers(names or _SIGNALS),
            grace=run.grace,
            drain=run.options.drain,
            plan=run.plan,
            environment=environment,
            credentials=_no_credentials if secured is None else secured.worker,
            commands=commands,
            tell_retiring=control.retire,
            forks=forks,
        )
        parts.callback(context.nodes.close)
        workers = agent = WorkerAgent(spec, run.logs_specs, context, **_torch_options(run))
        stores.append(lambda: "" if workers.assignment is None else workers.assignment.store)
    initialize_metrics(MetricsConfig(config.metrics_cfg))
    handler_name = getattr(config, "event_log_handler", "null")
    run.bus.subscribe(ElasticFeed(handler_name, socket.gethostname(), config.run_id))
    return _result_of(run, agent, partial(leave.callback, shut_down, handler))


def _run_id(config: LaunchConfig) -> str:
    """Return the id that worlds of this run have; "" where several nodes were given none."""
    given = settings.run_id({"TORCHELASTIC_RUN_ID": config.run_id})
    return given or (uuid.uuid4().hex if config.max_nodes == 1 else "")  # torch 2.4 makes none for one node


def _orphans_grace(run: _Run) -> float:
    """Return the seconds that workers have once their launcher is gone."""
    if run.config.max_nodes > 1 and run.options.restart == "worker":
        return ORPHANS_GRACE
    return run.grace


def _patience(run: _Run) -> float:
    """Return the seconds that this launcher may stand still: then other nodes may have its ranks."""
    if run.config.max_nodes > 1 and run.options.restart == "worker":
        return Losses(run.options.node_hang_timeout).connects
    return math.inf


def _rendezvous(
    run: _Run, secured: Secured | None, parts: ExitStack
) -> tuple[RendezvousHandler, str | None, int | None]:
    """Return the rendezvous, and where workers meet if it does not say so itself."""
    config = run.config
    parameters = RendezvousParameters(
        backend=config.rdzv_backend,
        endpoint=config.rdzv_endpoint,
        run_id=config.run_id,
        min_nodes=config.min_nodes,
        max_nodes=config.max_nodes,
        local_addr=config.local_addr,
        **config.rdzv_configs,
    )
    make: Callable[[RendezvousParameters], RendezvousHandler] = torch_handler
    if config.rdzv_backend.startswith("etcd"):
        make = partial(etcd_handler, note=run.note)
        # python-etcd reports each failed call as an error, while the rendezvous tries again.
        logging.getLogger("etcd").setLevel(logging.CRITICAL)
    address, port = static_master(parameters)
    if secured is None:
        return make(parameters), address, port
    return secure_handler(parameters, parts, make), None, None


def _secured(run: _Run, control: str, parts: ExitStack) -> Secured | None:
    """Make this launcher's credentials, where the run is secure."""
    if run.source is None:
        return None
    return open_secure(
        run.source,
        run.config.run_id,
        Path(control).parent,
        parts,
        run.note,
        days=run.options.certificate_days,
    )


def _forks(run: _Run, parts: ExitStack) -> ForkClient | None:
    """Start what workers are forked of, where --preload asks for it: it imports during the rendezvous."""
    if not run.options.preload or not isinstance(run.entrypoint, str):
        return None
    forks = ForkClient(run.entrypoint, run.options.preload, run.arguments[1:], run.note)
    parts.callback(forks.close)
    return forks


def _no_credentials(_rank: int, _role: str, _role_rank: int) -> dict[str, str]:
    return {}


def _show(run: _Run, control: Path, parts: ExitStack) -> None:
    """Start the faces of a run that ask its control socket: operations in the live view, the page."""
    if run.screen is not None:
        waiting = Waiting(control)
        run.screen.show_waiting(waiting)
        parts.callback(waiting.close)
        parts.callback(run.screen.show_waiting, None)
    if run.options.web is not None:
        parts.callback(WebPage(str(control), run.options.web, run.bus).close)


def _result_of(run: _Run, agent: WorkerAgent | GroupAgent, close: Callable[[], object]) -> End:
    """Run the agent.

    Args:
        run: of this launcher.
        agent: of its workers.
        close: has the rendezvous closed in the end, for all nodes and for good. It is not called where the
            run may go on without this node, which was sent a signal or failed alone: others may come.
    """
    handler_name = getattr(run.config, "event_log_handler", "null")
    try:
        result = agent.run()
    except SignalException:
        events.record(agent.get_event_failed(), handler_name)
        raise
    except Exception:
        if run.options.restart == "group":
            close()  # as torchrun does: the other nodes' workers are in one group with this one's
        events.record(agent.get_event_failed(), handler_name)
        raise
    if not getattr(agent, "alone", False):
        close()
    events.record(agent.get_event_succeeded(), handler_name)
    if result is None:  # the rendezvous was complete without this node
        return End(0, "this node was not needed")
    if result.state == WorkerState.SUCCEEDED:
        return End(0, "all workers ended with 0")
    if result.failures:
        raise ChildFailedError(name=run.name, failures=result.failures)
    reason = getattr(agent, "reason", "") or "torch's agent gave up"
    return End(1, reason, f"m8d-run: {reason}")


def _nodes(run: _Run, spec: WorkerSpec, state: RunState, reaper: ReaperClient) -> Nodes:
    config, options = run.config, run.options
    if config.max_nodes == 1:
        if run.plan is None:
            return SingleNode(config.nproc_per_node, run.bus, serve=None)
        starting = run.plan.starting(config.nproc_per_node)
        return SingleNode(run.plan.world_size, run.bus, serve=_HERE, starting=starting)
    asked = NodesSpec(
        run_id=config.run_id,
        endpoint=config.rdzv_endpoint,
        local_addr=config.local_addr,
        min_nodes=config.min_nodes,
        max_nodes=config.max_nodes,
        capacity=config.nproc_per_node,
        role=config.role,
        on_loss=options.on_node_loss,
        hang_timeout=options.node_hang_timeout,
    )
    snapshot = partial(state.snapshot, after=0)
    return MultiNode(asked, spec.rdzv_handler, run.bus, run.plan, snapshot, reaper)


def _group_agent(
    run: _Run,
    spec: WorkerSpec,
    reaper: ReaperClient,
    environment: dict[str, str],
    signals: tuple[Signals, ...],
    stores: list[Callable[[], str]],
    parts: ExitStack,
    secured: Secured | None,
) -> GroupAgent:
    if run.plan is not None:
        store = WorldStore(_HERE)
        parts.callback(store.close)
        stores.append(lambda: store.address)
    return GroupAgent(
        spec,
        run.logs_specs,
        bus=run.bus,
        reaper=reaper,
        environment=environment,
        signals=signals,
        grace=run.grace,
        plan=run.plan,
        credentials=_no_credentials if secured is None else secured.worker,
        **_torch_options(run),
    )


def _torch_options(run: _Run) -> dict[str, Any]:
    """Return the options that this version of torch's agent takes."""
    asked = {
        "start_method": run.config.start_method,
        "log_line_prefix_template": run.config.log_line_prefix_template,
        "shutdown_timeout": run.grace,
    }
    takes = inspect.signature(LocalElasticAgent.__init__).parameters
    return {name: value for name, value in asked.items() if name in takes}
