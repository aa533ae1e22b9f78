"""The generations that ended in this process: whoever still holds one is told so."""

from __future__ import annotations

from typing import TYPE_CHECKING

from multiworld._core.liveness.wire import Reason

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from multiworld._core.membership.roster import Roster

__all__ = ["Past"]

_MOST = 4096


class Past:
    """Remembers the tokens of the last 4096 generations that ended here.

    A name and a number alone say little: with another store the numbers begin again. So a generation counts as
    over for whoever holds its token, or where a newer one of its name is attached here at this moment.
    """

    def __init__(self) -> None:
        self._tokens: dict[str, bytes] = {}  # by key, oldest first

    def bury(self, roster: Roster) -> None:
        """This generation ended here."""
        self._tokens.pop(roster.key, None)
        self._tokens[roster.key] = roster.token
        if len(self._tokens) > _MOST:
            del self._tokens[next(iter(self._tokens))]

    def revive(self, roster: Roster) -> None:
        """A generation with this key begins."""
        self._tokens.pop(roster.key, None)

    def judge(
        self, key: str, live: Iterable[Roster], holds: Callable[[bytes], bool]
    ) -> tuple[Reason, int] | None:
        """Return why a claim to `key`, which is not attached here, is refused, and the newest generation here.

        Args:
            key: of the claimed world.
            live: what is attached here.
            holds: whether the claim was made with this token.

        Returns:
            None where nothing speaks against waiting for this process to attach it too.
        """
        name, generation = _split(key)
        newest = max((each.generation for each in live if each.world == name), default=0)
        if newest > generation:
            return Reason.STALE, newest
        token = self._tokens.get(key)
        if token is None or not holds(token):
            return None
        newest = max(known for each, known in map(_split, self._tokens) if each == name)
        return (Reason.STALE if newest > generation else Reason.OVER), newest


def _split(key: str) -> tuple[str, int]:
    """Take name and generation out of a key; -1 where that is none."""
    name, _, generation = key.rpartition("/")
    return name, int(generation) if generation.isascii() and generation.isdigit() and len(
        generation
    ) < 10 else -1
