"""Worlds that differ from the usual one by a setting, or in that no member's memory is read."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import multiworld as mw
from benchmarks.operations.names import SETTINGS, UNREAD
from multiworld import settings
from multiworld._net.lane import memory
from multiworld.errors import MultiworldError

if TYPE_CHECKING:
    from collections.abc import Iterator


def missing(variant: str) -> str:
    """Why this version has no such variant; "" if it has."""
    if variant not in SETTINGS:
        return ""
    name, value = SETTINGS[variant]
    if name not in (settings.__doc__ or ""):
        return f"this version has no {name}"
    try:
        settings.load({name: value})
    except MultiworldError:
        return f"this version has no {name}={value}"
    return ""


def join(variant: str, rank: int, count: int, store: Any) -> mw.World:
    """Join the world of that variant; one that this version has not is joined as the usual one."""
    with contextlib.ExitStack() as inside:
        if variant == UNREAD:
            inside.enter_context(_unread())
        elif variant in SETTINGS and not missing(variant):
            name, value = SETTINGS[variant]
            inside.callback(settings.set_environment, settings.set_environment({name: value}))
        return mw.join(f"bench-{variant}", rank, count, store=store)


def never_read() -> None:
    """From now on this process reads no member's memory, as if all were on other hosts."""
    memory._readv = None  # noqa: SLF001  (there is no setting)


@contextlib.contextmanager
def _unread() -> Iterator[None]:
    """Inside, proofs that memory can be read fail, as they do where the kernel forbids it."""
    before = memory._readv  # noqa: SLF001  (there is no setting)
    memory._readv = None  # noqa: SLF001  (there is no setting)
    try:
        yield
    finally:
        memory._readv = before  # noqa: SLF001  (there is no setting)
