"""Resolving a stack on a thread of torch's does not import torch's compiler; Python code gets it as ever."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
BEGIN = """
import _thread, sys, time
sys.path[:0] = [sys.argv[1]]
import torch
from multiworld._c10d.nccl import compiler_import
from multiworld._c10d.monkeypatch import Patches

plain = torch.__getattr__
patches = Patches()

def asked_by_cxx():
    '''What C++ code finds on a thread without Python code: `hasattr` is called by no frame.'''
    found = []
    _thread.start_new_thread(found.extend, (map(hasattr, [torch], ["_inductor"]),))
    deadline = time.monotonic() + 60
    while not found:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found[0], "torch._inductor" in sys.modules
"""


def run(program: str) -> None:
    """Run a program in a process of its own: what is imported stays."""
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + program, str(ROOT)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_torch_itself_imports_it():
    """The day this fails, torch no longer does, and there is nothing left to prevent."""
    run("assert asked_by_cxx() == (True, True)")


def test_it_is_not_imported_on_a_thread_of_torchs():
    run("compiler_import.install(patches); assert asked_by_cxx() == (False, False)")


def test_python_code_gets_it():
    run("""
compiler_import.install(patches)
assert torch._inductor.compile
assert asked_by_cxx() == (True, True)
""")


def test_it_is_withheld_from_a_thread_that_says_so():
    run("""
import threading
compiler_import.install(patches)
with compiler_import.withheld():
    assert not hasattr(torch, "_inductor")
    others = []
    with compiler_import.withheld():
        pass
    assert not hasattr(torch, "_inductor")
    assert "torch._inductor" not in sys.modules
    thread = threading.Thread(target=lambda: others.append(hasattr(torch, "_inductor")))
    thread.start()
    thread.join(60)
    assert others == [True]
""")


def test_what_torch_has_not_is_missed_as_ever_and_all_is_put_back():
    run("""
compiler_import.install(patches)
try:
    torch.no_such_thing
except AttributeError as error:
    assert "no_such_thing" in str(error)
else:
    raise AssertionError
assert torch._dynamo.config
patches.undo()
assert torch.__getattr__ is plain
""")
