"""Stores of a benchmark's worlds, and a launcher as `m8d-run` has one."""

from __future__ import annotations

import contextlib
import tempfile

from multiworld.run.control.server import ControlServer
from multiworld.run.events import EventBus
from multiworld.run.nodes.world_store import WorldStore
from multiworld.run.worldsfile.parse import parse


class Meeting:
    """Commands of a rank that can keep the store as well.

    It is one whose times are not taken and that no fault hits. The store is a C++ thread of its process.
    """

    _store_here: WorldStore | None = None
    _ends: contextlib.ExitStack | None = None

    def address(self) -> str:
        """Of the store, which it keeps from now on: "tcp://127.0.0.1:port", with a port of the kernel's choice."""
        if self._store_here is None:
            self._store_here = WorldStore("127.0.0.1")
        return self._store_here.address

    def launch(self, worlds: str) -> str:
        """Be the launcher of workers that call `multiworld.join_all`, until `hang_up`.

        Args:
            worlds: a worlds file's text.

        Returns:
            What they need as M8D_CONTROL.
        """
        self._ends = self._ends or contextlib.ExitStack()
        folder = self._ends.enter_context(tempfile.TemporaryDirectory(prefix="m8d-"))
        server = ControlServer(
            f"{folder}/s/control", parse(worlds, "benchmark.toml"), EventBus(), dict, store=self.address
        )
        server.start()
        self._ends.callback(server.close)
        return server.path

    def hang_up(self) -> None:
        """Be no launcher any more, and remove what was made."""
        if self._ends is not None:
            self._ends.close()
