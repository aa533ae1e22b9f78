"""The page's HTTP interface: who is let in, what is answered, and the stream of what changes."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
import traceback
import unittest.mock
import warnings
from pathlib import Path

import pytest
import uvicorn
from unit.web.webkit import FakeSource, ask, read_slowly, view

from multiworld.errors import MultiworldError
from multiworld.metrics.health import Health
from multiworld.run.control.client import LauncherSilentError
from multiworld.web import connections, feed, openapi, server
from multiworld.web.server import serve
from multiworld.web.sources import RunOverError

ROOT = Path(__file__).parents[3]

WORLD = {"name": "w0", "state": "active"}


@pytest.fixture
def source():
    return FakeSource(view(worlds=[WORLD]))


@pytest.fixture
def page(source):
    with serve(source, token="t0ken", hosts=["Alpha.Example"]) as found:  # noqa: S106  (a test's)
        yield found


def stream(page):
    """The page's event stream: yields (event, data)."""
    link = http.client.HTTPConnection(page.host, page.port, timeout=30)
    link.request("GET", "/api/v1/events", headers={"Authorization": f"Bearer {page.token}"})
    answer = link.getresponse()
    assert answer.getheader("content-type").startswith("text/event-stream")
    try:
        kind = ""
        while line := answer.readline().decode():
            if line.startswith("event: "):
                kind = line[7:].strip()
            elif line.startswith("data: "):
                yield kind, json.loads(line[6:])
    finally:
        link.close()


@pytest.mark.parametrize(
    "path",
    ["/", "/static/main.js", "/api/v1/view", "/api/v1/events", "/openapi.json", "/metrics", "/nothing"],
)
def test_nobody_in_without_the_token(page, source, path):
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Cookie": f"m8d_token_{page.port}=wrong"}):
        answer = ask(page, path, headers)
        assert answer.status == 401
        assert b"process 10" not in answer.body
    assert source.asked == 0


def test_the_link_sets_a_cookie_that_scripts_cannot_read(page):
    answer = ask(page, "/?token=wrong", {})
    assert (answer.status, answer.getheader("set-cookie")) == (401, None)
    answer = ask(page, page.link.removeprefix(page.url.rstrip("/")), {})
    assert (answer.status, answer.getheader("location")) == (303, "/")
    cookie = answer.getheader("set-cookie")
    assert "httponly" in cookie.lower()
    assert "samesite=lax" in cookie.lower()
    answer = ask(page, "/api/v1/view", {"Cookie": cookie.partition(";")[0]})
    assert json.loads(answer.body)["worlds"] == [WORLD]


def test_a_name_that_was_made_to_point_here_is_refused(page):
    cookie = {"Cookie": f"m8d_token_{page.port}={page.token}"}
    assert ask(page, "/api/v1/view", {**cookie, "Host": "evil.example"}).status == 421
    assert ask(page, "/api/v1/view", {**cookie, "Host": f"alpha.example:{page.port}"}).status == 200
    bearer = {"Authorization": f"Bearer {page.token}"}
    assert ask(page, "/api/v1/view", {**bearer, "Host": "service.cluster.local"}).status == 200


def test_a_page_without_a_token_is_not_open_to_a_name_that_was_made_to_point_here(source):
    from multiworld.web.app import make_app

    guard = make_app(source, token="").build_middleware_stack()
    seen = []

    async def send(message):
        seen.append(message)

    scope = {
        "type": "http", "method": "GET", "path": "/api/v1/view", "query_string": b"", "scheme": "http",
        "server": ("127.0.0.1", 80), "headers": [(b"host", b"evil.example"), (b"authorization", b"Bearer x")],
    }  # fmt: skip
    asyncio.run(guard(scope, None, send))
    assert seen[0]["status"] == 421


def test_every_answer_has_the_headers_that_keep_a_page_closed(page):
    for path in ("/", "/api/v1/view", "/nothing", "/live"):
        answer = ask(page, path)
        assert "default-src 'none'" in answer.getheader("content-security-policy")
        assert "unsafe" not in answer.getheader("content-security-policy")
        assert answer.getheader("x-content-type-options") == "nosniff"
        assert answer.getheader("referrer-policy") == "no-referrer"
        assert answer.getheader("server") is None


