"""The program's end waits for threads that load a public name of multiworld, and no longer than `LONGEST`."""

from __future__ import annotations

import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from multiworld import loading
from multiworld.background_threads import GRACE
from multiworld.registry import EXIT_BUDGET

# A module takes half a second to be found; the program's last line runs meanwhile.
ENDS_MEANWHILE = """
import sys, threading, time
import multiworld
{before}

begun, ended = threading.Event(), threading.Event()

class Slow:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == {module!r}:
            begun.set()
            ended.wait(60)
            time.sleep({seconds})
            print("found", flush=True)

def load():
    {name}

sys.meta_path.insert(0, Slow)
threading.Thread(target=load, daemon=True).start()
begun.wait()
print("end", flush=True)
ended.set()
"""


LONG = "from multiworld import loading; loading.LONGEST = 100.0"  # a busy machine: and torch is loaded


def run(**parts: str) -> SimpleNamespace:
    program = ENDS_MEANWHILE.format(**{"before": "", "seconds": "0.5", **parts})
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False
    )
    return SimpleNamespace(code=done.returncode, lines=done.stdout.split("\n")[:-1], error=done.stderr)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("multiworld._join.join", "multiworld.join"),
        ("multiworld.errors", "from multiworld import JoinError"),
        (
            "multiworld.integrations.custom_group",
            "from multiworld.integrations import init_custom_process_group",
        ),
    ],
)
def test_the_end_waits_for_a_daemon_thread_that_loads(module, name):
    done = run(module=module, name=name, before=f"import multiworld.integrations\n{LONG}")
    assert (done.code, done.lines) == (0, ["end", "found"]), done.error


@pytest.mark.parametrize("module", ["torch", "multiworld._generation.generation", "multiworld._join.steps"])
def test_the_end_waits_for_what_a_first_join_loads(module):
    pytest.importorskip("torch")
    done = run(
        before=LONG,
        module=module,
        name="multiworld.join('w', 0, 2, store='tcp://127.0.0.1:1', timeout=5)",
    )
    assert (done.code, done.lines) == (0, ["end", "found"]), done.error


def test_the_end_waits_for_a_bounded_time():
    done = run(
        before="from multiworld import loading; loading.LONGEST = 0.2",
        module="multiworld._join.join",
        name="multiworld.join",
        seconds="50",
    )
    assert (done.code, done.lines) == (0, ["end"]), done.error


def test_the_end_waits_as_long_as_for_joins():
    """The module says so by a number of its own: what it would import for theirs is loaded later."""
    assert loading.LONGEST == EXIT_BUDGET + GRACE


def test_what_cannot_be_loaded_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(loading, "_hooked", [True])
    seen = []

    def fails():
        try:
            loading.load("multiworld.missing")
        except ModuleNotFoundError as error:
            seen.append(error.name)

    thread = threading.Thread(target=fails)
    thread.start()
    thread.join()
    assert (seen, loading._loading) == (["multiworld.missing"], [])


def test_a_thread_that_is_gone_is_not_waited_for(monkeypatch):
    thread = threading.Thread(target=int)  # as one of the parent is in a forked child
    thread.start()
    thread.join()
    monkeypatch.setattr(loading, "_loading", [thread])
    monkeypatch.setattr(loading.time, "sleep", lambda _: pytest.fail("waits"))
    loading._wait()


def test_the_main_thread_needs_no_hook(monkeypatch, tmp_path):
    monkeypatch.setattr(loading, "before_threads_are_joined", lambda _: pytest.fail("hooked"))
    monkeypatch.setattr(loading, "_hooked", [])
    (tmp_path / "m8d_not_loaded_before.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert loading.load("m8d_not_loaded_before")
