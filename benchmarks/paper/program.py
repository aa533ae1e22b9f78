"""The processes of one form, joined, and what a round of it is."""

from __future__ import annotations

import contextlib
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.measuring.ports import held_port
from benchmarks.measuring.ranks import RankError, Ranks
from benchmarks.paper.layout import PLAIN, SAME, THEIRS, WORLD, links_of, size_of, worlds_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from typing_extensions import Self

    from benchmarks.peers.environments import Pair

MAKE = "benchmarks.paper.timed:make"
FLAGS = 16
PACKAGES = {PLAIN: PLAIN, THEIRS: THEIRS, SAME: SAME, WORLD: SAME}
"""Whose processes a form runs in: both of ours are in the same."""


class Program:
    """Processes of one package; a context manager.

    Args:
        package: of `PACKAGES`.
        held: both environments; None: this interpreter.
        senders: how many.
        worlds: which are joined; None: all of `worlds_of`.
        count: how many processes; None: `size_of`.
        backend: "gloo" or "nccl".
        python: the interpreter, where `held` has none; None: this one.
        env: more environment variables.
        hosts: whether each process tells NCCL that it is on a host of its own: so they may share a GPU.
    """

    def __init__(
        self,
        package: str,
        held: Pair | None,
        senders: int,
        *,
        worlds: Mapping[str, Sequence[int]] | None = None,
        count: int | None = None,
        backend: str = "gloo",
        python: Path | None = None,
        env: Mapping[str, str] | None = None,
        hosts: bool = False,
    ) -> None:
        self.package, self.senders = package, senders
        self._worlds = {
            name: [*each] for name, each in (worlds_of(senders) if worlds is None else worlds).items()
        }
        self._held, self._backend = held, backend
        self._python, self._env, self._hosts = python or Path(sys.executable), dict(env or {}), hosts
        self._count = size_of(senders) if count is None else count
        self._stack = contextlib.ExitStack()
        self.joined_ms = 0.0

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            file = stack.enter_context(tempfile.NamedTemporaryFile(prefix="m8d-paper-"))
            file.write(bytes(FLAGS))
            file.flush()
            env, python = {"GLOO_SOCKET_IFNAME": "lo", **self._env}, self._python
            if self._held is not None:
                python = self._held.ours.python
            if self._held is not None and self.package == THEIRS:
                # Both packages have the same name: what stands first on the path is taken.
                python, env["PYTHONPATH"] = self._held.theirs.python, str(self._held.theirs.site)
            args = {
                "form": self.package, "flags": file.name, "backend": self._backend,
                "cuda": self._backend != "gloo", "hosts": self._hosts,
            }  # fmt: skip
            self.ranks = stack.enter_context(
                Ranks(MAKE, self._count, python=python, args=args, env=env, start_timeout=400.0)
            )
            self._look()
            ports = {name: stack.enter_context(held_port()) for name in ("", *self._worlds)}
            self.ports = ports
            told = self.ranks.call("connect", port=ports[""], worlds=self._worlds, ports=ports, timeout=180.0)
            self.joined_ms = max(told)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _look(self) -> None:
        """Make sure of the package that is measured."""
        for who in self.ranks.call("who"):
            theirs = self._held is not None and Path(who["package"] or "/").is_relative_to(
                self._held.theirs.site
            )
            if theirs != (self.package == THEIRS):
                raise RankError(f"{who}: not what was to be measured")

    def port(self) -> int:
        """One more port, kept until the program ends."""
        return self._stack.enter_context(held_port())

    def rate(self, form: str, topology: str, count: int, size: int, messages: int) -> float:
        """Messages in a second, from the first `count` senders together."""
        ranks = self.ranks
        links = links_of(topology, count, self.senders)
        receivers = sorted({link.receiver for link in links})
        ranks[0].call("lower")
        for link in links:
            ranks[link.sender].start(
                "feed", form=form, world=link.world, peer=link.receiver, size=size, messages=messages,
                receivers=len(receivers),
            )  # fmt: skip
        for receiver in receivers:
            own = [[link.world, link.sender] for link in links if link.receiver == receiver]
            ranks[receiver].start("drain", form=form, links=own, size=size, messages=messages)
        spans = [ranks[receiver].result(timeout=150.0) for receiver in receivers]
        for link in links:
            ranks[link.sender].result(timeout=150.0)
        seconds = max(end for _, end in spans) - max(begin for begin, _ in spans)
        return float(count * messages / seconds)

    def watch(
        self,
        form: str,
        count: int,
        size: int,
        seconds: float,
        *,
        topology: str,
        join: dict[str, Any] | None = None,
    ) -> tuple[float, dict[str, Any]]:
        """Begin to receive from the first `count` senders for so long; when it began, and the links.

        The answer is rank 0's result.
        """
        links = links_of(topology, count, self.senders)
        self.ranks[0].call("lower")
        for link in links:
            self.ranks[link.sender].start(
                "feed_on", form=form, world=link.world, peer=link.receiver, size=size
            )
        began = time.monotonic()
        more = {} if join is None else {"join": {**join, "at": began + join["after"]}}
        self.ranks[0].start(
            "watch", form=form, links=[[link.world, link.sender] for link in links], size=size,
            until=began + seconds, **more,
        )  # fmt: skip
        return began, more.get("join", {})
