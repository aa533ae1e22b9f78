"""Letterbox: where members leave letters for each other beside their world's record in the store.

See `multiworld._core.membership.letters`. For each attempt it is one text that grows by lines: letters, and
ids of members that have withdrawn theirs. A store needs `append` for it, which waits for no answer; in others
there are no letters, and each member writes for itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from multiworld._core.membership.letters import letter_from, letter_text

if TYPE_CHECKING:
    from multiworld._core.membership.letters import Letter

__all__ = ["Letterbox", "Texts"]


class Texts(Protocol):
    """What it needs of a store; see `multiworld._net.stores.record.WorldRecord`."""

    def peek(self, key: str) -> str:
        """Return the value; "" where there is none."""

    def append(self, key: str, text: str) -> bool:
        """Add to the value; False where the store cannot."""


class Letterbox:
    """The letters of a world's members for each attempt, as one member sees them.

    Args:
        store: the world's.
        root: prefix of the world's keys.
        me: the member's claim.
    """

    def __init__(self, store: Texts, root: str, me: str) -> None:
        self._store = store
        self._root = root
        self._me = me
        self._posted: dict[str, None] = {}
        self._stands = False  # whether one of its letters does

    def post(self, letter: Letter) -> bool:
        """Leave a letter; False where the store takes none."""
        key = self._key(letter.attempt)
        if not self._store.append(key, letter_text(letter) + "\n"):
            return False
        self._posted[key], self._stands = None, True
        return True

    def letters(self, attempt: int) -> list[Letter]:
        """Return those for an attempt that are there now."""
        found: dict[str, list[Letter]] = {}
        for line in self._store.peek(self._key(attempt)).splitlines():
            if line.startswith("-"):
                found.pop(line[1:], None)
            elif (letter := letter_from(line)) is not None:
                found.setdefault(letter.me, []).append(letter)
        return [letter for each in found.values() for letter in each]

    def withdraw(self) -> bool:
        """Take this member's letters back; False where there is none.

        A member that has read them before may still write them, but not in the place of a record that this
        one writes after it.
        """
        if not self._stands:
            return False
        self._stands = False
        for key in tuple(self._posted):  # another thread may be abandoned in `post`
            self._store.append(key, f"-{self._me}\n")
        return True

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys of attempts for which this member has left letters: to delete when these are over."""
        return tuple(self._posted)

    def _key(self, attempt: int) -> str:
        return f"{self._root}/letters/{attempt}"
