"""Nodes of a run as processes: a rendezvous handler of torch's and `MultiNode`, driven over pipes, without workers.

Run as a program, it is one of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import queue
import random
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

from kits.forkedkit import Forked

ROOT = Path(__file__).parents[3]
SOON = 120.0
"""Seconds; nothing here takes that long when all is well, on a machine that runs."""

CONF = {"keep_alive_interval": 1, "keep_alive_max_attempt": 5, "last_call_timeout": 7, "join_timeout": 120}
"""Torch's own patience, shortened: a node that is gone is dropped from the rendezvous after 5 s instead of 15.

The last call is longer than that, as torch's own is, or a node that is gone gets into the round. On a machine at its
limit one that lives may be silent for 3 s.
"""


def free_port():
    """A port that torch's store can have: it listens at every address, and the kernel gives these to nobody else."""
    while True:
        port = random.randrange(10000, 30000)  # noqa: S311  (no secret)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port


class Agent:
    """One node."""

    def __init__(self, netns=None, **options):
        prefix = ["ip", "netns", "exec", netns] if netns else []
        # Of a process on another host the kernel tells nothing: that it runs there does not count.
        alone = {"M8D_BUSY_TIMEOUT": "0"} if netns else {}
        self.process = Forked(
            [*prefix, sys.executable, __file__, json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", **alone},
        )
        self.seen: list[dict] = []
        self._events: queue.Queue = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        with contextlib.suppress(ValueError):  # closed under the reader when the test ends
            for line in self.process.stdout:
                self._events.put(json.loads(line))

    def say(self, command):
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()

    def wait(self, kind, timeout=SOON, **match):
        """The next event of a kind; earlier ones of other kinds stay."""
        deadline = time.monotonic() + timeout
        while True:
            for event in self.seen:
                if event["event"] == kind and all(event.get(key) == value for key, value in match.items()):
                    self.seen.remove(event)
                    return event
            try:
                self.seen.append(self._events.get(timeout=max(0.001, deadline - time.monotonic())))
            except queue.Empty:
                raise AssertionError(f"no {kind} {match} within {timeout} s; there is {self.seen}") from None

    def all(self, kind):
        """What came of a kind and was not waited for."""
        with contextlib.suppress(queue.Empty):
            while True:
                self.seen.append(self._events.get_nowait())
        return [event for event in self.seen if event["event"] == kind]

    def kill(self):
        self.process.kill()
        self.process.wait(30)

    def finish(self):
        """Exit code, at the end of its own."""
        code = self.process.wait(SOON)
        self._reader.join(30)
        return code

    def end(self):
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGCONT)
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(30)
        self._reader.join(30)
        self.process.stdin.close()
        self.process.stdout.close()


class Cluster(contextlib.ExitStack):
    """Agents that end with the test."""

    def __init__(self, **options):
        super().__init__()
        self.options = options

    def start(self, netns=None, **options):
        agent = Agent(netns, **{**self.options, **options})
        self.callback(agent.end)
        return agent


def emit(event, **fields):
    sys.stdout.write(json.dumps({"event": event, "at": time.monotonic(), **fields}) + "\n")
    sys.stdout.flush()


def links_made_late(seconds, addresses=None):
    """As on a busy machine: this agent takes part in the last world of each link that much later.

    With `addresses`: in all worlds of its links to the agents there, and only in those.
    """
    from multiworld.run.nodes.peer_links import PeerLinks, _working

    attach = PeerLinks._attach

    def later(self, link, kind, *rest):
        if kind == _working(link.node.id) if addresses is None else link.node.address in addresses:
            time.sleep(seconds)
        attach(self, link, kind, *rest)

    PeerLinks._attach = later


def tell_counts(nodes, told):
    """Tell how many nodes have finished, are connected with this one, and are members, where it is not as `told`."""
    membership = nodes._standing.membership
    counts = {
        "finished": len(nodes._standing.finished),
        "linked": len(nodes._links.alive()),
        "members": 0 if membership is None else len(membership.nodes),
    }
    for name, count in counts.items():
        if count != told.get(name, 0):
            told[name] = count
            emit(name, count=count)


def main():
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

    from multiworld.run.events import EventBus
    from multiworld.run.nodes.interface import NodesSpec
    from multiworld.run.nodes.multi import MultiNode
    from multiworld.run.nodes.rendezvous import shut_down
    from multiworld.run.worldsfile.worlds_plan import Role, WorldsPlan

    options = json.loads(sys.argv[1])
    backend, endpoint, run_id = options["backend"], options["endpoint"], options["run_id"]
    smallest, most = options["nnodes"]
    config = {**CONF, **options.get("conf", {})}
    handler = get_rendezvous_handler(
        RendezvousParameters(
            backend, endpoint, run_id, smallest, most, local_addr=options.get("local_addr"), **config
        )
    )
    bus = EventBus()
    bus.subscribe(
        lambda each: emit(type(each).__name__, **dataclasses.asdict(each) | {"at": time.monotonic()})
    )
    total = options.get("total")
    plan = None if total is None else WorldsPlan((Role("worker", total, 1),), (), "none")
    spec = NodesSpec(
        run_id=run_id, endpoint=endpoint, local_addr=options.get("local_addr"), min_nodes=smallest, max_nodes=most,
        capacity=options.get("capacity", 1), on_loss=options.get("on_loss", "continue"),
        hang_timeout=options.get("hang", 2.0), timeout=60,
    )  # fmt: skip
    if late := options.get("late"):
        links_made_late(late, options.get("late_to"))
    emit("up", pid=os.getpid())
    nodes = MultiNode(spec, handler, bus, plan)
    assignment = nodes.settle(handler.next_rendezvous())
    emit("settled", **dataclasses.asdict(assignment))
    code, failed, told = None, "", {}
    while code is None:
        ready, _, _ = select.select([nodes.fileno(), sys.stdin], [], [], 0.1)
        nodes.watch()
        tell_counts(nodes, told)
        for event in nodes.poll():
            fields = dataclasses.asdict(event)
            emit(type(event).__name__.lower(), **(fields | fields.pop("assignment", {})))
            if type(event).__name__ in {"Over", "Stop"}:
                code = 1 if type(event).__name__ == "Stop" or event.lost else 0
        if sys.stdin in ready:
            command = sys.stdin.readline().strip()
            if command == "done":
                nodes.done()
            elif command == "fail":
                failed, code = "a worker failed", 3
            else:  # "leave", or the test is over
                code = 0
    nodes.close(failed)
    shut_down(handler)
    until = time.monotonic() + 30  # a call of torch's that is under way ends by itself
    while threading.active_count() > 1 and time.monotonic() < until:
        time.sleep(0.02)
    emit("closed", threads=sorted(each.name for each in threading.enumerate()))
    return code


if __name__ == "__main__":
    sys.exit(main())
