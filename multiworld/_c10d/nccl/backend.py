"""NCCL backends: devices, abort and release. Also used for any backend other than gloo.

Facts of torch 2.4 to 2.15 that this relies on:

- ``abort`` is a method of the backend from 2.6 on and ``_shutdown`` before. It may hang for as long as NCCL
  does, so it is called on a daemon thread per backend, for which the abort never waits.
- A process group bound to a device connects eagerly, so that a member that cannot connect fails the join and
  not the first operation; connecting blocks in C++, so it runs on a thread that the join can leave behind.
- Whether communicators are non-blocking is not asked for by options: before 2.6 torch takes a non-blocking
  communicator for a failed one unless TORCH_NCCL_USE_COMM_NONBLOCKING says so too. A user's setting holds.
- After an error while a send, recv, batch_isend_irecv, gather, scatter or all_to_all is enqueued, an
  unpatched torch leaves the calling thread's NCCL group open, and the next collective of a healthy world on
  that thread does nothing. `close_thread_group` closes it. An error in one of `SINGLE` ends the process: they
  are run one by one.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import threading
import weakref
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.distributed_c10d as c10d

from multiworld._c10d.nccl import loaded
from multiworld._c10d.nccl.inflight import TIMEOUT_GRACE, Canary
from multiworld._c10d.routing.state import owner_of
from multiworld.errors import BackendError

if TYPE_CHECKING:
    from collections.abc import Callable

    from multiworld._c10d.group_spec import GroupSpec
    from multiworld._c10d.nccl.inflight import Traffic

__all__ = [
    "SINGLE", "abandoned", "aborter", "backends_of", "bound_device", "cancellable", "close_thread_group",
    "connect", "error_of", "has_nccl", "is_nccl", "is_older", "keep_for_unfinished", "needed_by_works",
    "one_by_one", "timeout_of", "wake", "works_need",
]  # fmt: skip

SINGLE = {
    "allreduce_coalesced": "allreduce",
    "allgather_into_tensor_coalesced": "_allgather_base",
    "reduce_scatter_tensor_coalesced": "_reduce_scatter_base",
    # torch 2.13 and newer
    "all_gather_single_coalesced": "all_gather_single",
    "reduce_scatter_single_coalesced": "reduce_scatter_single",
}
"""Methods of ProcessGroup that coalesce operations so that a failure ends an unpatched process; of which
ones."""

_TURN = 0.02
"""Seconds between two checks whether the join was cancelled."""

_DEEPEST = 8
"""Bound on nested open NCCL groups."""


# Backends that NCCL could not abort, never destroyed: their destructors would abort a second time, with the
# GIL held.
_given_up: list[Any] = []

abandoned: set[int] = set()
"""Ranks of this process in groups whose connection it gave up, and which NCCL may still connect."""

# Backends that unfinished functional operations may need, by the thread that began these.
_unfinished: dict[int, list[Any]] = {}


def is_nccl(backend: str) -> bool:
    """Whether a backend's name, or one of ``"cpu:gloo,cuda:nccl"``, is torch's NCCL in one of its forms."""
    return any(part.rpartition(":")[2].strip().lower().startswith("nccl") for part in backend.split(","))


def check_gpu(world: str, backend: str, device: torch.device | None) -> None:
    """Check that NCCL has what it needs in this process.

    Raises:
        BackendError: there is no GPU, or `device` is no GPU of this host.
    """
    have = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if have == 0:
        why = "this torch sees no CUDA device"
    elif device is not None and device.type != "cuda" and "gloo" not in backend.lower():
        why = f"device={str(device)!r} is no CUDA device"
    elif device is not None and device.type == "cuda" and device.index is not None and device.index >= have:
        why = f"device={str(device)!r}, and there are {have}"
    else:
        return
    raise BackendError(
        world,
        f"backend={backend!r}: {why}",
        rule="Every member of an NCCL world has a CUDA device of its own",
        next_step='Check nvidia-smi and CUDA_VISIBLE_DEVICES, give device="cuda:0", or use backend="gloo"',
    )


def bound_device(spec: GroupSpec) -> torch.device:
    """Return the GPU to which the group is bound, which connects it eagerly; by default the current one."""
    device = spec.device  # the CPU's, where a world has gloo as well
    if device is not None and device.type == "cuda" and device.index is not None:
        return device
    return torch.device("cuda", torch.cuda.current_device() if spec.gpu is None else spec.gpu)


def backends_of(pg: Any, *, gloo: bool = False) -> list[Any]:
    """Return the backends of a process group, each once; without gloo's, if they are not asked for."""
    found: list[Any] = []
    for device in getattr(pg, "_device_types", None) or ():
        with contextlib.suppress(RuntimeError):  # a device type for which none is registered
            backend = pg._get_backend(device)
            inner = getattr(backend, "wrapped_pg", backend)
            other = getattr(c10d, "ProcessGroupGloo", None)
            wanted = gloo or other is None or not isinstance(inner, other)
            if wanted and not any(inner is each for each in found):
                found.append(inner)
    return found


