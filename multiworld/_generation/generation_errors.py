"""Errors of a generation that is over, and the test of whether an exception says anything about a world."""

from __future__ import annotations

import contextlib
import dis
import threading
from typing import TYPE_CHECKING, NoReturn

from multiworld._core.state_machine import Stage
from multiworld.errors import BrokenWorldException, WorldClosedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from multiworld._c10d.fault_classification import Fault
    from multiworld._generation.stage import StateMachine

__all__ = ["Refusal", "is_posting", "over_error", "posting", "raise_if_lost", "raised_by_torch"]

_NOT_DISTRIBUTED = (
    "torch.utils.",
    "torch._utils",
    "torch.hub",
    "torch.multiprocessing",
    "torch.distributed.rpc",
    "torch.futures",
)
"""Parts of torch whose timeouts and broken pipes are not a world's: loaders, downloads, processes, RPC."""

_STORES = ("DistStoreError", "DistNetworkError")
"""Errors of stores, of which a program may have its own."""

_RAISE = dis.opmap["RAISE_VARARGS"]

_here = threading.local()


class Refusal:
    """Stands where a process group stood: whatever is asked of it raises."""

    def __init__(self, error: Callable[[], Exception]) -> None:
        self._error = error

    def __getattr__(self, name: str) -> NoReturn:
        raise self._error()


@contextlib.contextmanager
def posting() -> Iterator[None]:
    """For an event loop's thread: a transport error comes out as it is, and no verdict is waited for."""
    before = is_posting()
    _here.posting = True
    try:
        yield
    finally:
        _here.posting = before


def is_posting() -> bool:
    """Whether this thread is inside of `posting`."""
    found: bool = getattr(_here, "posting", False)
    return found


def over_error(machine: StateMachine) -> BrokenWorldException | WorldClosedError:
    """Return what an operation raises in a generation that is over, or was lost before it began."""
    world, number, stage, verdict = machine.world, machine.generation, machine.stage, machine.verdict
    if stage is Stage.INHERITED:
        return WorldClosedError(
            world,
            f"world {world!r} (generation {number}) belongs to the process that this one was forked from",
            rule="A world's connections are its own process's",
            next_step="Use it there, or join a world of another name here",
        )
    if machine.replaced is not None:
        gone_on = (
            f"was replaced by generation {machine.replaced}" if machine.replaced else "was left as planned"
        )
        return WorldClosedError(
            world,
            f"generation {number} of world {world!r} {gone_on}",
            rule="Groups, and blocks that were entered, belong to the generation in which they were made",
            next_step="Enter `with world:` again, and make its groups anew",
        )
    if verdict is not None and stage is not Stage.CLOSED:
        return BrokenWorldException(
            world, verdict.detail, generation=number, cause=verdict.cause.value, ranks=verdict.ranks
        )
    return WorldClosedError(
        world,
        f"world {world!r} (generation {number}) was closed by this process",
        rule="Operations need an active world",
        next_step="Join it again: that makes the next generation",
    )


def raise_if_lost(machine: StateMachine) -> None:
    """Raise if a member was lost while the generation was being made.

    Raises:
        BrokenWorldException: why.
    """
    if machine.stage in {Stage.LOST, Stage.DOOMED}:
        raise over_error(machine)


def raised_by_torch(exc: RuntimeError, classify: Callable[[BaseException], Fault | None]) -> bool:
    """Whether `exc` comes out of torch, and so may be about a world.

    Args:
        exc: what was raised inside ``with world:``.
        classify: `multiworld._c10d.fault_classification.classify`.
    """
    if type(exc).__module__.partition(".")[0] == "torch" and type(exc).__name__ not in _STORES:
        return True
    last = exc.__traceback__
    if last is None:
        return True
    while last.tb_next is not None:
        last = last.tb_next
    name = str(last.tb_frame.f_globals.get("__name__", ""))
    if name.partition(".")[0] in {"torch", "multiworld"}:
        return not name.startswith(_NOT_DISTRIBUTED)
    # A process group's C++ method that user code called itself has no frame. A `raise` is no such call.
    raised = last.tb_frame.f_code.co_code[last.tb_lasti] == _RAISE
    return type(exc) is RuntimeError and not raised and classify(exc) is not None
