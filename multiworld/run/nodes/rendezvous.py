"""The calls of torch's rendezvous handler that go on while workers run: one thread, for each may take minutes."""

from __future__ import annotations

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

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo

    from multiworld.run.nodes.rendezvous_store import Board
    from multiworld.run.nodes.slots import Table

__all__ = ["Lane", "Met", "shut_down"]

_log = logging.getLogger(__name__)

_LOOK = 1.0  # seconds; torch's handlers look no oftener either
_FIRST_AGAIN, _LAST_AGAIN = 0.5, 10.0  # seconds before a rendezvous that failed is repeated


_CUTS = (
    3  # calls in a row that a store has to fail before it counts as gone; one of them may have been cut short
)


@dataclass(frozen=True)
class Met:
    """A rendezvous and the agreement after it.

    Attributes:
        board: of its round.
        number, table: the newest on the board.
        master: host and port of torch's store for workers.
    """

    board: Board
    number: int
    table: Table
    master: tuple[str, int] | None


def shut_down(handler: RendezvousHandler, seconds: float = 5.0) -> bool:
    """Close the rendezvous for everybody, as far as its store lets this be done; never raises.

    Args:
        handler: whose ``shutdown`` is called. It may wait for ever where the store's host does not answer.
        seconds: to wait for it at most.

    Returns:
        Whether it said that it was done.
    """
    done: list[bool] = []

    def shut() -> None:
        try:
            done.append(bool(handler.shutdown()))
        except Exception as error:  # noqa: BLE001  (torch's, etcd's: the run is over all the same)
            _log.debug("the rendezvous was not shut down: %s: %s", type(error).__name__, error)

    thread = threading.Thread(target=shut, name="m8d-nodes-shutdown", daemon=True)
    thread.start()
    thread.join(seconds)
    return bool(done) and done[0]


class Lane:
    """Looks for nodes that wait, and repeats the rendezvous when there are some.

    Args:
        handler: of the run; after `start` nobody else calls ``next_rendezvous`` or ``num_nodes_waiting``.
        meet: agrees with the others after a rendezvous.
        tell: gets each `Met`, and "closed" or "gone" when there will be no rendezvous any more.
        returns: whether the rendezvous store may answer again after an error.
    """

    def __init__(
        self,
        handler: RendezvousHandler,
        meet: Callable[[RendezvousInfo], Met],
        tell: Callable[[Met | str], None],
        *,
        returns: bool,
    ) -> None:
        self._handler, self._meet, self._tell, self._returns = handler, meet, tell, returns
        self._lock = threading.Condition()
        self._look = self._again = self._stopped = False

    def start(self) -> None:
        """Begin."""
        threading.Thread(target=self._run, name="m8d-nodes-rendezvous", daemon=True).start()

    def stop(self) -> None:
        """End after the call that is under way, which nobody waits for."""
        with self._lock:
            self._stopped = True
            self._lock.notify_all()

    def give_up(self) -> None:
        """The store is gone for good: no rendezvous any more, and no heartbeats of the handler's that cannot arrive."""
        self.stop()
        threading.Thread(target=shut_down, args=(self._handler,), name="m8d-nodes-gone", daemon=True).start()

    def look(self) -> None:
        """See soon whether nodes wait. Never blocks."""
        with self._lock:
            self._look = True
            self._lock.notify_all()

    def again(self) -> None:
        """Have a rendezvous, and repeat it until it comes about. Never blocks."""
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
                    again = self._handler.num_nodes_waiting() > 0
                if again:
                    with self._lock:
                        self._again = False
                    met = self._meet(self._handler.next_rendezvous())
                    self._tell(met)
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
