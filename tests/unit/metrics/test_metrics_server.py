"""The server of a process's own, and what it does without the extra."""

from __future__ import annotations

import contextlib
import errno
import http.client
import os
import socket
import socketserver
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from kits import httpskit, portkit

import multiworld
from multiworld.errors import MultiworldError
from multiworld.metrics import server as module
from multiworld.metrics import text
from multiworld.metrics.collector import WorldsCollector
from multiworld.metrics.health import Health
from multiworld.metrics.server import serve_metrics

ROOT = Path(__file__).parents[3]


@pytest.fixture
def served(process, monkeypatch):
    monkeypatch.setattr(module, "recorder", process.recorder)
    monkeypatch.setattr(text, "_collector", WorldsCollector)
    with serve_metrics() as found:
        yield found


def get(served, path, method="GET", **headers):
    connection = http.client.HTTPConnection(served.host, served.port, timeout=30)
    with contextlib.closing(connection):
        connection.request(method, f"/{path}", headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode(), answer.headers


def test_the_routes(process, served):
    world = process.add("w 0")
    status, body, headers = get(served, "metrics")
    assert (status, headers["Content-Type"]) == (200, text.PLAIN)
    assert 'multiworld_world_active{world="w 0"} 1.0' in body
    assert headers["Cache-Control"] == "no-store"
    status, body, headers = get(served, "metrics", Accept="application/openmetrics-text;version=1.0.0")
    assert (status, headers["Content-Type"], body.endswith("# EOF\n")) == (200, text.OPENMETRICS, True)
    assert get(served, "live")[:2] == (200, "ok\n")
    assert get(served, "ready")[:2] == (200, "ok\n")
    world.breaks()
    status, body, _ = get(served, "ready")
    assert status == 503
    assert body.startswith("world 'w 0': broken")
    process.add("w1")
    assert get(served, "ready?world=w1")[0] == 200
    assert get(served, "ready?world=w1&world=w%200")[0] == 503
    assert get(served, "ready?world=")[:2] == (503, "world '': not joined\n")
    status, body, _ = get(served, "metrics", method="HEAD")
    assert (status, body) == (200, "")
    for path in ("", "metrics/", "etc/passwd"):
        assert get(served, path)[:2] == (404, "see /metrics, /live and /ready\n")
    assert get(served, "metrics", method="POST")[0] == 501


def test_a_failure_is_an_answer_without_its_text(process, served, monkeypatch, caplog):
    def fails(accept):
        raise RuntimeError("secret")

    monkeypatch.setattr(module, "exposition", fails)
    status, body, _ = get(served, "metrics")
    assert (status, "secret" in body) == (500, False)
    assert "secret" in caplog.text


def connected(served, stack):
    return stack.enter_context(socket.create_connection((served.host, served.port), timeout=30))


@pytest.mark.parametrize("said", [b"", b"GET /live HTTP/1.0\r\nX: "], ids=["nothing", "a part"])
def test_the_oldest_client_that_has_not_asked_makes_room(process, served, monkeypatch, said):
    monkeypatch.setattr(module._Handler, "timeout", 60.0)
    with contextlib.ExitStack() as stack:
        oldest, second, *_ = [connected(served, stack) for _ in range(module.CLIENTS)]
        oldest.sendall(said)
        assert get(served, "live")[0] == 200
        with contextlib.suppress(ConnectionError):
            assert oldest.recv(1) == b"", "long before it is given up"
        second.sendall(b"GET /live HTTP/1.0\r\n\r\n")
        assert second.recv(12) == b"HTTP/1.0 200"


def test_too_many_clients_are_turned_away_while_all_are_answered(process, served, monkeypatch):
    asked, answer = threading.Semaphore(0), threading.Event()

    def live():
        asked.release()
        answer.wait(60)
        return Health(True, "ok")

    monkeypatch.setattr(module.health, "live", live)
    with contextlib.ExitStack() as stack:
        clients = [connected(served, stack) for _ in range(module.CLIENTS)]
        for each in clients:
            each.sendall(b"GET /live HTTP/1.0\r\n\r\n")
            assert asked.acquire(timeout=30)
        with contextlib.suppress(ConnectionError):
            assert connected(served, stack).recv(1) == b"", "long before the others are answered"
        answer.set()
        for each in clients:
            assert each.recv(12) == b"HTTP/1.0 200"
        answered = time.monotonic() + 30
        while time.monotonic() < answered:
            with contextlib.suppress(ConnectionError, http.client.HTTPException):
                assert get(served, "live")[0] == 200, "they have gone"
                break


def test_a_client_that_says_nothing_is_given_up(process, served, monkeypatch):
    monkeypatch.setattr(module._Handler, "timeout", 0.2)
    with contextlib.ExitStack() as stack:
        for each in [connected(served, stack) for _ in range(module.CLIENTS)]:
            assert each.recv(1) == b""
    assert get(served, "live")[0] == 200


def test_a_client_that_says_a_byte_now_and_then_keeps_no_place(process, served, monkeypatch):
    monkeypatch.setattr(module._Handler, "timeout", 0.5)
    said = b"GET /live HTTP/1.0\r\n" + b"X: y\r\n" * 100
    assert httpskit.seconds_until_dropped((served.host, served.port), said, slowly=True) < 10.0
    assert get(served, "live")[0] == 200


def test_without_descriptors_it_pauses_and_closing_ends_the_pause(process, served, monkeypatch):
    tried = threading.Semaphore(0)

    def none_is_free(server):
        tried.release()
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(module, "_PAUSE", 60.0)
    monkeypatch.setattr(socketserver.TCPServer, "get_request", none_is_free)
    with socket.create_connection((served.host, served.port), timeout=30):
        assert tried.acquire(timeout=30)
        assert not tried.acquire(timeout=0.2), "once in a pause"
        began = time.monotonic()
        served.close()
        assert time.monotonic() - began < 30
    assert not served._thread.is_alive()


def test_closing_ends_the_thread_and_frees_the_address(process, monkeypatch):
    monkeypatch.setattr(module, "recorder", process.recorder)
    served = serve_metrics("127.0.0.1:0")
    assert "m8d-metrics" in {thread.name for thread in threading.enumerate()}
    assert served.url == f"http://127.0.0.1:{served.port}/"
    with pytest.raises(MultiworldError, match="where no other process listens"):
        serve_metrics(f"127.0.0.1:{served.port}")
    served.close()
    served.close()
    assert "m8d-metrics" not in {thread.name for thread in threading.enumerate()}
    serve_metrics(f"127.0.0.1:{served.port}").close()


@pytest.mark.parametrize(
    "address",
    ["", "9400", "127.0.0.1", "127.0.0.1:x", "127.0.0.1:-1", "::1:9400", "[::1:0", "127.0.0.1:70000"],
)
def test_what_is_no_address_is_refused(address):
    with pytest.raises(MultiworldError, match="HOST:PORT"):
        serve_metrics(address)


def test_ipv6(process, monkeypatch):
    monkeypatch.setattr(module, "recorder", process.recorder)
    try:
        served = serve_metrics("[::1]:0")
    except MultiworldError:
        pytest.skip("this host has no IPv6")
    with served:
        assert served.url == f"http://[::1]:{served.port}/"
        assert get(served, "live")[0] == 200


def test_a_forked_child_keeps_no_address(process, served):
    ours, childs = socket.socketpair()
    with ours, childs:
        pid = os.fork()
        if not pid:
            childs.send(b"x")  # what is done after a fork is done
            childs.recv(1)  # until the parent has looked
            os._exit(0)
        try:
            ours.settimeout(30)
            assert ours.recv(1)
            address = (served.host, served.port)
            assert address in {each.address for each in portkit.listeners([os.getpid()])}
            assert address not in {each.address for each in portkit.listeners([pid])}
        finally:
            ours.send(b"x")
            os.waitpid(pid, 0)


WITHOUT = """
import sys
sys.modules["prometheus_client"] = None
import multiworld, multiworld.metrics as metrics
for call in (multiworld.serve_metrics, metrics.exposition, metrics.WorldsCollector):
    try:
        call()
    except multiworld.MultiworldError as error:
        print(error)
metrics.begin()
print(metrics.health.ready(), metrics.health.live(), "torch" in sys.modules)
"""


def run(program):
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, env=environ, cwd="/",
        check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


def test_without_the_extra_the_error_says_what_to_install():
    *errors, last = run(WITHOUT)
    assert len(errors) == 3
    assert all(each.endswith("pip install 'm8d[metrics]'.") for each in errors), errors
    assert last == "Health(ok=True, text='ok') Health(ok=True, text='ok') False"


def test_nothing_is_loaded_or_subscribed_before_it_is_asked_for():
    (line,) = run(
        "import sys, multiworld.metrics; from multiworld.events import bus; multiworld.serve_metrics;"
        "print('prometheus_client' in sys.modules, len(bus._subscribers))"
    )
    assert line == "False 0"


def test_it_is_public():
    assert multiworld.serve_metrics is serve_metrics