def aborter(backend: Any, *, tells: bool = False) -> Callable[[], Callable[[], bool] | None] | None:
    """Return the function that aborts a backend's operations, or raises if it cannot; None without one.

    It returns what tells whether NCCL's abort goes on though torch's has returned; None: it does not.

    Args:
        backend: any.
        tells: whether it can tell: of a patched build.
    """
    goes_on: Callable[[], bool] | None = getattr(backend, "_is_initialized", None) if tells else None
    for name in ("abort", "_shutdown"):
        method: Callable[[], None] | None = getattr(backend, name, None)
        if method is not None:
            return functools.partial(_abort, backend, method, goes_on)
    return None


def _abort(
    backend: Any, method: Callable[[], None], goes_on: Callable[[], bool] | None
) -> Callable[[], bool] | None:
    try:
        method()
    except Exception:
        if is_nccl(backend.name()):
            _given_up.append(backend)
        if goes_on is None:
            raise
        # Where the process could have no more threads, torch's watchdog tries again.
    return goes_on


def has_nccl(group: Any) -> bool:
    """Whether a process group has an NCCL backend; anything else has none."""
    return isinstance(group, c10d.ProcessGroup) and any(
        type(backend).__name__.startswith("ProcessGroupNCCL") for backend in backends_of(group)
    )


def is_older(group: Any, device: Any) -> bool:
    """Whether a process group's backend for `device` is torch's older NCCL."""
    return type(_backend(group, device)).__name__ == "ProcessGroupNCCL"


def _backend(group: Any, device: Any) -> Any:
    try:
        backend = group._get_backend(device)
    except RuntimeError:  # it has none for that device
        return None
    return getattr(backend, "wrapped_pg", backend)


def error_of(group: Any, device: Any) -> str | None:
    """Return the error of a process group's backend for `device`; None without one, or where unknown."""
    ask = None if group is None else getattr(_backend(group, device), "get_error", None)
    error = None if ask is None else ask()
    if error is None or int(error) == 0:
        return None
    return f"NCCL operation failed: the process group reports {error}"


def timeout_of(group: Any, traffic: Traffic) -> float | None:
    """Return the seconds that a group's operations may take; None where that is the world's timeout."""
    options = getattr(_backend(group, traffic.device), "options", None)
    given = getattr(options, "_timeout", None)
    seconds = traffic.timeout if given is None else given.total_seconds()
    return None if seconds == traffic.timeout else seconds + TIMEOUT_GRACE


def close_thread_group(group: Any, device: Any) -> None:
    """Close the NCCL groups that a failed call has left open in this thread; queued operations do not run.

    NCCL refuses to close what is not open, which ends this. Torch had not counted the group as open, so it is
    NCCL that is asked: torch's own end would count it as closed.
    """
    end = getattr(_backend(group, device), "_group_end", None)
    if end is None:
        return
    direct = loaded.group_end()
    with contextlib.suppress(RuntimeError):
        for _ in range(_DEEPEST):
            if direct is None:
                end()
            elif direct():
                return


def one_by_one(name: str, single: Callable[..., Any], *args: Any) -> Any:
    """Run the operations that `name` (of `SINGLE`) would coalesce one by one; return the last work.

    They run in order, so all have ended when the last one has.
    """
    options = [each for each in args if not isinstance(each, list)]
    if name == "allreduce_coalesced":
        calls = [([tensor],) for tensor in args[0]]
        options = [_allreduce_options(each) for each in options]
    else:
        calls = list(zip(*args[:2], strict=True))
    works = [single(*call, *options) for call in calls]
    return works[-1] if works else None


