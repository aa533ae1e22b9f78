"""Generations that ended in this process, so that peers which still hold one are told."""

from __future__ import annotations

from typing import TYPE_CHECKING

from multiworld._core.liveness.wire import Reason

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from multiworld._core.membership.roster import Roster

__all__ = ["EndedGenerations"]

_MOST = 4096


class EndedGenerations:
    """Tokens of the last 4096 generations that ended here.

    Name and number do not identify a generation: with another store the numbers start again. A claim is
    therefore refused if it was made with the ended generation's token, or if a newer generation of the name
    is attached now.
    """

    def __init__(self) -> None:
        self._tokens: dict[str, bytes] = {}  # by key, oldest first

    def add(self, roster: Roster) -> None:
        """Remember a generation that ended."""
        self._tokens.pop(roster.key, None)
        self._tokens[roster.key] = roster.token
        if len(self._tokens) > _MOST:
            del self._tokens[next(iter(self._tokens))]

    def remove(self, roster: Roster) -> None:
        """Forget the key: a generation with it begins."""
        self._tokens.pop(roster.key, None)

    def refusal(
        self, key: str, live: Iterable[Roster], holds: Callable[[bytes], bool]
    ) -> tuple[Reason, int] | None:
        """Return why a claim to `key`, not attached here, is refused, and the newest generation here.

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
    """Split a key into name and generation; -1 where that is no number."""
    name, _, generation = key.rpartition("/")
    return name, int(generation) if generation.isascii() and generation.isdigit() and len(
        generation
    ) < 10 else -1
