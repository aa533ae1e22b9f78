"""Record of a world in its store: read, replace and count without waiting for keys.

Reading is a compare-and-set that cannot succeed: one round trip that does not wait, as ``get`` would, if the
key vanishes meanwhile. (So do `torch.distributed`'s HashStore, TCPStore and FileStore, alone and under a
PrefixStore, in 2.4 to 2.15; a test asks them.)
"""

from __future__ import annotations

import random
import weakref
from dataclasses import replace
from functools import reduce
from typing import TYPE_CHECKING, Any, Protocol, TypeVar
from urllib.parse import quote

from multiworld._core.membership.carrying import carried
from multiworld._core.membership.ledger import Ledger, decode, encode
from multiworld._core.membership.letters import take_in
from multiworld._core.membership.serving import NEVER
from multiworld._net.stores.letterbox import Letterbox
from multiworld.errors import JoinError, StoreUnreachableError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from multiworld._core.membership.admission import Move
    from multiworld._core.membership.letters import Letter

__all__ = ["TRIES", "StoreLike", "WorldRecord", "pause_before_try"]

_NOTHING = "\x01nothing"  # no record starts like this: compare_set returns it where the key is missing
TRIES = 2
"""How often a member writes at once after another one has come first."""
_TRY_PAUSE = 0.0002
"""Seconds for each try, 20 at most."""
_LETTER_PAUSE = 0.0003
"""Seconds for each member: about the time in which one reads a letter and writes a claim."""

T = TypeVar("T")


def _no_letter(_ledger: Ledger) -> None:
    """The letter of a step that only its own member can carry out: none."""


def pause_before_try(ledger: Ledger, tries: int, chance: float, *, posted: bool) -> float:
    """Return the seconds that a member waits before it tries to write again.

    Args:
        ledger: the record.
        tries: how often another member has come first.
        chance: 0 to 1.
        posted: whether its letter is in the box: then so long that a few members come to read all letters.
    """
    return chance * (ledger.members * _LETTER_PAUSE if posted else min(tries, 20) * _TRY_PAUSE)


def _quoted(name: str) -> str:
    return quote(str(name), safe="", errors="surrogatepass")


class StoreLike(Protocol):
    """The methods used of a `torch.distributed.Store`; and ``append``, where it says that it has it."""

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

    Attributes:
        box: the letters beside it.
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
        self._appends: bool | None = None
        self.box = Letterbox(self, self.root, me)
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
        return self._found(self.peek(self._key)) is not before

    def apply(
        self, step: Callable[[Ledger], Move], letter: Callable[[Ledger], Letter | None] = _no_letter
    ) -> Move:
        """Replace the record by the result of `step`; retry while other members write first.

        Args:
            step: called for each try, with the record as it is then.
            letter: what other members may write instead, of the record as it is; None for nothing. `step`
                then finds it there, and changes nothing.
        """
        seen, fresh, tries, posted = self._found(self._seen[0]), False, 0, 0
        while True:
            raw, ledger = seen
            move = step(ledger)
            if move.ledger is not ledger:
                # The letters are read after the record: then one that was withdrawn before its sender wrote
                # the record is not among those that replace what the sender wrote.
                others = self.box.letters(posted) if posted else ()
                new = reduce(take_in, others, move.ledger)
                text = encode(new)
                found = self._compare_set(self._key, raw, text)
                if found == text:
                    self._seen = (text, new)
                    return replace(move, ledger=new)
                # Where the answer is what was expected, yet nothing was replaced, there is no record: the
                # store is new.
                seen, fresh, tries = self._found("" if found == raw else found), True, tries + 1
                if tries > TRIES:  # contention
                    mine = letter(seen[1])
                    if mine is not None and mine.attempt != posted and self.box.post(mine):
                        posted = mine.attempt
                    chance = random.random()  # noqa: S311  (not a secret)
                    self._sleep(pause_before_try(seen[1], tries, chance, posted=bool(posted)))
                    if posted:
                        seen = self._found(self.peek(self._key))
            elif fresh:
                return move
            else:
                seen, fresh = self._found(self.peek(self._key)), True

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
        return self.peek(self._beat_key(slot))

    def forget_beats(self, slot: int | str) -> None:
        """Delete the key of `beat`."""
        self.delete((self._beat_key(slot),))

    def delete(self, keys: Iterable[str]) -> None:
        """Delete keys; missing ones are ignored."""
        for key in keys:
            self._call(self._store.delete_key, key)

    def append(self, key: str, text: str) -> bool:
        """Add to the value of a key, without an answer; False where the store cannot."""
        store: Any = self._store
        if self._appends is None:
            says = getattr(store, "has_extended_api", None)  # as torch asks a Store whether it has `append`
            self._appends = getattr(store, "appends", False) or (says is not None and bool(self._call(says)))
        if self._appends:
            self._call(store.append, key, text)
        return self._appends

    def peek(self, key: str) -> str:
        """Return the value of a key; "" where there is none."""
        found = self._compare_set(key, _NOTHING, _NOTHING)
        return "" if found == _NOTHING else found

    def _found(self, raw: str) -> tuple[str, Ledger]:
        seen = self._seen
        if raw != seen[0]:
            self._seen = seen = (raw, decode(raw, self._world))
        if not raw and seen[1].epoch != (epoch := getattr(self._store, "epoch", NEVER)):
            self._seen = seen = ("", Ledger(epoch=epoch))
        return seen

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