def test_files_of_the_page_and_no_others(page):
    answer = ask(page, "/")
    assert answer.getheader("content-type") == "text/html; charset=utf-8"
    assert ask(page, "/static/main.js").getheader("content-type").startswith("text/javascript")
    for path in (
        "/static/app.py",
        "/static/..%2fapp.py",
        "/static/%2e%2e/server.py",
        "/static/index.html",
        "/static/",
        f"/static/{'a' * 5000}.js",
        "/static/a%00.js",
    ):
        assert ask(page, path).status == 404


def test_pending_logs_and_numbers(page):
    assert json.loads(ask(page, "/api/v1/worlds/a%2Fb/pending").body) == {
        "pending": [{"text": "all_reduce #1"}]
    }
    answer = ask(page, "/api/v1/worlds/none/pending")
    assert answer.status == 404
    assert b"'none' is not known here" in answer.body
    answer = ask(page, "/api/v1/processes/alpha%2F10/log?stream=stderr&bytes=6")
    assert answer.getheader("content-type") == "text/plain; charset=utf-8"
    assert answer.body == b"</b>\n"[-6:] or len(answer.body) == 6
    answer = ask(page, "/api/v1/processes/alpha%2F10/log?stream=stdout")
    assert answer.status == 404
    assert b"--redirects" in answer.body
    assert ask(page, "/metrics").body == b"# numbers\n"


@pytest.mark.parametrize("error", [LauncherSilentError("it hangs"), RunOverError("it has ended")])
def test_a_source_that_has_nothing_is_no_traceback(page, source, error):
    def fails(*_):
        raise error

    source.view = page._server.config.app.state.feed._view = fails
    source.pending = source.log = source.metrics = fails
    for path in ("view", "events", "worlds/w0/pending", "processes/a/log"):
        answer = ask(page, f"/api/v1/{path}")
        assert (answer.status, error.args[0].encode() in answer.body) == (503, True), path
    assert ask(page, "/metrics").status == 503


def test_numbers_without_the_library_say_what_to_do(page, source):
    def missing(accept):
        raise MultiworldError("/metrics needs x", rule="It is of an extra", next_step="pip install it")

    source.metrics = missing
    answer = ask(page, "/metrics")
    assert answer.status == 404
    assert b"pip install it" in answer.body


def test_health_is_open_and_its_reasons_are_not(page, source):
    assert ask(page, "/live", {}).status == ask(page, "/ready", {}).status == 200
    source.healthy = Health(False, "w0 is broken")
    answer = ask(page, "/live", {})
    assert (answer.status, answer.body) == (503, b"no\n")
    assert ask(page, "/live").body == b"w0 is broken\n"
    source.healthy = Health(True, "ok")
    assert ask(page, "/ready?world=a&world=gone", {}).status == 503
    assert ask(page, "/ready?world=a&world=gone").body == b"worlds ['a', 'gone']\n"


def test_the_stream_begins_with_the_view_and_goes_on_with_what_changes(page, source):
    told = stream(page)
    assert next(told) == ("view", source.now)
    broken = {"name": "w0", "state": "broken"}
    source.now = view(now=2.0, worlds=[broken])
    began = time.monotonic()
    assert next(told) == ("patch", {"now": 2.0, "worlds": [broken]})
    assert time.monotonic() - began < 1.0 + 9.0  # the machine may be busy; 0.4 s on a quiet one
    source.error = RuntimeError("the source broke")
    kind, change = next(told)
    assert kind == "patch"
    assert "the source broke" in change["set"]["note"]
    source.error = None
    source.now = view(now=3.0)
    assert next(told) == ("patch", {"now": 3.0, "set": {"note": ""}, "worlds_gone": ["w0"]})
    told.close()


def test_nothing_is_asked_while_nobody_looks(page, source):
    told = stream(page)
    next(told)
    told.close()
    quiet = None
    for _ in range(100):
        before = source.asked
        time.sleep(3 * feed.EVERY)
        if source.asked == before:
            quiet = before
            break
        source.now = view(
            now=time.time(), note=str(source.asked)
        )  # a write shows the server that it has gone
    assert quiet is not None


