"""Members of each world, as workers said; they are only asked where that is not known. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

__all__ = ["Rosters", "newest"]

Status = dict[str, Any]
Row = list[Any]
"""Rank, pid, host and seat of a member."""


def newest(told: Mapping[int, Status]) -> Status | None:
    """Return what the worker says that is in the newest generation; a verdict counts more than a join."""
    return max(
        (each for each in told.values() if "rank" in each),
        key=lambda each: (each["generation"], each["state"] == "active", each["state"] == "broken"),
        default=None,
    )


class Rosters:
    """Those of the worlds of a run."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[int, list[Row]]] = {}

    def learn(self, statuses: Mapping[int, dict[str, Any]]) -> set[str]:
        """Take what workers say, by rank in the run; of `multiworld.status.process_status`.

        Returns:
            The worlds that have begun anew, with other processes: their generations count from 1 again.
        """
        anew = self._begun_anew(statuses)
        for name in anew:
            del self._known[name]
        for status in statuses.values():
            for each in status["worlds"]:
                if each.get("members") and each["generation"] >= self._known.get(each["name"], (0, []))[0]:
                    self._known[each["name"]] = each["generation"], each["members"]
        return anew

    def _begun_anew(self, statuses: Mapping[int, dict[str, Any]]) -> set[str]:
        said = [
            (each["name"], each["generation"], (status["pid"], status["host"]))
            for status in statuses.values()
            for each in status["worlds"]
            if "rank" in each and each["name"] in self._known
        ]
        reached: dict[str, int] = {}
        for name, generation, _ in said:
            reached[name] = max(generation, reached.get(name, 0))
        # A process is in the roster of its generation, and in a later one unless it is late or was left out.
        return {
            name
            for name, generation, (pid, host) in said
            if generation == reached[name] <= self._known[name][0]
            and all(row[1:3] != [pid, host] for row in self._known[name][1])
        }

    def of(self, name: str, generation: int) -> list[Row]:
        """Return the members of a generation of a world; [] where they are not known."""
        known, rows = self._known.get(name, (0, []))
        return rows if known == generation else []

    def lacking(self, statuses: Mapping[int, dict[str, Any]]) -> dict[str, list[str]]:
        """Return what to ask: rank of a worker, as text -> worlds in whose newest generation it is."""
        chosen: dict[str, tuple[int, int]] = {}
        for rank, status in sorted(statuses.items()):
            for each in status["worlds"]:
                if "rank" in each and each["generation"] > chosen.get(each["name"], (0, 0))[0]:
                    chosen[each["name"]] = each["generation"], rank
        asked: dict[str, list[str]] = {}
        for name, (generation, rank) in chosen.items():
            if not self.of(name, generation):
                asked.setdefault(str(rank), []).append(name)
        return asked

    def keep(self, names: Collection[str]) -> None:
        """Forget all worlds but these."""
        self._known = {name: each for name, each in self._known.items() if name in names}
