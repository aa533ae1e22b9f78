"""A rank in torch's own default group, over the store of its worlds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined, unused-ignore]

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch


def plain_calls(pg: Any) -> tuple[Callable[[torch.Tensor, int], Any], Callable[[torch.Tensor, int], Any]]:
    """A process group's own send and receive, blocking, called directly: the floor of a message."""
    return (
        lambda tensor, peer: pg.send([tensor], peer, 0).wait(),
        lambda tensor, peer: pg.recv([tensor], peer, 0).wait(),
    )


class Stock:
    """Commands of such a rank; rank 0 has the store, at the address `host`."""

    def __init__(self, rank: int, count: int, host: str = "127.0.0.1") -> None:
        self._rank, self._count, self._host = rank, count, host
        self._store: Any = None

    def serve(self) -> int:
        """Rank 0: serve the store; its port."""
        self._store = TCPStore(self._host, 0, is_master=True, wait_for_workers=False)
        return int(self._store.port)

    def _join_stock(self, port: int) -> None:
        """Join the default group."""
        if self._store is None:
            self._store = TCPStore(self._host, port, is_master=False, wait_for_workers=False)
        dist.init_process_group(
            "gloo", store=PrefixStore("stock", self._store), rank=self._rank, world_size=self._count
        )
