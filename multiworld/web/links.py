"""Throughput between members: messages and bytes of each direction, and bytes per second since the last look.

Members are looked at several times a second, but throughput is only made anew each `EVERY` seconds: a busy
world would else change at every look.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

__all__ = ["EVERY", "MOST", "Links"]

EVERY = 2.0
"""Seconds."""

MOST = 256
"""Links of a world; those with the most bytes."""


class _Kept:
    def __init__(self, at: float) -> None:
        self.at = at
        self.bytes: dict[tuple[int, int], int] = {}
        self.shown: list[dict[str, Any]] = []


class Links:
    """Those of the worlds of a page."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, int], _Kept] = {}

    def keep(self, names: Collection[str]) -> None:
        """Forget all worlds but these."""
        self._kept = {key: each for key, each in self._kept.items() if key[0] in names}

    def of(
        self, name: str, generation: int, told: Mapping[int, dict[str, Any]], now: float
    ) -> list[dict[str, Any]]:
        """Return the links of a world.

        Args:
            name: of the world.
            generation: whose members' numbers count; they begin anew with it.
            told: what members say of the world, by any number; see `multiworld.status.world_status`.
            now: seconds.
        """
        key = name, generation
        kept = self._kept.get(key)
        if kept is not None and 0 <= now - kept.at < EVERY:  # less: the clock was set back
            return kept.shown
        found: dict[tuple[int, int], tuple[int, int]] = {}
        for each in told.values():
            if each.get("generation") != generation or "sent" not in each:
                continue
            rank = each["rank"]
            rows = [((rank, to), count, size) for to, count, size in each["sent"]]
            rows += [((origin, rank), count, size) for origin, count, size in each["received"]]
            for link, count, size in rows:  # both ends may tell of it
                found[link] = max(found.get(link, (0, 0)), (count, size))
        before = _Kept(now) if kept is None else kept
        passed = now - before.at
        most = sorted(found.items(), key=lambda item: -item[1][1])[:MOST]
        after = _Kept(now)
        after.bytes = {link: size for link, (_, size) in found.items()}
        after.shown = [
            {
                "from": link[0], "to": link[1], "messages": count, "bytes": size,
                "rate": round(max(0, size - before.bytes.get(link, size)) / passed, 1) if passed > 0 else 0.0,
            }
            for link, (count, size) in sorted(most)
        ]  # fmt: skip
        for old in [each for each in self._kept if each[0] == name]:
            del self._kept[old]
        self._kept[key] = after
        return after.shown
