"""`Beginnings`: lets worlds of a range begin at this node's store once no member of theirs works elsewhere.

The store of a run's worlds is on one node at a time. When that node is gone, another node's store takes its
place, and knows nothing: newcomers must not begin a world there that works. So each node holds all worlds at
its store (`multiworld._net.stores.held_worlds`) before any other process knows the address. The first store
of a run releases them at once. A later one releases a world when the launchers of all nodes have said that
none of their workers is a member of it, and say so still after `SETTLED` seconds. Members of a world that
works bring there what they know of it, meanwhile, and newcomers come to that.

What a launcher says counts only if it names the present store: then it has learnt of the loss of the one
before, where no world can begin any more.
"""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING, Any

from multiworld.logs.source import logger

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from multiworld.run.nodes.slots import Membership, Node
    from multiworld.run.nodes.world_store import WorldStore

__all__ = ["SAID", "Beginnings", "waited_for"]

SAID = "meets"
"""Key of what a launcher says to others in its snapshot: ``node``, ``store`` and ``members``."""

SETTLED = 1.0
"""Seconds between the first such answers and the last; a worker's report takes milliseconds."""

_LOOK_EVERY = 0.25
_ANSWER = 1.0
"""Seconds that the other launchers have to answer."""

_SHOWN = 10

_log = logger(__name__)


def waited_for(world: str, said: Sequence[dict[str, Any]], nodes: Collection[Node], store: str) -> str:
    """Return what a world waits for before it may begin at a store that has moved; "" for nothing. Pure.

    Args:
        world: its name.
        said: by the launchers; each one's `SAID`.
        nodes: of the membership.
        store: its address.
    """
    answers = {each.get("node"): each for each in said if each.get("store") == store}
    working = sorted(rank for each in answers.values() for rank in (each.get("members") or {}).get(world, ()))
    if working:
        shown = ", ".join(map(str, working[:_SHOWN])) + (", ..." if len(working) > _SHOWN else "")
        who = f"workers {shown}, members of it," if len(working) > 1 else f"worker {shown}, a member of it,"
        return f"{who} to tell the run's new store of it, as members do once they advance or reform"
    silent = sorted(node.host for node in nodes if node.id not in answers)
    if silent:
        return f"the launchers of {', '.join(silent[:_SHOWN])} to say whether a worker of theirs is a member"
    return ""


class Beginnings:
    """See the module.

    Args:
        worlds: names of the worlds that are held.
        own: returns what this launcher says, see `SAID`.
        ask: returns the snapshots of the other launchers, of those that answer within so many seconds.
    """

    def __init__(
        self,
        worlds: Collection[str],
        own: Callable[[], dict[str, Any]],
        ask: Callable[[float], list[dict[str, Any]]],
    ) -> None:
        self._worlds = tuple(worlds)
        self._own, self._ask = own, ask
        self._store: WorldStore | None = None
        self._lock = threading.Lock()  # guards the fields below
        self._held: dict[str, str] = {}
        self._free: dict[str, float] = {}
        self._membership: Membership | None = None
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()

    def hold(self, store: WorldStore) -> None:
        """Hold all worlds at this node's store, which no other process knows yet."""
        self._store = store
        with self._lock:
            self._hold()

    def follow(self, membership: Membership, me: str) -> None:
        """Take in which node's store is the present one; `me`: id of this node."""
        mine = membership.store_node == me
        with self._lock:
            before, self._membership = self._membership, membership if mine else None
            try:
                if before is not None and not mine:
                    self._hold()
                elif mine and membership.epoch == 1:
                    for world in tuple(self._held):
                        self._release(world)
            except OSError as error:
                _log.warning("this node's store for worlds does not answer: %s", error)
        self.begin()

    def begin(self) -> None:
        """Begin to look, if worlds are held at the present store; again where no thread was left for it."""
        with self._lock:
            idle = self._thread is None and not self._closing.is_set()
            if idle and self._held and self._membership is not None:
                thread = threading.Thread(target=self._run, name="m8d-nodes-worlds", daemon=True)
                with contextlib.suppress(RuntimeError):  # none is left still: it is called again
                    thread.start()
                    self._thread = thread

    def close(self) -> None:
        """Stop looking, soon; the store is closed by its owner."""
        self._closing.set()

    def _run(self) -> None:
        while not self._closing.wait(_LOOK_EVERY):
            with self._lock:
                membership = self._membership
                if membership is None or not self._held:
                    self._thread = None
                    return
            try:
                said = [found for each in self._ask(_ANSWER) if isinstance(found := each.get(SAID), dict)]
                self._look(membership, [self._own(), *said])
            except Exception:  # noqa: BLE001  (worlds stay held; the next look may do better)
                if not self._closing.is_set():
                    _log.exception("the other launchers could not be asked for their worlds")

    def _look(self, membership: Membership, said: list[dict[str, Any]]) -> None:
        now, store = time.monotonic(), self._store
        with self._lock:
            if membership is not self._membership or store is None or self._closing.is_set():
                return
            for world in tuple(self._held):
                reason = waited_for(world, said, membership.nodes, store.address)
                if not reason and now - self._free.setdefault(world, now) >= SETTLED:
                    self._release(world)
                elif reason:
                    self._free.pop(world, None)
                    self._say(world, reason)

    def _hold(self) -> None:
        self._free.clear()
        for world in self._worlds:
            self._say(world, "the launchers to agree where its store is")

    def _say(self, world: str, reason: str) -> None:
        if self._held.get(world) != reason and self._store is not None:
            self._store.hold(world, reason)
            self._held[world] = reason

    def _release(self, world: str) -> None:
        if self._store is not None:
            self._store.release(world)
        self._held.pop(world, None)
        self._free.pop(world, None)
