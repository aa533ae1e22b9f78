"""Keeps torch from importing its compiler where it only resolves a stack.

Torch's Flight Recorder keeps the stack of each NCCL operation, and resolves its Python frames when they are
asked for: in a dump, and on a thread of torch's watchdog when an operation has failed. It asks ``torch`` for
``_inductor`` there, for the frames of code that was compiled. Asking imports it: 885 modules in 2.12.1, a
second or more with the GIL, and 140 MB. Where the program ends meanwhile, Python ends that thread inside of
C++, and the process ends by SIGABRT or SIGSEGV (docs/upstream/legacy-stack-at-exit.md).

What is not imported has compiled nothing. So the answer here is that there is none.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from multiworld._c10d.monkeypatch import Patches

__all__ = ["install", "withheld"]

_COMPILER = "_inductor"


class _Asking(threading.local):
    withheld = False


_asking = _Asking()


def install(patches: Patches) -> None:
    """Answer C++ code that asks for the compiler on a thread of its own.

    Python code gets it as before. So does all code once it is imported, for torch then has the attribute.

    Args:
        patches: the router's, which undoes it.
    """
    plain: Callable[[str], Any] | None = vars(torch).get("__getattr__")
    if plain is not None:
        patches.set(torch, "__getattr__", _answering(plain))


def _answering(plain: Callable[[str], Any]) -> Callable[[str], Any]:
    def __getattr__(name: str) -> Any:  # noqa: N807  (the module's)
        if name == _COMPILER and (_asking.withheld or _asked_by_cxx()):
            raise AttributeError(f"module 'torch' has no attribute {name!r} as long as it is not imported")
        return plain(name)

    return __getattr__


def _asked_by_cxx() -> bool:
    """Whether no Python code called what called this."""
    try:
        sys._getframe(2)
    except ValueError:  # the stack is not that deep
        return True
    return False


@contextlib.contextmanager
def withheld() -> Iterator[None]:
    """Let nothing that this thread calls import the compiler, where `install` was called."""
    before, _asking.withheld = _asking.withheld, True
    try:
        yield
    finally:
        _asking.withheld = before
