"""The demo's processes: started, listened to, and ended."""

from __future__ import annotations

import _ctrl_c

import contextlib
import json
import multiprocessing
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from _demo_screen import Lane, Screen, screen

__all__ = ["PATIENCE", "Stage"]

MEMBERS = Path(__file__).parent / "_demo_members.py"
PATIENCE = 60.0
"""Seconds that a start or a join may take; loading torch on a busy machine takes most of it."""


def _worker(name: str, port: int) -> None:
    """Be the worker of a world, in a session of its own: Ctrl-C is for the demo, which then ends it."""
    os.setsid()
    import _demo_members  # noqa: PLC0415  (the demo itself loads no torch)

    sys.exit(_demo_members.worker(name, port))


class Stage:
    """The hub, the workers, and what the hub tells. Nobody outlives the `with`."""

    def __init__(self, hang_timeout: float) -> None:
        self.hang_timeout = hang_timeout
        os.environ["M8D_HANG_TIMEOUT"] = str(hang_timeout)  # theirs, too
        self.lanes = {f"w{number}": Lane() for number in range(1, 5)}
        self.screen: Screen = screen(self.lanes)
        self.events: queue.Queue[dict[str, Any]] = queue.Queue()
        # Forked from a server that has loaded torch, so that a new worker is there at once.
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(["torch", "multiworld"])
        self.running: dict[str, ForkServerProcess] = {}
        self.hub: subprocess.Popen[str] | None = None
        self.faults: list[str] = []
        self.expected: set[str] = set()
        self.counted: tuple[float, dict[str, int]] = (0.0, {})

    def __enter__(self) -> Stage:
        with _ctrl_c.kept_back():  # it lets Ctrl-C through, as the first start would without it
            resource_tracker.ensure_running()
        _ctrl_c.raises()
        self.screen.__enter__()
        return self

    def start_hub(self) -> None:
        """Start the hub, and listen to it."""
        # A session of its own: Ctrl-C is for this process, which then ends it.
        with _ctrl_c.kept_back():
            self.hub = subprocess.Popen(
                [sys.executable, str(MEMBERS), *self.lanes],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
            )  # fmt: skip
            forkserver.ensure_running()  # it loads torch while the hub does
        assert self.hub.stdout is not None  # noqa: S101  (it is a pipe)
        threading.Thread(target=self._read, args=(self.hub.stdout,), daemon=True).start()
        self.screen.say("the hub starts")

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        for sign in (signal.SIGINT, signal.SIGTERM):
            signal.signal(sign, signal.SIG_IGN)  # a second Ctrl-C must not keep the processes alive
        for process in self.running.values():
            process.kill()  # a stopped process too
        for process in self.running.values():
            process.join()
        if self.hub is not None:
            self.hub.kill()
            self.hub.wait()
        self.screen.__exit__(None, None, None)
        return kind is KeyboardInterrupt

    def _read(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.events.put(json.loads(line))

    def start(self, name: str) -> None:
        """Start the worker of a world."""
        if name in self.running:
            self.running.pop(name).join()
        with _ctrl_c.kept_back():
            process = self.context.Process(target=_worker, args=(name, self.port))
            process.start()
            self.running[name] = process

    def signal(self, name: str, sign: signal.Signals) -> None:
        """Send a signal to the worker of a world."""
        pid = self.running[name].pid
        assert pid is not None  # noqa: S101  (it was started)
        os.kill(pid, sign)

    def end_hub(self) -> None:
        """Tell the hub that it is over; it tells the workers."""
        assert self.hub is not None and self.hub.stdin is not None  # noqa: S101, PT018  (it was started, with a pipe)
        self.hub.stdin.close()

    def ends(self) -> Iterator[tuple[str, int | None]]:
        """Yield the name of each process and its exit code, None where it did not end."""
        assert self.hub is not None  # noqa: S101
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.hub.wait(PATIENCE)
        yield "the hub", self.hub.returncode
        for name, process in self.running.items():
            process.join(PATIENCE)
            yield name, process.exitcode

    def wait(
        self, what: str, until: Callable[[dict[str, Any]], object], seconds: float = PATIENCE
    ) -> dict[str, Any]:
        """Show what happens until `until` says of an event that it is the one."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            with contextlib.suppress(queue.Empty):
                event = self.events.get(timeout=min(left, 0.1))
                self._show(event)
                if until(event):
                    return event
            self.screen.refresh()
        raise TimeoutError(f"not seen in {seconds:g} s: {what}")

    def watch(self, seconds: float) -> None:
        """Let it run."""
        with contextlib.suppress(TimeoutError):
            self.wait("nothing", lambda _: False, seconds)

    def _show(self, event: dict[str, Any]) -> None:
        kind, lane = event["event"], self.lanes.get(event.get("world", ""), Lane())
        if kind == "port":
            self.port = event["port"]
        elif kind == "active":
            lane.state, lane.generation = "active", event["generation"]
            self.screen.say(f"{event['world']} is active, generation {event['generation']}", "green")
        elif kind == "broken":
            lane.state, lane.rate = "broken", 0.0
            if event["world"] not in self.expected:
                self.fault(f"{event['world']} broke without a reason: {event['cause']}, {event['text']}")
        elif kind == "refused":
            self.fault(f"{event['world']} could not be joined: {event['text']}")
        elif kind == "rates":
            then, counts = self.counted
            for name, count in event["messages"].items():
                each = self.lanes[name]
                each.rate = (count - counts.get(name, 0)) / max(1e-9, event["now"] - then)
                each.slowest = event["slowest"][name]
                each.last.append(each.rate)
            self.counted = (event["now"], event["messages"])

    def fault(self, text: str) -> None:
        """Something that should not be: the demo will end with 1."""
        self.faults.append(text)
        self.screen.say(text, "bold red")
