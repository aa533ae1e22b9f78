"""The numbers in secure mode: HTTPS, `/metrics` for clients with a certificate of the job, probes for all."""

from __future__ import annotations

import contextlib
import http.client
import socket
import time

import pytest
from kits.httpskit import connected, fetch, hello, seconds_until_dropped
from kits.tlskit import Files, authority

from multiworld.errors import MultiworldError
from multiworld.metrics import server as module
from multiworld.metrics import text
from multiworld.metrics.collector import WorldsCollector
from multiworld.metrics.server import serve_metrics

SLACK = 4.0
"""Seconds: the machine is shared."""


@pytest.fixture(scope="module")
def ours():
    return authority("job")


@pytest.fixture
def files(tmp_path, ours):
    return Files(tmp_path / "server", ours, name="server")


@pytest.fixture
def served(process, files, monkeypatch):
    monkeypatch.setattr(module, "recorder", process.recorder)
    monkeypatch.setattr(text, "_collector", WorldsCollector)
    for name, path in files.environment.items():
        monkeypatch.setenv(name, path)
    with serve_metrics() as found:
        yield found


@pytest.fixture
def ask(served, files):
    def ask(path, **more):
        return fetch((served.host, served.port), path, ca=files.ca, **more)

    return ask


def test_the_numbers_are_for_members_and_probes_are_for_all(tmp_path, process, served, ask, ours):
    assert served.url == f"https://127.0.0.1:{served.port}/"
    world = process.add("confidential")
    member = Files(tmp_path / "member", ours)
    answer = ask("/metrics", shown=member)
    assert answer.status == 200
    assert 'multiworld_world_active{world="confidential"} 1.0' in answer.body
    assert ask("/ready")[:2] == ask("/live")[:2] == (200, "ok\n")
    world.breaks()
    assert ask("/ready?world=confidential")[:2] == (503, "no\n")
    assert ask("/ready", shown=member).body.startswith("world 'confidential': broken")
    for method, path, headers in (
        ("GET", "/metrics", {}),
        ("HEAD", "/metrics", {}),
        ("GET", "/metrics?", {"Authorization": "Bearer x"}),
        ("GET", "/confidential", {}),
        ("POST", "/metrics", {}),
    ):
        answer = ask(path, method=method, headers=headers)
        assert answer.status in {403, 404, 501}
        assert "confidential" not in answer.body.replace(path, "")


def test_certificates_of_others_are_refused(tmp_path, ask, ours, caplog):
    other = ours.load("other job", ours.pem)
    for stranger in (Files(tmp_path / "job", other), Files(tmp_path / "ca", authority("job"))):
        with pytest.raises((OSError, http.client.HTTPException)):
            ask("/live", shown=stranger)
    assert "other job" in caplog.text


def test_new_files_are_used_for_the_next_connection(ask, files, ours):
    assert ask("/live").server == "server"
    files.replace(ours, name="renewed")
    deadline = time.monotonic() + 30
    while ask("/live").server != "renewed":
        assert time.monotonic() < deadline


@pytest.mark.parametrize(
    ("said", "slowly"), [(b"", False), (hello()[:50], False), (hello(), False), (hello()[:80], True)],
    ids=["nothing", "a part", "no second message", "byte by byte"],
)  # fmt: skip
def test_a_handshake_that_is_not_completed_is_cut_off(served, said, slowly, monkeypatch):
    monkeypatch.setattr(module._Handler, "timeout", 60.0)
    assert seconds_until_dropped((served.host, served.port), said, slowly=slowly) < 2.0 + SLACK


@pytest.mark.parametrize("said", [b"", b"GET /metr"], ids=["nothing", "a part"])
def test_a_stranger_that_is_silent_after_the_handshake_is_cut_off(served, files, said, monkeypatch):
    monkeypatch.setattr(module._Handler, "timeout", 60.0)
    began = time.monotonic()
    with connected((served.host, served.port), files.ca) as stranger:
        stranger.sendall(said)
        with contextlib.suppress(OSError):
            while stranger.recv(1 << 16):
                continue
    assert time.monotonic() - began < 1.0 + SLACK


@pytest.mark.parametrize("certified", [False, True], ids=["a stranger that sends", "a silent member"])
def test_others_have_their_time(tmp_path, served, files, ours, certified, monkeypatch):
    monkeypatch.setattr(module, "SILENCE", 0.5 if certified else 5.0)
    monkeypatch.setattr(module, "HANDSHAKE", 60.0)
    monkeypatch.setattr(module._Handler, "timeout", 60.0)
    request = b"GET /live HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with connected(
        (served.host, served.port), files.ca, Files(tmp_path / "m", ours) if certified else None
    ) as link:
        for at in range(0, len(request), 3):
            time.sleep(0.6)  # more than a member's silence; 7.8 s in all, more than a stranger's
            link.sendall(request[at : at + 3])
        assert link.recv(12) == b"HTTP/1.0 200"


@pytest.mark.parametrize("said", [b"", hello()], ids=["nothing", "no second message"])
def test_the_oldest_stranger_makes_room(served, ask, monkeypatch, said):
    monkeypatch.setattr(module, "HANDSHAKE", 60.0)
    with contextlib.ExitStack() as stack:
        oldest, *_ = [
            stack.enter_context(socket.create_connection((served.host, served.port), timeout=30))
            for _ in range(module.CLIENTS)
        ]
        oldest.sendall(said)
        assert ask("/live").status == 200
        with contextlib.suppress(ConnectionError):
            while oldest.recv(1 << 16):
                continue


def test_http_gets_no_answer(served):
    with socket.create_connection((served.host, served.port), timeout=30) as stranger:
        stranger.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            assert b"HTTP" not in stranger.recv(1 << 16)


def test_files_that_cannot_be_used_are_said(process, files, monkeypatch):
    for name, path in files.environment.items():
        monkeypatch.setenv(name, path)
    files.cert.write_text("none")
    with pytest.raises(MultiworldError, match="M8D_TLS_CERT"):
        serve_metrics()
