"""Record of a world in its store: read, replace and count without waiting for keys.

Reading is a compare-and-set that cannot succeed: one round trip that does not wait, as ``get`` would, if the
key vanishes meanwhile. (So do `torch.distributed`'s HashStore, TCPStore and FileStore, alone and under a
PrefixStore, in 2.4 to 2.15; a test asks them.)
"""

from __future__ import annotations

import random
import weakref
from typing import TYPE_CHECKING, Protocol, TypeVar
from urllib.parse import quote

from multiworld._core.membership.carrying import carried
from multiworld._core.membership.ledger import Ledger, decode, encode
from multiworld._core.membership.serving import NEVER
from multiworld.errors import JoinError, StoreUnreachableError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from multiworld._core.membership.admission import Move

__all__ = ["StoreLike", "WorldRecord"]

_NOTHING = "\x01nothing"  # no record starts like this: compare_set returns it where the key is missing

T = TypeVar("T")


def _quoted(name: str) -> str:
    return quote(str(name), safe="", errors="surrogatepass")


class StoreLike(Protocol):
    """The methods used of a `torch.distributed.Store`."""

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        """Replace `expected` ("": no such key) by `desired`; return the value then, or `expected`."""

    def add(self, key: str, amount: int, /) -> int:
        """Add to a counter."""

    def delete_key(self, key: str, /) -> bool:
        """Delete a key; False if there is none."""


class WorldRecord:
    """One world's record in a store, and its last known value.

    Every method makes round trips, raises `StoreUnreachableError` if the store fails, and `JoinError` if what
    is there cannot be read. Several threads may use it: what they decide on is always what they replace.

    Args:
        store: see `StoreLike`.
        world: its name.
        sleep: waits that many seconds.
        run: id of the run, whose worlds are kept apart from those of others; "" for none.
        me: this member's claim, which it carries over to another server; "" for none.
    """

    def __init__(
        self, store: StoreLike, world: str, sleep: Callable[[float], None], run: str = "", me: str = ""
    ) -> None:
        self.root = f"m8d/{_quoted(run)}@{_quoted(world)}" if run else f"m8d/{_quoted(world)}"
        self._store = store
        self._world = world
        self._sleep = sleep
        self._key = f"{self.root}/record"
        self._me = me
        self._seen = (
            "",
            Ledger(),
        )  # one tuple, replaced atomically for other threads
        on_move = getattr(store, "on_move", None)  # a store that is a list of addresses
        if on_move is not None:
            on_move(weakref.WeakMethod(self.carry))

    @property
    def ledger(self) -> Ledger:
        """The record as last read; empty at first. No round trip."""
        return self._seen[1]

    def read(self) -> bool:
        """Read the record; return whether it changed."""
        before = self._seen
        return self._found(self._peek(self._key)) is not before

    def apply(self, step: Callable[[Ledger], Move]) -> Move:
        """Replace the record by the result of `step`; retry while other members write first."""
        seen, fresh, tries = self._found(self._seen[0]), False, 0
        while True:
            raw, ledger = seen
            move = step(ledger)
            if move.ledger is not ledger:
                text = encode(move.ledger)
                found = self._compare_set(self._key, raw, text)
                if found == text:
                    self._seen = (text, move.ledger)
                    return move
                # Where the answer is what was expected, yet nothing was replaced, there is no record: the
                # store is new.
                seen, fresh, tries = self._found("" if found == raw else found), True, tries + 1
                if tries > 2:  # contention: back off
                    jitter = random.uniform(0, 0.0002)  # noqa: S311  (not a secret)
                    self._sleep(min(tries, 20) * jitter)
            elif fresh:
                return move
            else:
                seen, fresh = self._found(self._peek(self._key)), True

    def carry(self, store: StoreLike, epoch: int) -> None:
        """Bring what is known to another server, which takes this one's place.

        The record is there then: what is still to be written to the old server finds another value.

        Args:
            store: the server.
            epoch: of the server.
        """
        mine = self._seen[1]
        while True:
            found = self._compare(store, self._key, _NOTHING, _NOTHING)
            raw = "" if found == _NOTHING else found
            there = decode(raw, self._world) if raw else Ledger(epoch=epoch)
            ledger = carried(there, mine, self._me)
            text = raw if raw and ledger == there else encode(ledger)
            if text == raw or self._compare(store, self._key, raw, text) == text:
                self._seen = (text, ledger)
                return

    def beat(self, slot: int | str) -> None:
        """Give a sign of life as the claimant of a rank or seat."""
        self._call(self._store.add, self._beat_key(slot), 1)

    def beats(self, slot: int | str) -> str:
        """Return a value that changes with every sign of life."""
        return self._peek(self._beat_key(slot))

    def forget_beats(self, slot: int | str) -> None:
        """Delete the key of `beat`."""
        self.delete((self._beat_key(slot),))

    def delete(self, keys: Iterable[str]) -> None:
        """Delete keys; missing ones are ignored."""
        for key in keys:
            self._call(self._store.delete_key, key)

    def _found(self, raw: str) -> tuple[str, Ledger]:
        seen = self._seen
        if raw != seen[0]:
            self._seen = seen = (raw, decode(raw, self._world))
        if not raw and seen[1].epoch != (epoch := getattr(self._store, "epoch", NEVER)):
            self._seen = seen = ("", Ledger(epoch=epoch))
        return seen

    def _peek(self, key: str) -> str:
        found = self._compare_set(key, _NOTHING, _NOTHING)
        return "" if found == _NOTHING else found

    def _compare_set(self, key: str, expected: str, desired: str) -> str:
        return self._compare(self._store, key, expected, desired)

    def _compare(self, store: StoreLike, key: str, expected: str, desired: str) -> str:
        # latin-1 reads any bytes; `decode` refuses what is not ASCII.
        return self._call(store.compare_set, key, expected, desired).decode("latin-1")

    def _beat_key(self, slot: int | str) -> str:
        return f"{self.root}/beat/{_quoted(str(slot))}"

    def _call(self, function: Callable[..., T], *args: object) -> T:
        try:
            return function(*args)
        except JoinError:
            raise
        except Exception as error:
            raise StoreUnreachableError(
                self._world,
                f"The store of world {self._world!r} failed: {type(error).__name__}: {str(error)[:300]}",
                rule="The store has to answer as long as a world is joined",
                next_step="Check that the process that serves it (rank 0's for tcp://) runs; then join again",
            ) from error
