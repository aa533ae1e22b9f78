"""The page of ``m8d-run --web`` is served as long as its launcher lives."""

from __future__ import annotations

import queue
import subprocess
import sys
import threading

import pytest

from multiworld.run import web_page
from multiworld.run.events import EventBus
from multiworld.run.web_page import WebPage

PATIENCE = 60.0

PAGE = """#!{python}
import pathlib, sys
starts = pathlib.Path({starts!r})
with starts.open("a") as file:
    file.write("x")
if len(starts.read_text()) in {served}:
    print("http://page/?token=t", flush=True)
if len(starts.read_text()) < {stays}:
    sys.exit(9)
sys.stdin.read()
"""


@pytest.fixture
def page(tmp_path, monkeypatch):
    """Serves a page whose process says its address at these starts, and stays from one of them on."""
    pages = []

    def begin(served, stays):
        program = tmp_path / "page"
        starts = str(tmp_path / "starts")
        program.write_text(PAGE.format(python=sys.executable, starts=starts, served=served, stays=stays))
        program.chmod(0o700)
        monkeypatch.setattr(sys, "executable", str(program))
        bus, said = EventBus(), queue.Queue()
        bus.subscribe(lambda event: said.put(event.text))
        pages.append(WebPage("/none", "127.0.0.1:0", bus))
        return said

    monkeypatch.setattr(web_page, "_AGAIN", 0.01)
    yield begin
    for each in pages:
        each.close()


SERVED = "page: http://page/?token=t"
ENDED = "the page has ended: exit code 9. It is served anew"


def test_a_page_that_was_served_once_is_served_again_however_often_it_fails(page):
    said = page(served={1, 4}, stays=4)
    found = [said.get(timeout=PATIENCE) for _ in range(5)]
    assert found == [SERVED, ENDED, ENDED, ENDED, SERVED]


def test_a_page_that_never_was_there_is_given_up(page):
    said = page(served=(), stays=2)
    assert said.get(timeout=PATIENCE) == "the page has ended: exit code 9. m8d-run web serves it anew"


def test_a_page_that_cannot_be_started_for_a_while_is_served_then(page, monkeypatch):
    there, tries = subprocess.Popen, []

    def scarce(*arguments, **more):
        tries.append(arguments)
        if len(tries) in {2, 3}:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return there(*arguments, **more)

    monkeypatch.setattr(subprocess, "Popen", scarce)
    said = page(served={1, 2}, stays=2)
    refused = "the page cannot be started: [Errno 11] Resource temporarily unavailable. It is tried again"
    found = [said.get(timeout=PATIENCE) for _ in range(5)]
    assert found == [SERVED, ENDED, refused, refused, SERVED]


@pytest.mark.parametrize("missing", [{3}, {4}, {3, 5}], ids=["the reader", "the teller", "both"])
def test_a_page_that_has_no_thread_for_a_while_is_served_then(page, monkeypatch, missing):
    start, tries, pages = threading.Thread.start, [], []

    def scarce(thread):
        if thread.name.startswith("m8d-web-page"):
            tries.append(thread)
            if len(tries) in missing:
                raise RuntimeError("can't start new thread")
        start(thread)

    class Kept(subprocess.Popen):
        def __init__(self, *arguments, **more):
            super().__init__(*arguments, **more)
            pages.append(self)

    monkeypatch.setattr(threading.Thread, "start", scarce)
    monkeypatch.setattr(subprocess, "Popen", Kept)
    said = page(served=range(9), stays=2)
    refused = ["the page cannot be started: can't start new thread. It is tried again"] * len(missing)
    found = [said.get(timeout=PATIENCE) for _ in range(3 + len(missing))]
    assert found == [SERVED, ENDED, *refused, SERVED]
    assert [each.returncode for each in pages] == [9, *[-9] * len(missing), None]
    for each in pages[1:-1]:
        assert each.stdin.closed
        assert each.stdout.closed
