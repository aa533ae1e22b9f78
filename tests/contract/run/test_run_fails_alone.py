"""A launcher of several fails alone: the others go on, and the rendezvous stays open for nodes that come."""

from __future__ import annotations

import contextlib
import signal
import sys

import pytest
from kits.contract.nodekit import free_port
from kits.contract.runkit import Run, script

pytestmark = [pytest.mark.everyday, pytest.mark.timeout(600)]

PATIENCE = 180.0
CONF = "last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=10"
ELSEWHERE = "192.0.2.1"
"""An address for documentation: of no host."""


class Nodes(contextlib.ExitStack):
    """Launchers on this host; the first serves the rendezvous."""

    def __init__(self, folder):
        super().__init__()
        self.folder, self.endpoint, self.count = folder, f"127.0.0.1:{free_port()}", 0
        self.program = script(folder, "tell('up')\nhold()\n")

    def start(self, *program, address="127.0.0.1"):
        home = self.folder / f"node{self.count}"
        home.mkdir()
        line = [
            sys.executable, "-m", "multiworld.run", "--nnodes", "2:3", "--rdzv-endpoint", self.endpoint,
            "--rdzv-id", "alone", "--local-addr", address,
            "--rdzv-conf", f"{CONF},is_host={int(self.count == 0)}", *(program or [str(self.program)]),
        ]  # fmt: skip
        self.count += 1
        run = Run(home, line, {"M8D_HANG_TIMEOUT": "30"}, None)
        self.callback(run.close)
        return run


def test_nodes_that_come_after_one_that_failed_alone_are_let_in(tmp_path):
    with Nodes(tmp_path) as made:
        first, second = made.start(), made.start()
        for run in (first, second):
            run.wait_told("up", timeout=PATIENCE)
        came = first.text().count("event=node-joined")
        wrong = made.start(address=ELSEWHERE)
        assert wrong.ended(PATIENCE) == 1
        assert f"--local-addr {ELSEWHERE}" in wrong.text("err")
        assert first.text().count("event=node-joined") == came  # it was found before the rendezvous
        # The next one is let in, as a spare, and fails once it has a seat: its program is not there.
        spare = made.start("--no-python", str(tmp_path / "missing"))
        spare.wait_line("event=seat seat=-", timeout=PATIENCE)
        (left,) = second.told("up")
        second.signal(signal.SIGTERM)
        assert second.ended(PATIENCE) == 143
        assert spare.ended(PATIENCE) == 1, spare.report()
        assert "a worker could not be started" in spare.text("err")
        good = made.start()
        (up,) = good.wait_told("up", timeout=PATIENCE)
        assert up.rank == left.rank
        for run in (first, good):
            run.say()
        assert [run.ended(PATIENCE) for run in (first, good)] == [0, 0], first.report() + good.report()
        assert len(first.told("up")) == 1
