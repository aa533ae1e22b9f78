"""Processes of `elastic` with torchft: the one that replicas are forked from, and the lighthouse's.

Each replica is a replica group of one process, and takes steps of one allreduce.
"""

from __future__ import annotations

import time
from datetime import timedelta
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined, unused-ignore]

from benchmarks.elastic.herd import Herd, Line, Survivor

if TYPE_CHECKING:
    from collections.abc import Callable

coordination: Any = import_module("torchft.coordination")
managers: Any = import_module("torchft.manager")
groups: Any = import_module("torchft.process_group")

_LEAST = 2
_TIMEOUT, _OPERATION_TIMEOUT = timedelta(seconds=30), timedelta(seconds=5)
"""Of the manager and of gloo, as in torchft's own example, train_ddp.py."""
_STEP = 0.1
"""Seconds that stand for a step's work. Without them a replica is killed while its request for a quorum
is at the lighthouse, which lets it in: the others look for it until their timeout is over."""


def make(rank: int, count: int, args: dict[str, Any]) -> Any:
    """Rank 0 forks the replicas, rank 1 is the lighthouse's process."""
    torch.set_num_threads(1)
    return Replicas() if rank == 0 else Lighthouse()


class Lighthouse:
    """Commands of the process of the lighthouse."""

    _server: Any = None

    def serve(self, heartbeat_ms: int | None) -> str:
        """A new lighthouse, in place of an earlier one; its address.

        Args:
            heartbeat_ms: without a heartbeat for so long, a replica counts as dead; None takes the default.
        """
        if self._server is not None:
            self._server.shutdown()
        more = {} if heartbeat_ms is None else {"heartbeat_timeout_ms": heartbeat_ms}
        self._server = coordination.LighthouseServer(bind="127.0.0.1:0", min_replicas=_LEAST, **more)
        return str(self._server.address())


class Replicas(Herd):
    """Commands of the process that replicas are forked from."""

    _served: TCPStore  # a replica keeps the store of its group as long as it lives

    def _member(self, number: int, count: int, how: dict[str, Any]) -> Survivor:
        self._served = store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        manager = managers.Manager(
            pg=groups.ProcessGroupGloo(timeout=_OPERATION_TIMEOUT), min_replica_size=_LEAST, timeout=_TIMEOUT,
            load_state_dict=lambda _state: None, state_dict=dict,
            rank=0, world_size=1, store_addr="127.0.0.1", store_port=store.port, hostname="127.0.0.1",
            lighthouse_addr=how["lighthouse"], replica_id=f"replica{number}", init_sync=False,
        )  # fmt: skip
        _step_of(manager, lambda replicas: replicas == count, Line())

        def survive() -> dict[str, Any]:
            line = Line()
            _step_of(manager, lambda replicas: replicas < count, line)
            line.mark("first")
            return line.told(manager.current_step(), manager.num_participants())

        def go_on() -> None:
            _step_of(manager, lambda _replicas: False, Line())

        return survive, go_on


def _step_of(manager: Any, enough: Callable[[int], bool], line: Line) -> None:
    """Take steps until one of so many replicas is committed; mark the first that was not.

    Args:
        manager: of this replica.
        enough: whether so many replicas are what is waited for.
        line: of this replica.
    """
    while True:
        tensor = torch.ones(1)
        manager.start_quorum()
        time.sleep(_STEP)
        manager.allreduce(tensor).wait()
        if not manager.should_commit():
            line.mark("noticed")
        elif enough(manager.num_participants()):
            return