def test_viewers_are_bounded_and_share_one_look(page, source, monkeypatch):
    monkeypatch.setattr(feed, "MOST_VIEWERS", 3)
    all_told = [stream(page) for _ in range(3)]
    began = time.monotonic()
    assert [next(each)[0] for each in all_told] == ["view"] * 3
    assert source.asked <= 2 + (time.monotonic() - began) / feed.EVERY
    assert ask(page, "/api/v1/events").status == 503
    for each in all_told:
        each.close()


def test_who_asks_for_the_head_of_a_stream_is_no_viewer(page, source, monkeypatch):
    monkeypatch.setattr(feed, "MOST_VIEWERS", 1)
    for _ in range(5):
        link = http.client.HTTPConnection(page.host, page.port, timeout=30)
        link.request("HEAD", "/api/v1/events", headers={"Authorization": f"Bearer {page.token}"})
        assert link.getresponse().status == 200
        link.close()
    told = stream(page)
    assert next(told)[0] == "view"
    told.close()


def test_strangers_take_neither_the_page_nor_the_descriptors(page, source, monkeypatch):
    monkeypatch.setattr(connections, "MOST", 20)
    monkeypatch.setattr(connections, "FIRST", 60.0)
    told = stream(page)
    next(told)
    silent = [socket.create_connection((page.host, page.port), timeout=30) for _ in range(60)]
    for each in (silent[0], silent[40]):  # of 60, 41 have made room
        with contextlib.suppress(ConnectionResetError):
            assert each.recv(1) == b""
    until(lambda: len(page._server.server_state.connections) <= 20)
    assert ask(page, "/live", {}).status == 200
    source.now = view(note="new")
    assert next(told)[0] == "patch", "who is answered stays"
    told.close()
    silent[-1].sendall(b"GET /live HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert silent[-1].recv(12) == b"HTTP/1.1 200"
    for each in silent:
        each.close()


def test_a_further_connection_is_refused_while_all_are_answered(page, monkeypatch):
    monkeypatch.setattr(connections, "MOST", 3)
    all_told = [stream(page) for _ in range(3)]
    for each in all_told:
        next(each)
    with (
        socket.create_connection((page.host, page.port), timeout=30) as further,
        contextlib.suppress(ConnectionResetError),
    ):
        assert further.recv(1) == b""
    for each in all_told:
        each.close()


def test_a_request_that_is_not_completed_is_cut_off(page, monkeypatch):
    monkeypatch.setattr(connections, "FIRST", 0.3)
    for said in (b"", b"GET / HTTP/1.1\r\n", b"GET /live HTTP/1.1\r\nHost: localhost\r\n\r\nGET /live"):
        with socket.create_connection((page.host, page.port), timeout=30) as stranger:
            stranger.sendall(said)
            with contextlib.suppress(ConnectionResetError):
                while stranger.recv(1 << 16):
                    continue
    told = stream(page)
    next(told)
    time.sleep(0.6)  # a stream goes on for as long as it likes
    assert len(page._server.server_state.connections) == 1
    told.close()


@pytest.fixture
def small(page):
    """Connections that hold little of what is not read: both ends' buffers are small."""
    page._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    opened = []

    def connect():
        opened.append(socket.socket())
        opened[-1].setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        opened[-1].settimeout(30)
        opened[-1].connect((page.host, page.port))
        return opened[-1]

    yield connect
    for each in opened:
        each.close()


def fill(page, connect, count):
    """Have strangers that ask on and on, and do not read, until no more can be written to them."""
    known = page._server.server_state.connections
    strangers = [connect() for _ in range(count)]
    until(lambda: len(known) == count)
    for each in strangers:
        each.setblocking(False)
    asks = b"GET /nothing HTTP/1.1\r\nHost: localhost\r\n\r\n" * 100
    left = dict.fromkeys(strangers, asks)

    def full():
        for each, rest in left.items():
            with contextlib.suppress(BlockingIOError):
                left[each] = rest[each.send(rest) :] or asks
        return all(each.flow.write_paused for each in tuple(known))

    until(full)
    return strangers


def test_strangers_that_do_not_read_make_room(page, small, monkeypatch):
    monkeypatch.setattr(connections, "MOST", 3)
    monkeypatch.setattr(connections, "FIRST", 60.0)
    fill(page, small, 3)
    assert ask(page, "/live", {}).status == 200


def test_who_does_not_read_is_cut_off(page, small, monkeypatch):
    fill(page, small, 1)
    (held,) = page._server.server_state.connections
    assert held.waits_from is not None
    monkeypatch.setattr(connections, "FIRST", 0.3)
    held.loop.call_soon_threadsafe(held._wait)
    until(lambda: not page._server.server_state.connections)


def test_who_reads_slowly_reads_on(page, source, small, monkeypatch):
    monkeypatch.setattr(connections, "FIRST", 2.0)
    size = 1 << 20
    source.metrics = lambda accept: (b"#" * size, "text/plain")
    reader = small()
    reader.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer t0ken\r\n")
    reader.sendall(b"Connection: close\r\n\r\n")
    assert read_slowly(reader, 1 << 13, 0.1, 5).endswith(b"#" * size)


def until(holds):
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_programs_own_server_keeps_its_log(source):
    handler = logging.NullHandler()
    log = logging.getLogger("uvicorn.access")
    log.addHandler(handler)
    seen = []
    log.addFilter(lambda record: seen.append(record) or True)
    try:
        with serve(source) as page:
            ask(page, "/live")
            assert handler in log.handlers
        assert (log.propagate, seen) == (True, [])
    finally:
        log.removeHandler(handler)
        log.filters.clear()


@pytest.mark.parametrize("token", ["a+b/c=&d#e", "%41", "'\"?"])
def test_any_printable_token_works(source, token):
    with serve(source, token=token) as page:
        assert ask(page, "/api/v1/view").status == 200
        answer = ask(page, page.link.removeprefix(page.url.rstrip("/")), {})
        assert answer.status == 303
        cookie = answer.getheader("set-cookie").partition(";")[0]
        assert ask(page, "/api/v1/view", {"Cookie": cookie}).status == 200
        assert token not in repr(page)


def test_what_json_has_not_is_shown_all_the_same():
    """A path need not be UTF-8, and a worker may say of its world that something is not a number."""
    said = view(title="caf\udce9.py", worlds=[{**WORLD, "members": [float("nan"), 1.5]}])
    with serve(FakeSource(said)) as page, contextlib.closing(stream(page)) as events:
        found = json.loads(ask(page, "/api/v1/view").body, parse_constant=pytest.fail)
        assert (found["title"], found["worlds"][0]["members"]) == ("caf\udce9.py", [None, 1.5])
        assert next(events) == ("view", found)


def test_a_token_from_a_file_has_no_end_of_line(source, monkeypatch):
    monkeypatch.setenv("M8D_WEB_TOKEN", "known\n")
    with serve(source) as page:
        assert page.token == "known"  # noqa: S105  (a test's)
        assert ask(page, "/api/v1/view").status == 200


@pytest.mark.parametrize("token", ["", "two words", "t\u00f6ken", "line\n"])
def test_tokens_that_are_none(source, token):
    with pytest.raises(MultiworldError, match="printable ASCII"):
        serve(source, token=token)


def test_a_forked_child_does_not_keep_the_port(source, tmp_path):
    """The child tells by a file: of a descriptor from before the fork it could not say that it was closed."""
    ended, told = [], tmp_path / "told"
    page = serve(source, at_end=lambda: ended.append(os.getpid()))
    held = http.client.HTTPConnection(page.host, page.port, timeout=30)
    held.request("GET", "/live")
    held.getresponse().read()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads
        child = os.fork()
    if not child:
        code = 1
        try:
            links = []
            for each in Path("/proc/self/fd").iterdir():
                # Closed meanwhile by the collector, or in a thread that another package begins in a child.
                with contextlib.suppress(FileNotFoundError):
                    links.append(os.readlink(each))  # noqa: PTH115
            table = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()]
            mine = {row[9] for row in table if row[1].endswith(f":{page.port:04X}")}
            kept = [each for each in links if each.startswith("socket:") and each[8:-1] in mine]
            told.write_text(repr((kept, ended == [os.getpid()])))
            code = 0
        except BaseException:  # noqa: BLE001  (told to the parent)
            told.write_text(traceback.format_exc())
        finally:
            os._exit(code)
    try:
        code = os.waitpid(child, 0)[1]
        assert (told.read_text() if told.exists() else "nothing", code) == ("([], True)", 0)
        assert ask(page, "/live").status == 200
    finally:
        held.close()
        page.close()


