"""How ranks share a machine's GPUs: environments with names, and which of them a machine is asked for. Pure.

NCCL refuses two ranks on one GPU. From 2.30 on it can be told not to; before, ranks that believe to be on different
hosts are let through. Either way they talk over sockets here, as ranks on different hosts do: that a peer is gone is
then seen by NCCL, which it need not be between GPUs of one host.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from bed.errors import BedError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["PLACEMENTS", "Placement", "choices"]

_SOCKETS = {
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_NET": "Socket",
    "NCCL_SOCKET_IFNAME": "lo",
}


@dataclass(frozen=True)
class Placement:
    """One way to put ranks on GPUs.

    Attributes:
        id: short name.
        title: one line.
        one_gpu: all ranks on one GPU; otherwise each has its own.
        env: of all ranks.
        hosts: whether each rank claims to be on a host of its own.
    """

    id: str
    title: str
    one_gpu: bool
    env: Mapping[str, str] = field(default_factory=dict)
    hosts: bool = False

    def most(self, gpus: int) -> int | None:
        """Return how many ranks a group may have; None: as many as are wanted."""
        return None if self.one_gpu else gpus

    def of_all(self, visible: str = "") -> dict[str, str]:
        """Return what all ranks' environment gets.

        Args:
            visible: CUDA_VISIBLE_DEVICES as it is, "" for none.
        """
        first = visible.partition(",")[0].strip() or "0"
        return {**self.env, **({"CUDA_VISIBLE_DEVICES": first} if self.one_gpu else {})}

    def of_rank(self, rank: int) -> dict[str, str]:
        """Return what one rank's environment gets on top."""
        return {"NCCL_HOSTID": f"m8d-host-{rank}"} if self.hosts else {}

    def of_latecomer(self, rank: int, visible: str = "") -> dict[str, str]:
        """Return the environment of a rank that is started by itself, and so would take the first GPU."""
        found = {**self.of_all(visible), **self.of_rank(rank)}
        if not self.one_gpu:
            named = [each.strip() for each in visible.split(",") if each.strip()]
            found["CUDA_VISIBLE_DEVICES"] = named[rank] if rank < len(named) else str(rank)
        return found


PLACEMENTS: dict[str, Placement] = {
    each.id: each
    for each in (
        Placement(
            "one-gpu",
            "all ranks on one GPU, over sockets (`NCCL_MULTI_RANK_GPU_ENABLE=1`)",
            one_gpu=True,
            env={**_SOCKETS, "NCCL_MULTI_RANK_GPU_ENABLE": "1"},
        ),
        Placement(
            "one-gpu-hosts",
            "all ranks on one GPU, over sockets (an `NCCL_HOSTID` for each rank)",
            one_gpu=True,
            env=_SOCKETS,
            hosts=True,
        ),
        Placement(
            "gpus-sockets", "a GPU for each rank, over sockets, as between hosts", one_gpu=False, env=_SOCKETS
        ),
        Placement("gpus", "a GPU for each rank, by NCCL's own choice of transport", one_gpu=False),
    )
}


def choices(gpus: int, wanted: Sequence[str] = ()) -> tuple[tuple[Placement, ...], ...]:
    """Return what to try: of each group, the first that NCCL accepts is run.

    Args:
        gpus: how many there are.
        wanted: ids; each is then a group of its own.

    Raises:
        BedError: there is no placement of that name, or it needs more GPUs.
    """
    for name in wanted:
        if name not in PLACEMENTS:
            raise BedError(f"--placements {name}", rule=f"there are {', '.join(PLACEMENTS)}")
        if not PLACEMENTS[name].one_gpu and gpus < 2:
            raise BedError(
                f"--placements {name} on a machine with one GPU",
                rule="it needs a GPU for each rank",
                next_step="Leave it out, or name one-gpu or one-gpu-hosts",
            )
    if wanted:
        return tuple((PLACEMENTS[name],) for name in dict.fromkeys(wanted))
    shared = (PLACEMENTS["one-gpu"], PLACEMENTS["one-gpu-hosts"])
    if gpus < 2:
        return (shared,)
    return ((PLACEMENTS["gpus-sockets"],), (PLACEMENTS["gpus"],), shared)
