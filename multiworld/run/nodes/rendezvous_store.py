"""The rendezvous store as the agents use it: JSON notes, with a deadline for every call.

Only ``set``, ``get``, ``add`` and ``check`` are used: torch's stores for etcd have nothing else. A store
whose host is gone may not answer at all, and torch's clients then wait for ever: so each call has a thread of
its own, and while one hangs no other is made.
"""

from __future__ import annotations

import json
import threading
import time
import uuid
from typing import TYPE_CHECKING, Any, TypeVar

from torch.distributed.elastic.rendezvous import RendezvousStoreInfo

from multiworld._net.patience import NoAnswerError, NoThreadError, in_time

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed import Store  # type: ignore[attr-defined, unused-ignore]

__all__ = ["RendezvousStore", "StoreSilentError"]

T = TypeVar("T")

_PREFIX = "m8d/nodes/"
_BEGUN = _PREFIX + "begun"
_AHEAD = 3  # a writer that died after its claim leaves a number without text: readers look past it


class StoreSilentError(Exception):
    """The store did not answer, or answered with an error.

    Args:
        detail: the error, or how long there was no answer.
        gone: it will not answer any more.
    """

    def __init__(self, detail: str, *, gone: bool = False) -> None:
        self.gone = gone
        super().__init__(detail)


class RendezvousStore:
    """The notes of one rendezvous round.

    torch numbers the rounds of a run id from 0 again once its state has expired (etcd, two hours), and the
    store still has the notes of the earlier round of that number. So the first node begins notes under an id,
    and the others follow it.

    Args:
        store: of the round.
        patience: seconds that one call may take.
        returns: whether the store may work again after an error; torch's TCPStore clients do not connect
            twice.

    Attributes:
        answered: called after each call that the store answered, in the caller's thread.
    """

    def __init__(self, store: Store, *, patience: float = 5.0, returns: bool = False) -> None:
        self._store = store
        self._returns = returns
        self._patience = patience
        self._hangs: threading.Event | None = None
        self._begun = ""
        self.answered: Callable[[], None] = lambda: None

    def settle(self, seconds: float) -> bool:
        """Wait until a call that was given up has come back; return whether none is under way.

        Python ends a daemon thread that comes back from C++ while the interpreter ends, and torch's stores
        make that a SIGABRT.
        """
        return self._hangs is None or self._hangs.wait(seconds)

    def begin(self) -> str:
        """Begin notes under an id of their own, the first time, and return it.

        Raises:
            StoreSilentError: the store does not answer. All other methods raise it too.
        """
        if not self._begun:
            begun = uuid.uuid4().hex
            self._call(lambda: self._store.set(_BEGUN, begun))
            self._begun = begun
        return self._begun

    def follow(self) -> str:
        """Follow the notes that were begun last, and return their id; "" if there are none.

        They may be those of an earlier run, until this round's first node begins others.
        """
        text = self._call(lambda: self._store.get(_BEGUN) if self._store.check([_BEGUN]) else b"")
        self._begun = text.decode(errors="replace")
        return self._begun

    def write(self, key: str, data: dict[str, Any]) -> None:
        """Write a note."""
        text = json.dumps(data, separators=(",", ":"))
        self._call(lambda: self._store.set(self._key(key), text))

    def tell_master(self, address: str, port: int) -> None:
        """Write the address of torch's store for workers, which torch's handlers leave out in some rounds.

        From its second round on, a node that was the first before does not write it, and nodes that are new
        in the round would wait for it in ``next_rendezvous`` until the store's timeout (torch 2.13).
        """
        self._call(lambda: self._store.set(RendezvousStoreInfo.MASTER_ADDR_KEY, address))
        self._call(lambda: self._store.set(RendezvousStoreInfo.MASTER_PORT_KEY, str(port)))

    def read(self, key: str) -> dict[str, Any] | None:
        """Return a note; None if it is not there. Never waits for it."""

        def read() -> bytes | None:
            # A blocking get would keep every other call of this process's client waiting.
            return self._store.get(self._key(key)) if self._store.check([self._key(key)]) else None

        text = self._call(read)
        if text is None:
            return None
        try:
            data = json.loads(text)
        except ValueError as error:
            raise StoreSilentError(
                f"{key} in the rendezvous store is no note of an agent: {error}"
            ) from error
        return data if isinstance(data, dict) else None

    def count(self, key: str) -> int:
        """Count up from 1, and return the new count: each caller gets another one."""
        return int(self._call(lambda: self._store.add(self._key(key), 1)))

    def newest(self, key: str, after: int) -> tuple[int, dict[str, Any]] | None:
        """Return number and text of the last of the notes ``key/<number>`` that come after `after`."""
        found: tuple[int, dict[str, Any]] | None = None
        number = after
        while number - (found[0] if found else after) < _AHEAD:
            number += 1
            if (data := self.read(f"{key}/{number}")) is not None:
                found = (number, data)
            elif not self._exists(f"{key}/claims/{number}"):
                break  # unclaimed: there is no later number
        return found

    def add(self, key: str, number: int, data: dict[str, Any]) -> bool:
        """Write ``key/<number>``; return False, without writing, if another node claimed the number."""
        if self.count(f"{key}/claims/{number}") != 1:
            return False
        self.write(f"{key}/{number}", data)
        return True

    def _key(self, key: str) -> str:
        return f"{_PREFIX}{self._begun}/{key}" if self._begun else _PREFIX + key

    def _exists(self, key: str) -> bool:
        return bool(self._call(lambda: self._store.check([self._key(key)])))

    def _call(self, function: Callable[[], T]) -> T:
        if self._hangs is not None and not self._hangs.is_set():
            raise StoreSilentError("it has not answered the last call yet")
        over = threading.Event()

        def run() -> T:
            try:
                return function()
            finally:
                over.set()

        try:
            found = in_time(
                run,
                deadline=time.monotonic() + self._patience,
                clock=time.monotonic,
                hurry=lambda: False,
                give_up=lambda: None,
                parting=0.1,
                last_words=0.0,
            )
        except NoThreadError as error:  # the store was not asked
            raise StoreSilentError(f"{error}") from error
        except NoAnswerError as error:
            self._hangs = over
            raise StoreSilentError(f"{error}") from error
        except Exception as error:  # torch's, etcd's, urllib3's: which ones depends on the store
            raise StoreSilentError(
                f"{type(error).__name__}: {str(error).partition(chr(10))[0]}", gone=not self._returns
            ) from error
        self.answered()
        return found