def test_the_program_ends_while_a_look_takes_long(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(SLOW)
    done = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, timeout=60, check=True,
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"},
    )  # fmt: skip
    assert float(done.stdout) < 20, "the look takes 40 s"
    assert done.stderr == ""


SLOW = """
import atexit, threading, time, urllib.request
from unit.web.webkit import FakeSource, view
from multiworld.web.server import serve

class Slow(FakeSource):
    def view(self):
        began.set()
        time.sleep(40)

began = threading.Event()
page = serve(Slow(view()), token="t")
request = urllib.request.Request(page.url + "api/v1/view", headers={"Authorization": "Bearer t"})
def ask():
    try:
        urllib.request.urlopen(request)
    except OSError:
        return
threading.Thread(target=ask, daemon=True).start()
assert began.wait(30)
at = time.monotonic()
atexit.register(lambda: print(time.monotonic() - at))
"""


def test_closing_ends_the_streams(source):
    page = serve(source)
    told = stream(page)
    next(told)
    began = time.monotonic()
    page.close()
    assert list(told) == []
    assert time.monotonic() - began < 30
    assert not [each for each in threading.enumerate() if each.name == "m8d-web"]
    page.close()


@pytest.mark.parametrize("address", ["", "8080", "localhost:", "localhost:99999", "localhost:x", ":80"])
def test_addresses_that_are_none(source, address):
    with pytest.raises(MultiworldError, match="HOST:PORT"):
        serve(source, address)


