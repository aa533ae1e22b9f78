"""Rendezvous while workers run: torch's handler, whose calls may take minutes, on a thread of its own."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousGracefulExitError,
)

from multiworld._net.blocking import BlockingCall
from multiworld.logs.source import logger
from multiworld.run.nodes.handlers import later_rendezvous

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo

    from multiworld.run.nodes.rendezvous_store import RendezvousStore
    from multiworld.run.nodes.slots import Membership

__all__ = ["Agreed", "BackgroundRendezvous", "shut_down", "stop_keeping_alive"]

_log = logger(__name__)

_LOOK = 1.0  # seconds; torch's handlers ask their store no oftener either
_FIRST_AGAIN, _LAST_AGAIN = 0.5, 10.0  # seconds before a rendezvous that failed is repeated


_CUTS = 3
"""Failed calls in a row after which a store counts as gone; a single one may have been cut short."""


@dataclass(frozen=True)
class Agreed:
    """A rendezvous, and the membership that its nodes agreed on.

    Attributes:
        store: of its round.
        number, membership: the newest in the store.
        master: host and port of torch's store for workers.
    """

    store: RendezvousStore
    number: int
    membership: Membership
    master: tuple[str, int] | None


def shut_down(handler: RendezvousHandler, seconds: float = 5.0) -> bool:
    """Close the rendezvous for all nodes, if its store allows it; never raises.

    Args:
        handler: of the rendezvous. Its ``shutdown`` may wait for ever where the store's host does not answer.
        seconds: to wait for it at most.

    Returns:
        Whether the handler confirmed it in time.
    """
    try:
        call = BlockingCall(handler.shutdown, name="m8d-nodes-shutdown")
        return call.wait(seconds) and bool(call.result())
    except Exception as error:  # noqa: BLE001  (torch's, etcd's: the run is over all the same)
        _log.debug("the rendezvous was not shut down: %s: %s", type(error).__name__, error)
        return False


def stop_keeping_alive(handler: RendezvousHandler, seconds: float = 5.0) -> None:
    """End torch's thread that keeps this node in the rendezvous; never raises.

    It is in a call of its store now and then. Where that returned after the interpreter had ended, the
    process would end by SIGABRT (see `multiworld.background_threads`).

    Args:
        handler: of the rendezvous.
        seconds: to wait for it at most.
    """
    stop = getattr(handler, "_stop_heartbeats", None)  # of torch's dynamic rendezvous
    if stop is not None:
        with contextlib.suppress(Exception):  # the run is over all the same
            BlockingCall(stop, name="m8d-nodes-keep-alive").wait(seconds)


def _dropped(handler: RendezvousHandler) -> bool:
    """Whether torch's dynamic rendezvous has dropped this node, as its heartbeats were late.

    torch does not take it back, and a node that comes does not find it: it waits, or begins a second run.
    """
    node, holder = getattr(handler, "_this_node", None), getattr(handler, "_state_holder", None)
    return node is not None and holder is not None and node not in holder.state.participants


class BackgroundRendezvous:
    """Checks for waiting nodes, and repeats the rendezvous when there are some, or it dropped this node.

    Args:
        handler: of the run; after `start` only this calls ``next_rendezvous`` and ``num_nodes_waiting``.
        agree: agrees with the other nodes after a rendezvous.
        tell: gets each `Agreed`, and "closed" or "gone" when no further rendezvous is possible.
        returns: whether the rendezvous store may answer again after an error.
    """

    def __init__(
        self,
        handler: RendezvousHandler,
        agree: Callable[[RendezvousInfo], Agreed],
        tell: Callable[[Agreed | str], None],
        *,
        returns: bool,
    ) -> None:
        self._handler, self._agree, self._tell, self._returns = handler, agree, tell, returns
        self._lock = threading.Condition()
        self._look = self._again = self._stopped = False

    def start(self) -> None:
        """Start the thread."""
        threading.Thread(target=self._run, name="m8d-nodes-rendezvous", daemon=True).start()

    def stop(self) -> None:
        """End after the call that is under way, without waiting for it."""
        with self._lock:
            self._stopped = True
            self._lock.notify_all()

    def give_up(self) -> None:
        """Stop for good, the store being gone; the handler is shut down, so that its heartbeats end."""
        self.stop()
        left = threading.Thread(target=shut_down, args=(self._handler,), name="m8d-nodes-gone", daemon=True)
        with contextlib.suppress(RuntimeError):  # no thread is left: the heartbeats go on, and reach nothing
            left.start()

    def look(self) -> None:
        """Check soon for waiting nodes. Never blocks."""
        with self._lock:
            self._look = True
            self._lock.notify_all()

    def again(self) -> None:
        """Request a rendezvous, which is repeated until one succeeds. Never blocks."""
        with self._lock:
            self._again = True
            self._lock.notify_all()

    def _run(self) -> None:
        looked, pause, failures, cuts = 0.0, _FIRST_AGAIN, 0, 0
        while True:
            with self._lock:
                while not (self._stopped or self._again or self._look):
                    self._lock.wait(5.0)
                if self._stopped:
                    return
                again, self._look = self._again, False
            try:
                if not again:
                    self._rest(max(0.0, looked + _LOOK - time.monotonic()))
                    looked = time.monotonic()
                    again = self._handler.num_nodes_waiting() > 0 or _dropped(self._handler)
                if again:
                    with self._lock:
                        self._again = False
                    self._tell(self._agree(later_rendezvous(self._handler)))

                pause, failures, cuts = _FIRST_AGAIN, 0, 0
            except (RendezvousClosedError, RendezvousGracefulExitError):
                self._tell("closed")
                return
            except Exception as error:  # noqa: BLE001  (torch's, etcd's, ours: all are repeated)
                if self._stopped:
                    return
                failures += 1
                cuts = cuts + 1 if isinstance(error, RendezvousConnectionError) else 0
                if cuts == _CUTS and not self._returns:
                    self._tell("gone")
                    self.give_up()
                    return
                level = logging.WARNING if again and failures == 1 else logging.DEBUG
                _log.log(
                    level, "no rendezvous (%s: %s); once more in %.1f s", type(error).__name__, error, pause
                )
                if again:
                    self.again()
                self._rest(pause)
                pause = min(_LAST_AGAIN, 2 * pause)

    def _rest(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        with self._lock:
            while not self._stopped and (left := end - time.monotonic()) > 0:
                self._lock.wait(left)
