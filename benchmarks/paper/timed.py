"""Commands of the two experiments over time: a worker is killed, and a worker joins, while another sends."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from typing import Any

import torch

from benchmarks.paper.layout import PLAIN
from benchmarks.paper.rank import LAST, OVER, Member

_clock = time.monotonic


def make(rank: int, count: int, args: dict[str, Any]) -> TimedMember:
    """See `benchmarks.measuring.ranks`; `args` has "form", "flags", "backend", "cuda" and "hosts"."""
    torch.set_num_threads(1)
    if args.get("hosts"):
        os.environ["NCCL_HOSTID"] = f"m8d-paper-{rank}"
    return TimedMember(rank, count, args)


class _Seen:
    """Times of arrivals from one sender, and what ended them."""

    def __init__(self) -> None:
        self.at: list[float] = []
        self.error: list[Any] = []

    def failed(self, error: BaseException) -> None:
        """It has ended in an exception."""
        self.error = [_clock(), type(error).__name__, str(error).splitlines()[0][:200] if str(error) else ""]

    def told(self) -> dict[str, Any]:
        """For the driver."""
        return {"at": self.at, "error": self.error}


class TimedMember(Member):
    """A member that also keeps the time of every message."""

    _join: list[float]

    def feed_on(self, form: str, world: str, peer: int, size: int) -> None:
        """Send until the leader says that it is over, and a last message that says so."""
        tensor = self._tensor(size).fill_(float(self._rank))
        send = self._calls(form).send(world, peer)
        if self._awaits(form):

            async def run() -> None:
                while not self._flags[OVER]:
                    await send(tensor)
                await send(tensor.fill_(LAST))

            self._loop.run_until_complete(run())
            return
        while not self._flags[OVER]:
            send(tensor)
        send(tensor.fill_(LAST))

    def join_at(self, world: str, members: list[int], port: int, at: float) -> float:
        """Join a world at a time; milliseconds it took."""
        time.sleep(max(0.0, at - _clock()))
        began = _clock()
        self._loop.run_until_complete(self._base.join(world, members, port))
        return 1e3 * (_clock() - began)

    def watch(
        self,
        form: str,
        links: list[list[Any]],
        size: int,
        until: float,
        join: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Receive from every sender until a time; the times of all messages, by sender.

        Args:
            form: of `layout.FORMS`, or `CAUGHT`.
            links: world and sender, each.
            size: bytes of a message.
            until: when it is over (monotonic).
            join: "world", "members", "port", "at", "peer": another world to join while it goes on.
        """
        seen = {peer: _Seen() for _, peer in links}
        self._join = []
        if self._awaits(form):
            self._loop.run_until_complete(self._tasks(form, links, size, until, join, seen))
        elif form == PLAIN:
            self._loop_of_all(form, links, size, until, seen)
        else:
            self._threads(form, links, size, until, join, seen)
        return {"seen": {str(peer): each.told() for peer, each in seen.items()}, "join": self._join}

    def _arrived(self, seen: _Seen, tensor: Any, until: float) -> bool:
        """Note a message; whether more are to come."""
        if float(tensor[0]) == LAST:
            return False
        now = _clock()
        seen.at.append(now)
        if now >= until:
            self._flags[OVER] = 1
        return True

    async def _tasks(
        self, form: str, links: list[list[Any]], size: int, until: float, join: Any, seen: dict[int, _Seen]
    ) -> None:
        async def receive(world: str, peer: int) -> None:
            recv, tensor = self._calls(form).recv(world, peer), self._tensor(size)
            try:
                await recv(tensor)
                while self._arrived(seen[peer], tensor, until):
                    await recv(tensor)
            except Exception as error:  # noqa: BLE001  (whatever it is, it is the finding)
                seen[peer].failed(error)

        async def grow() -> None:
            await asyncio.sleep(max(0.0, join["at"] - _clock()))
            began = _clock()
            await self._base.join(join["world"], join["members"], join["port"])
            self._join = [began, _clock()]
            seen[join["peer"]] = _Seen()
            await receive(join["world"], join["peer"])

        more = [grow()] if join else []
        await asyncio.gather(*(receive(*link) for link in links), *more)

    def _loop_of_all(
        self, form: str, links: list[list[Any]], size: int, until: float, seen: dict[int, _Seen]
    ) -> None:
        """A receive posted for each, waited for in turn; an error ends the loop, as it ends a program."""
        calls = self._calls(form)
        posts = {peer: calls.irecv(world, peer) for world, peer in links}
        tensors = {peer: self._tensor(size) for peer in posts}
        peer = -1
        try:
            works = {peer: post(tensors[peer]) for peer, post in posts.items()}
            while works:
                for peer, work in list(works.items()):
                    work.wait()
                    if self._arrived(seen[peer], tensors[peer], until):
                        works[peer] = posts[peer](tensors[peer])
                    else:
                        del works[peer]
        except Exception as error:  # noqa: BLE001  (whatever it is, it is the finding)
            seen[peer].failed(error)

    def _threads(
        self, form: str, links: list[list[Any]], size: int, until: float, join: Any, seen: dict[int, _Seen]
    ) -> None:
        def receive(world: str, peer: int) -> None:
            recv, tensor = self._calls(form).recv(world, peer), self._tensor(size)
            try:
                recv(tensor)
                while self._arrived(seen[peer], tensor, until):
                    recv(tensor)
            except Exception as error:  # noqa: BLE001  (whatever it is, it is the finding)
                seen[peer].failed(error)

        def grow() -> None:
            time.sleep(max(0.0, join["at"] - _clock()))
            began = _clock()
            self._loop.run_until_complete(self._base.join(join["world"], join["members"], join["port"]))
            self._join = [began, _clock()]
            seen[join["peer"]] = _Seen()
            receive(join["world"], join["peer"])

        running = [threading.Thread(target=receive, args=link, daemon=True) for link in links]
        running += [threading.Thread(target=grow, daemon=True)] if join else []
        for each in running:
            each.start()
        for each in running:
            each.join(max(1.0, until - _clock() + 60.0))