def served():
    return [each for each in threading.enumerate() if each.name == "m8d-web"]


def test_an_interrupt_while_it_starts_leaves_nothing(source, monkeypatch):
    before = served()
    monkeypatch.setattr(server.time, "sleep", unittest.mock.Mock(side_effect=KeyboardInterrupt))
    with monkeypatch.context() as slow, pytest.raises(KeyboardInterrupt):
        slow.setattr(uvicorn.Server, "started", property(lambda _: False, lambda *_: None), raising=False)
        serve(source)
    assert served() == before


def test_a_process_without_a_thread_for_it_is_told(source, monkeypatch):
    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", unittest.mock.Mock(side_effect=RuntimeError("no thread")))
        with pytest.raises(MultiworldError, match="was not served: no thread"):
            serve(source)


def test_an_address_that_is_taken(source, page):
    with pytest.raises(MultiworldError, match="in use"):
        serve(source, f"127.0.0.1:{page.port}")


def test_the_document_has_every_route(page):
    told = json.loads(ask(page, "/openapi.json").body)
    assert told["openapi"].startswith("3.1")
    assert set(told["paths"]) == {
        "/api/v1/view", "/api/v1/events", "/api/v1/worlds/{name}/pending", "/api/v1/processes/{id}/log",
        "/metrics", "/live", "/ready",
    }  # fmt: skip


def conforms(value, schema):
    """Whether JSON is what a schema says, as far as the document's schemas go."""
    if "$ref" in schema:
        return conforms(value, openapi.document()["components"]["schemas"][schema["$ref"].rpartition("/")[2]])
    if "anyOf" in schema:
        return any(conforms(value, each) for each in schema["anyOf"])
    if "enum" in schema:
        return value in schema["enum"]
    kinds = {
        "object": dict,
        "array": list,
        "string": str,
        "integer": int,
        "number": int | float,
        "boolean": bool,
    }
    kind = schema.get("type")
    if kind == "null":
        return value is None
    if not isinstance(value, kinds[kind]):
        return False
    if kind == "array":
        return all(conforms(each, schema["items"]) for each in value)
    if kind == "object" and "properties" in schema:
        return set(value) == set(schema["properties"]) and all(
            conforms(value[key], each) for key, each in schema["properties"].items()
        )
    return True


def test_views_are_what_the_document_says():
    from unit.web.test_views import process_views, run_views

    for each in (*process_views(), *run_views()):
        assert conforms(each, {"$ref": "View"}), json.dumps(each, indent=1)
