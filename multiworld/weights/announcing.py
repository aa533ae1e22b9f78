"""Announcements of engines to the trainer: a list of their names in the store where worlds meet.

Beside it stands which publisher takes the list: the newest one.
"""

from __future__ import annotations

import contextlib
import json
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from multiworld import settings
from multiworld._net.stores.opening import in_time_for, open_in_time
from multiworld.errors import StoreUnreachableError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch._C._distributed_c10d import Store

    from multiworld._join.arguments import JoinPlan

__all__ = ["FUNCTION", "Announcements", "present"]

FUNCTION = "tcp://store:1"
"""Stands in a plan for the address that a function tells."""

_NOTHING = "\x01nothing"  # no list starts like this: compare_set returns the value where it does not fit
_TRIES = 100


def present(plan: JoinPlan, store: object) -> JoinPlan:
    """Return a plan with the store's present address, where `store` is a function that tells it.

    Such a store may move, so it is served by no process that takes part.
    """
    return replace(plan, store=store(), served=True) if callable(store) else plan


class Announcements:
    """The list of one publisher.

    Args:
        name: of the publisher.
        store: as for `multiworld.join`, what `present` says.
        serve: whether this process serves it.
        timeout: seconds to wait for the store.
        cancelled: asked whether to give up.

    Raises:
        JoinError: the store cannot be opened.
    """

    def __init__(
        self, name: str, store: str | Store, *, serve: bool, timeout: float, cancelled: Callable[[], bool]
    ) -> None:
        deadline = time.monotonic() + timeout
        self._name = name
        self._handle = open_in_time(store, world=name, serve=serve, deadline=deadline, cancelled=cancelled)
        self._timeout = timeout
        self._cancelled = cancelled
        self._key = f"m8d-weights/{settings.run_id()}@{name}/waiting"
        self._holder = f"m8d-weights/{settings.run_id()}@{name}/publisher"

    def claim(self, publisher: str) -> None:
        """Let a publisher take the list from now on; an older one sees that in `holder`.

        Raises:
            StoreUnreachableError: the store does not answer.
        """
        with self._translated():
            self._call("set", self._holder, publisher)

    def holder(self, publisher: str) -> str:
        """Return which publisher takes the list; this one where none does, as in a store that began anew.

        Raises:
            StoreUnreachableError: the store does not answer.
        """
        with self._translated():
            return self._compare_set(self._holder, "", publisher)

    def announce(self, seat: str) -> None:
        """Put an engine on the list.

        Raises:
            StoreUnreachableError: the store does not answer.
        """
        self._change(lambda seats: sorted({*seats, seat}))

    def take(self) -> list[str]:
        """Return the engines on the list, and empty it.

        Raises:
            StoreUnreachableError: the store does not answer.
        """
        return self._change(lambda _: [])

    def close(self) -> None:
        """Release the store. Idempotent."""
        self._handle.close()

    def _change(self, change: Callable[[list[str]], list[str]]) -> list[str]:
        """Replace the list, and return what it was."""
        with self._translated():
            seen = self._compare_set(self._key, _NOTHING, _NOTHING)
            for _ in range(_TRIES):
                before = [] if seen == _NOTHING else [str(each) for each in json.loads(seen)]
                after = change(before)
                if after == before:
                    return before
                text = json.dumps(after)
                now = self._compare_set(self._key, "" if seen == _NOTHING else seen, text)
                if now == text:
                    return before
                seen = now
        raise StoreUnreachableError(
            self._name, f"publisher {self._name!r}: the list of engines changed {_TRIES} times meanwhile"
        )

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, OSError, ValueError) as error:
            raise StoreUnreachableError(
                self._name,
                f"publisher {self._name!r}: the store gave {str(error)[:200]}",
                rule="Engines make themselves known there",
                next_step="See that it is served, and that nothing else writes to it",
            ) from error

    def _compare_set(self, key: str, expected: str, desired: str) -> str:
        return bytes(self._call("compare_set", key, expected, desired)).decode()

    def _call(self, function: str, *arguments: str) -> Any:
        called = getattr(self._handle.store, function)
        deadline = time.monotonic() + self._timeout
        call = in_time_for(self._handle, world=self._name, deadline=deadline, cancelled=self._cancelled)
        return called(*arguments) if call is None else call(called, *arguments)
