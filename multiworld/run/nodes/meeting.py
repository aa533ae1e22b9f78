"""This node at a rendezvous: what it says of itself, and the membership that it agrees on with the others."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from multiworld.run.nodes import slots
from multiworld.run.nodes.address import reachable_address
from multiworld.run.nodes.agreement import Agreement
from multiworld.run.nodes.losses import STORE_CALL
from multiworld.run.nodes.rendezvous import Agreed
from multiworld.run.nodes.rendezvous_store import RendezvousStore, StoreSilentError
from multiworld.run.nodes.world_store import WorldStore

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.elastic.rendezvous import RendezvousInfo

    from multiworld.run.nodes.beginnings import Beginnings
    from multiworld.run.nodes.interface import NodesSpec
    from multiworld.run.nodes.loss_verdicts import LossVerdicts
    from multiworld.run.nodes.peer_links import PeerLinks
    from multiworld.run.nodes.standing import Standing
    from multiworld.run.worldsfile.worlds_plan import WorldsPlan

__all__ = ["Meeting"]


class Meeting:
    """See the module; used on the agent's thread at first, later on the thread ``m8d-nodes-rendezvous``.

    Args:
        spec: of this node.
        plan: of the worlds file.
        links: to the other nodes.
        standing: of this node.
        verdicts: on the others.
        backend: of the rendezvous.
        returns: whether its store may answer again after an error.
    """

    def __init__(
        self,
        spec: NodesSpec,
        plan: WorldsPlan | None,
        links: PeerLinks,
        standing: Standing,
        verdicts: LossVerdicts,
        backend: str,
        *,
        returns: bool,
    ) -> None:
        self._spec, self._plan, self._links = spec, plan, links
        self._standing, self._verdicts = standing, verdicts
        self._once, self._returns = backend == "static", returns
        self._worldstore: WorldStore | None = None
        self._node: slots.Node | None = None

    def introduce(self, beginnings: Beginnings) -> None:
        """Open this node's listener, and the store for worlds that it may serve; once."""
        if self._node is not None:
            return
        spec = self._spec
        address = reachable_address(spec.endpoint, spec.local_addr)
        endpoint = self._links.listen(address)
        self._worldstore = WorldStore(address)
        beginnings.hold(self._worldstore)
        self._node = slots.Node(
            id=self._links.me,
            host=socket.gethostname(),
            address=endpoint.host,
            port=endpoint.port,
            pid=os.getpid(),
            capacity=spec.capacity,
            role="" if self._plan is not None else spec.role,
            store=self._worldstore.address,
        )

    def agree(self, info: RendezvousInfo, cancelled: Callable[[], bool]) -> Agreed:
        """Agree on a membership after a rendezvous; see `Agreement.membership`."""
        assert self._node is not None  # noqa: S101  (it is introduced first)
        store = RendezvousStore(info.store, patience=STORE_CALL, returns=self._returns)
        standing, alive, now = self._standing, self._links.alive(), time.monotonic()
        epoch, membership = standing.epoch, standing.membership
        seen = {self._node.id, *alive}
        others = () if membership is None else [each.id for each in membership.nodes if each.id not in seen]
        record = slots.NodeRecord(
            replace(self._node, since=epoch),
            membership,
            alive,
            tuple(standing.finished),
            self._verdicts.silent(others, now),
        )
        agreement = Agreement(
            store=store,
            rank=info.rank,
            size=info.world_size,
            record=record,
            after=epoch,
            counts=None if self._plan is None else tuple(role.count for role in self._plan.roles),
            token=secrets.token_hex(16),
            once=self._once,
        )
        bootstrap = info.bootstrap_store_info
        master = None if bootstrap is None else (bootstrap.master_addr, bootstrap.master_port)
        if info.rank == 0 and master is not None:
            with contextlib.suppress(StoreSilentError):  # the agreement reports it
                store.tell_master(*master)
        number, membership = agreement.membership(time.monotonic() + self._spec.timeout, cancelled)
        return Agreed(store, number, membership, master)

    def close(self) -> None:
        """Close the store for worlds."""
        if self._worldstore is not None:
            self._worldstore.close()