def _allreduce_options(coalesced: Any) -> Any:
    plain = c10d.AllreduceOptions()
    for name in ("reduceOp", "timeout", "asyncOp"):
        if hasattr(coalesced, name) and hasattr(plain, name):
            setattr(plain, name, getattr(coalesced, name))
    return plain


def needed_by_works(group: Any, device: Any) -> Any:
    """Return the backend of a group that has to live as long as its works do; None where it has not.

    A kept exception keeps the frames that it passed, and the works in them.
    """
    backend = _backend(group, device)
    return backend if works_need(backend) else None


def works_need(backend: Any) -> bool:
    """Whether a backend has to live as long as its works do.

    A work of nccl2 has a plain pointer to its backend: in 2.14.1 its destructor gives its events back there,
    and up to 2.15.0 at least ``wait`` of a failed one looks there.
    """
    name = type(backend).__name__
    return name.startswith("ProcessGroupNCCL") and name != "ProcessGroupNCCL"


def keep_for_unfinished(backends: Callable[[], list[Any]]) -> None:
    """Keep the backends of this thread's functional operations until those were waited for.

    Torch keeps their works, for each thread by itself, and drops them when they are waited for, or never.

    Args:
        backends: those that this thread may have used since it was asked last.
    """
    count = getattr(torch._C._distributed_c10d, "_get_work_registry_size", None)
    if count is None:
        return
    if not count():
        _unfinished.pop(threading.get_ident(), None)
        return
    kept = _unfinished.setdefault(threading.get_ident(), [])
    for backend in backends():
        if works_need(backend) and not any(backend is each for each in kept):
            kept.append(backend)


def wake() -> None:
    """Initialize torch's CUDA.

    A group that is bound to a device connects while it is made, in C++. Nothing on that way sets up torch's
    allocator, as the first tensor on a GPU would, and `nccl2` wants memory of it then (pytorch #191950: an
    internal assert).
    """
    torch.cuda.init()  # type: ignore[no-untyped-call]


def connect(group: Any, traffic: Traffic) -> None:
    """Run an operation with every member: one that cannot take part fails the join.

    Being connected eagerly is not enough: torch may leave the communicator to finish in the background.

    Raises:
        RuntimeError: it failed; as torch has it.
    """
    device = traffic.device
    try:
        with torch.cuda.device(device):
            work = group.allreduce([torch.ones(1, device=device)])
            traffic.finish(work)
    except BaseException:
        _end(group)
        raise
    known = weakref.ref(group)
    traffic.connected(Canary(work, lambda: error_of(known(), device), lambda: _owned(known())))


def _owned(group: Any) -> bool:
    """Whether a world has the group still: destroying one may abort it, which is no fault of the world."""
    return group is not None and owner_of(group) is not None


def _end(group: Any) -> None:
    """Abort an unused group in this thread, which may hang for as long as NCCL does."""
    for backend in backends_of(group):
        end = aborter(backend)
        if end is not None:
            with contextlib.suppress(Exception):  # it is dead in any case
                end()


def cancellable(make: Callable[[], Any], check: Callable[[], None], rank: int = 0) -> Any:
    """Run `make`, which may block in C++, in this context but on a thread that can be abandoned.

    Args:
        make: makes a process group.
        check: called meanwhile; raises to give up.
        rank: of this member, in the thread's name; see `multiworld.background_threads`.

    Raises:
        BaseException: what `make` or `check` raised.
    """
    box: list[Any] = []
    failed: list[BaseException] = []
    given_up = threading.Event()
    done = threading.Event()
    context = contextvars.copy_context()

    def work() -> None:
        try:
            made = context.run(make)
            box.append(made)
            if given_up.is_set():
                _end(made[0] if isinstance(made, tuple) else made)
                box.clear()
        except BaseException as error:  # raised where it is waited for
            failed.append(error)
            if given_up.is_set():
                failed.clear()
        finally:
            done.set()

    threading.Thread(target=work, name=f"m8d-nccl-connect-{rank}", daemon=True).start()
    while not done.wait(_TURN):
        try:
            check()
        except BaseException:  # noqa: PERF203  (fifty times a second)
            given_up.set()
            failed.clear()
            abandoned.add(rank)
            raise
    if failed:
        # Kept here it would keep its frames, and they what was made, until the next GC cycle.
        raise failed.pop()
    return box.pop()
