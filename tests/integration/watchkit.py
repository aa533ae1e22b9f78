"""Processes with a watchdog each, driven over pipes; run as a program, it is one of them.

Times are CLOCK_MONOTONIC, which all processes of a host share.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
SECRET = bytes(range(16)).hex()
PATIENCE = 30.0  # seconds; nothing here takes that long when all is well, on a machine that runs
SLACK = 15.0  # seconds a busy machine may take beyond a bound; 0.0 is what an idle one takes


class Child:
    """One process. `calls` go in as lines of JSON, events come back the same way."""

    def __init__(self, host="127.0.0.1", netns=None, name="", *, early_close=True):
        prefix = ["ip", "netns", "exec", netns] if netns else []
        self.process = subprocess.Popen(
            [*prefix, sys.executable, __file__, *([] if early_close else ["--no-early-close"])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        self.events: queue.Queue = queue.Queue()
        self.seen: list[dict] = []
        self.ended: float | None = (
            None  # when it was seen that the descriptors that all its threads share are closed
        )
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()
        self.call("endpoint", host=host)
        self.hello = self.wait("endpoint", timeout=2 * PATIENCE)
        self.pid = self.hello["pid"]

    def _read(self):
        with contextlib.suppress(ValueError):  # closed under the reader when the test ends
            for line in self.process.stdout:
                self.events.put(json.loads(line))
            self.ended = time.monotonic()

    def call(self, command, **arguments):
        self.process.stdin.write(json.dumps({"command": command, **arguments}) + "\n")
        self.process.stdin.flush()

    def wait(self, kind, timeout=PATIENCE, **match):
        """The next event of a kind; earlier ones of other kinds stay."""
        deadline = time.monotonic() + timeout
        while True:
            for event in self.seen:
                if event["event"] == kind and all(event[key] == value for key, value in match.items()):
                    self.seen.remove(event)
                    return event
            left = deadline - time.monotonic()
            try:
                self.seen.append(self.events.get(timeout=max(left, 0.001)))
            except queue.Empty:
                raise AssertionError(f"no {kind} {match} within {timeout} s; there is {self.seen}") from None

    def until_holds(self, **wanted):
        """Wait until the child's watchdog and process hold exactly this; what closes may take a moment."""
        deadline = time.monotonic() + PATIENCE
        while True:
            self.call("snapshot")
            seen = self.wait("snapshot")
            found = {key: seen[key] for key in wanted}
            if found == wanted:
                return
            assert time.monotonic() < deadline, f"{found}, not {wanted}"
            time.sleep(0.05)

    def quiet(self, kind, seconds):
        """See that no event of a kind comes."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            with contextlib.suppress(queue.Empty):
                self.seen.append(self.events.get(timeout=left))
        assert [event for event in self.seen if event["event"] == kind] == []

    def send_signal(self, number):
        """Send it; returns a moment that is not after it."""
        before = time.monotonic()
        os.kill(self.pid, number)
        return before

    def end(self):
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait(timeout=10)
        self.process.stdin.close()
        self.process.stdout.close()


class Family(contextlib.ExitStack):
    """Children that end with the test."""

    def born(self, count, **arguments):
        children = [Child(**arguments) for _ in range(count)]
        for child in children:
            self.callback(child.end)
        return children


def members(children):
    return [
        {
            "process": child.hello["process"],
            "host": child.hello["host"],
            "port": child.hello["port"],
            "pid": child.pid,
        }
        for child in children
    ]


def join(children, world="w", *, hang=PATIENCE, generation=1, token=SECRET, timeout=PATIENCE):
    everyone = members(children)
    for rank, child in enumerate(children):
        child.call(
            "attach", world=world, generation=generation, rank=rank, members=everyone, token=token, hang=hang,
            timeout=timeout,
        )  # fmt: skip
    return [child.wait("attached", timeout + 5, world=world) for child in children]


# -- the child


def main():  # noqa: PLR0915  (a list of commands)
    from multiworld._core.membership.roster import Endpoint, Member, Roster
    from multiworld._net import descriptor_table
    from multiworld.watchdog import Watchdog

    if "--no-early-close" in sys.argv:  # as where the system refuses it
        descriptor_table.isolate = lambda _: False

    lock = threading.Lock()

    def say(event, **more):
        with lock:
            sys.stdout.write(json.dumps({"event": event, "at": time.monotonic(), **more}) + "\n")
            sys.stdout.flush()

    dog = Watchdog()
    attachments = {}
    memory = []

    def told(breakage, world):
        return {
            "world": world,
            "cause": str(breakage.cause),
            "ranks": list(breakage.ranks),
            "detail": breakage.detail,
        }

    def attach(asked):
        world = asked["world"]
        everyone = tuple(
            Member(rank, each["process"], Endpoint(each["host"], each["port"]), each["pid"], "host")
            for rank, each in enumerate(asked["members"])
        )
        roster = Roster(
            world, asked["generation"], asked["rank"], everyone, bytes.fromhex(asked["token"]), asked["hang"]
        )
        try:
            attachments[world] = dog.attach(
                roster,
                lambda breakage: say("verdict", **told(breakage, world)),
                deadline=time.monotonic() + asked["timeout"],
            )
        except Exception as error:  # noqa: BLE001  (whatever it is, the test shall see it)
            say("refused", world=world, error=type(error).__name__, text=str(error))
        else:
            say("attached", world=world)

    def report(asked):
        found = attachments[asked["world"]].report(
            asked["detail"], tuple(asked["ranks"]), deadline=time.monotonic() + PATIENCE
        )
        say("reported", **told(found, asked["world"]))

    for line in sys.stdin:
        asked = json.loads(line)
        command = asked["command"]
        if command == "endpoint":
            endpoint = dog.endpoint(asked["host"])
            say("endpoint", process=dog.process, host=endpoint.host, port=endpoint.port, pid=os.getpid())
        elif command == "attach":
            threading.Thread(target=attach, args=(asked,), daemon=True).start()
        elif command == "report":
            threading.Thread(target=report, args=(asked,), daemon=True).start()
        elif command == "leave":
            attachments[asked["world"]].leave()
            say("left", world=asked["world"])
        elif command == "hog":
            # A C function that keeps the GIL, for a second at a time.
            keeper = ctypes.PyDLL(None)
            for _ in range(asked["threads"]):
                threading.Thread(
                    target=lambda sleep=keeper.sleep: [sleep(1) for _ in range(1000)], daemon=True
                ).start()
            say("hogging")
        elif command == "fork":
            pid = os.fork()
            if pid == 0:
                time.sleep(asked["seconds"])
                os._exit(0)
            say("forked", pid=pid)
        elif command == "use":
            memory.append(bytearray(asked["megabytes"] << 20))
            memory[-1][::4096] = b"x" * len(memory[-1][::4096])
            say("used")
        elif command == "exit":
            os._exit(0)
        elif command == "exec":
            os.execv("/bin/sleep", ["sleep", str(asked["seconds"])])  # noqa: S606  (a process that becomes another)
        elif command == "cpu":
            say("cpu", seconds=time.process_time())
        elif command == "snapshot":
            found = dog.snapshot()
            ties = list(dog._peers.early_close._pairs.values())
            say(
                "snapshot", thread=found.thread, worlds=list(found.worlds), listeners=found.listeners,
                connections=found.connections, files=len(list(Path("/proc/self/fd").iterdir())), threads=threading.active_count(),
                tasks=len(list(Path("/proc/self/task").iterdir())), kept=sum(each.kept is not None for each in ties),
                watched=sum(each.theirs is not None for each in ties),
            )  # fmt: skip
        elif command == "close":
            from multiworld._core.membership.roster import Endpoint as Place

            dog.release_endpoint(Place(asked["host"], asked["port"]))
            say("closed")


if __name__ == "__main__":
    main()
