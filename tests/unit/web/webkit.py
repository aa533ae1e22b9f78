"""Sources and requests for tests of the page's server."""

from __future__ import annotations

import http.client
import time
from typing import Any

from multiworld.errors import UnknownWorldError
from multiworld.metrics.health import Health

STATUS = {
    "name": "w0", "state": "active", "generation": 2, "backend": "gloo", "rank": 0, "size": 2, "sizes": "",
    "since": 100.0, "ready": True, "busy": [], "waits": 0.0,
    "members": [[0, 10, "alpha", ""], [1, 11, "beta", ""]], "cause": "", "ranks": [], "detail": "", "broke": None,
    "sent": [[1, 3, 300]], "received": [],
}  # fmt: skip


class FakeSource:
    """A source whose view the test sets."""

    def __init__(self, view: dict[str, Any]) -> None:
        self.now = view
        self.asked = 0
        self.healthy = Health(True, "ok")
        self.error: Exception | None = None

    def view(self):
        self.asked += 1
        if self.error is not None:
            raise self.error
        return self.now

    def pending(self, world):
        if world != "a/b":
            raise UnknownWorldError(world, f"world {world!r} is not known here")
        return [{"text": "all_reduce #1"}]

    def log(self, process, stream, most):
        if (process, stream) != ("alpha/10", "stderr"):
            raise FileNotFoundError(f"{process} has no log {stream!r}")
        return b"<b>line</b>\n"[-most:]

    def metrics(self, accept):
        return b"# numbers\n", "text/plain; version=0.0.4"

    def live(self):
        return self.healthy

    def ready(self, worlds):
        return Health(self.healthy.ok and "gone" not in worlds, f"worlds {list(worlds)}")


def view(**more: Any) -> dict[str, Any]:
    return {
        "version": 1, "now": 1.0, "kind": "process", "title": "process 10 on alpha", "note": "", "run": None,
        "processes": [], "worlds": [], "faults": [], "events": [], "totals": {}, **more,
    }  # fmt: skip


def ask(page: Any, path: str, headers: dict[str, str] | None = None) -> http.client.HTTPResponse:
    """Request a path, with the token unless headers are given; the response has been read into `body`."""
    link = http.client.HTTPConnection(page.host, page.port, timeout=30)
    sent = {"Authorization": f"Bearer {page.token}"} if headers is None else headers
    link.request("GET", path, headers=sent)
    answer = link.getresponse()
    answer.body = answer.read()
    link.close()
    return answer


def read_slowly(link: Any, size: int, pause: float, seconds: float) -> bytes:
    """Read an answer to its end: at first parts of `size` bytes, with pauses, for so many seconds."""
    began, heard = time.monotonic(), b""
    while part := link.recv(size):
        heard += part
        if time.monotonic() - began < seconds:
            time.sleep(pause)
    return heard
