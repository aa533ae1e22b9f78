"""The page's server with made-up data behind it."""

from __future__ import annotations

import socket
import threading
import time

import uvicorn

from multiworld.errors import UnknownWorldError
from multiworld.metrics.health import Health
from multiworld.web.app import make_app

# -- data


def member(rank, state="active", **more):
    return {
        "rank": rank,
        "process": f"alpha/{4000 + rank}" if rank >= 0 else "",
        "worker": rank,
        "state": state,
        "generation": 1,
        "seat": "",
        "cause": "",
        "evidence": "",
        "since": time.time() - 71,
        "received": 0,
        "total": 0,
        **more,
    }


def world(name, members=4, state="active", **more):
    if isinstance(members, int):
        members = [member(rank) for rank in range(members)]
    return {
        "name": name,
        "state": state,
        "generation": 1,
        "backend": "gloo",
        "size": len(members),
        "sizes": "",
        "since": time.time() - 71,
        "note": "",
        "cause": "",
        "detail": "",
        "members": members,
        "candidates": 0,
        "pending": [],
        "links": [],
        "waited": {},
        **more,
    }


def broken(name, rank=2, members=4, **more):
    rows = [member(r, "broken", since=time.time()) for r in range(members)]
    rows[rank] = member(
        rank, "lost", cause="crashed", evidence="its connection was closed by its kernel", since=time.time()
    )
    return world(
        name,
        rows,
        state="broken",
        cause="crashed",
        detail=f"rank {rank}: its connection was closed by its kernel",
        since=time.time(),
        **more,
    )


def pending(number=118, missing=2, since=12.0, **more):
    why = f"is at #{(number or 8) - 1}, in send to 3 since 11.9 s"
    return {
        "text": f"all_reduce #{number}: ranks 0, 1 and 3 wait since {since} s; rank {missing} {why}",
        "kind": "all_reduce",
        "number": number,
        "size": 4096,
        "peer": None,
        "tag": None,
        "since": time.time() - since,
        "waiting": [0, 1, 3],
        "missing": {str(missing): why},
        "idle": False,
        **more,
    }


def process(rank, state="up", **more):
    return {
        "id": f"alpha/{4000 + rank}",
        "rank": rank,
        "role": "hub:0" if rank == 0 else f"worker:{rank - 1}",
        "pid": 4000 + rank,
        "host": "alpha",
        "state": state,
        "since": time.time() - 754,
        "restarts": 0,
        "last": f"w{rank} active, generation 1",
        "logs": ["stderr", "stdout"],
        **more,
    }


def fault(name="w2", generation=1, healed=True, at=None, **more):
    at = time.time() - 30 if at is None else at
    steps = [("seen", 0.0, "rank 1 saw it"), ("told", 0.8, "ranks 0 and 3 were told")]
    if healed:
        steps += [
            ("joining", 310.0, "rank 2 joins, pid 4711"),
            ("active", 812.0, "all members in generation 2"),
        ]
    return {
        "id": f"{name}/{generation}/0",
        "world": name,
        "generation": generation,
        "cause": "crashed",
        "ranks": [2],
        "detail": "rank 2: its connection was closed by its kernel",
        "at": at,
        "steps": [{"what": what, "at": at + ms / 1000, "ms": ms, "text": text} for what, ms, text in steps],
        "healed": healed,
        "ms": 812.0 if healed else None,
        **more,
    }


def event(number, text="w0 active, generation 1", level="info", name="w0", at=None):
    return {
        "id": number,
        "at": time.time() if at is None else at,
        "world": name,
        "level": level,
        "text": text,
    }


def run_facts(**more):
    return {
        "run_id": "job7",
        "node": "alpha",
        "entrypoint": "serve.py",
        "restart": "worker",
        "max_restarts": 3,
        "started": time.time() - 760,
        "seat": 0,
        "nodes": 1,
        "peers": [],
        "ended": None,
        **more,
    }


def view(worlds=(), processes=(), faults=(), events=(), **more):
    return {
        "version": 1,
        "now": time.time(),
        "kind": "run",
        "title": "run job7 on alpha",
        "note": "",
        "run": run_facts(),
        "totals": {},
        "processes": list(processes),
        "worlds": list(worlds),
        "faults": list(faults),
        "events": list(events),
        **more,
    }


class Source:
    """A source (`multiworld.web.sources.Source`) with made-up data, which `change` changes by the rules of a patch."""

    def __init__(self, first):
        self.now = first
        self.waiting = {}  # world -> what its members answer when they are asked
        self.logs = {}  # (process, stream) -> text
        self.asked = []  # what was asked for, in order

    def change(self, **patch):
        """Takes a patch into the view."""
        now = {**self.now, **patch.get("set", {})}
        for key, name in (("worlds", "name"), ("processes", "id"), ("faults", "id")):
            rows = {row[name]: row for row in now[key]} | {row[name]: row for row in patch.get(key, ())}
            now[key] = [row for row in rows.values() if row[name] not in patch.get(f"{key}_gone", ())]
        now["faults"].sort(key=lambda one: -one["at"])
        now["events"] = [*now["events"], *patch.get("events", ())][-500:]
        self.now = now

    def view(self):
        return {**self.now, "now": time.time()}

    def pending(self, world):
        self.asked.append(world)
        if world not in self.waiting:
            raise UnknownWorldError(world, f"world {world!r} is not known here")
        return self.waiting[world]

    def log(self, process, stream, most):
        self.asked.append((process, stream, most))
        if (process, stream) not in self.logs:
            raise FileNotFoundError(f"{process} has no log {stream!r}")
        return self.logs[process, stream].encode()

    def metrics(self, accept):
        return b"", "text/plain"

    def live(self):
        return Health(True, "ok")

    def ready(self, worlds):
        return Health(True, "ok")


class Server:
    """Serves a source on a port of its own, which it keeps when it is stopped and started again."""

    def __init__(self, source, token=""):
        self.source, self.token = source, token
        self.port = 0
        self._server = self._thread = None

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}/"

    def start(self):
        bound = socket.create_server(("127.0.0.1", self.port))
        self.port = bound.getsockname()[1]
        config = uvicorn.Config(
            make_app(self.source, token=self.token),
            ws="none",
            lifespan="off",
            log_level="critical",
            timeout_graceful_shutdown=0,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, args=([bound],), daemon=True)
        self._thread.start()
        return self

    def stop(self):
        if self._server is not None:
            self._server.should_exit = self._server.force_exit = True
            self._thread.join(10)
            self._server = None

    __enter__ = start

    def __exit__(self, *exc):
        self.stop()
