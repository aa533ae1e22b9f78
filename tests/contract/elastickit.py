"""How members join the world of a test, where ranks are assigned."""

from __future__ import annotations

from worldkit import HANG, PATIENCE

import multiworld as mw

__all__ = ["LONG", "enter"]

LONG = 10 * PATIENCE
"""Seconds, of each operation and join: what ends before was ended by the verdict."""


def enter(me, size, **options):
    given = {
        "seat": f"s{me.rank}",
        "store": me.store,
        "timeout": LONG,
        "hang_timeout": HANG,
        "last_call": LONG,
    }
    return mw.join("w", None, size, **(given | options))
