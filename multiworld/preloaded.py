"""Imports what joins and messages need, for ``m8d-run --preload multiworld``.

The package loads its modules when they are first used, which takes a first join about 0.1 s.
"""

from __future__ import annotations

import encodings.idna  # for the first name that is looked up

import multiworld._generation.generation
import multiworld._join.steps
import multiworld._net.stores.store
import multiworld.aio
import multiworld.joinall
import multiworld.watchdog

__all__ = ["encodings", "multiworld"]
