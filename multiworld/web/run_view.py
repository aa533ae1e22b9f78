"""The page's view of a run: its launchers' snapshots, and what workers say of their worlds. Pure.

A launcher knows its workers and what each said last of its worlds, by rank in the run; a worker knows its
world's members, by rank in the world. A member whose process is gone, or joins anew, is in no roster: its
rank in the world is planned, or known from before.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from multiworld.run.view.messages import natural
from multiworld.run.view.world_state import range_state, world_state
from multiworld.web.faults import merged
from multiworld.web.links import Links
from multiworld.web.rosters import Rosters, newest
from multiworld.web.worlds import VERSION, member, world

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

__all__ = ["RunViews", "complete"]

LAST = 500
"""Events that a view has."""

_RUN = (
    "run_id", "node", "entrypoint", "restart", "max_restarts", "started", "seat", "nodes", "peers", "ended",
    "secure",
)  # fmt: skip

_NEEDED = frozenset({*_RUN, "now", "workers", "worlds", "faults", "totals", "last"})

Status = dict[str, Any]


def complete(snapshot: dict[str, Any]) -> bool:
    """Whether a snapshot has all that a view needs: that of an earlier version has not."""
    return snapshot.keys() >= _NEEDED and all("number" in each for each in snapshot["last"])


class RunViews:
    """Makes the views of one run, one after the other.

    Attributes:
        rosters: of its worlds.
    """

    def __init__(self) -> None:
        self._links = Links()
        self.rosters = Rosters()
        self._rows: dict[str, dict[int, Sequence[Any]]] = {}
        self._events: deque[dict[str, Any]] = deque(maxlen=LAST)
        self._count = 0
        self._last: dict[str, int] = {}

    def view(
        self,
        snapshot: dict[str, Any],
        others: Sequence[dict[str, Any]],
        statuses: Mapping[int, Status],
        waits: Mapping[str, dict[str, Any]],
        note: str = "",
    ) -> dict[str, Any]:
        """Return the view.

        Args:
            snapshot: of the launcher that is asked.
            others: of the other nodes' launchers.
            statuses: by rank in the run; of this node's workers that answered.
            waits: by world; of `multiworld.status.waits_of`.
            note: what the page has trouble with.
        """
        launchers = (snapshot, *others)
        for each in launchers:
            self._note_events(each, "" if each is snapshot else f"{each['node']}: ")
        for name in self.rosters.learn(statuses):
            self._rows.pop(name, None)
        told: dict[str, dict[int, Status]] = {}
        for rank, status in sorted(statuses.items()):
            for each in status["worlds"]:
                told.setdefault(each["name"], {})[rank] = each
        workers = _Workers(launchers)
        names = {each["name"] for launcher in launchers for each in launcher["worlds"]}
        self.rosters.keep(names)
        self._links.keep(names)
        self._rows = {name: rows for name, rows in self._rows.items() if name in names}
        return {
            "version": VERSION,
            "now": snapshot["now"],
            "kind": "run",
            "title": f"run {snapshot['run_id']} on {snapshot['node']}",
            "note": note,
            "run": {key: snapshot[key] for key in _RUN},
            "processes": _processes(launchers),
            "worlds": [
                self._world(name, launchers, told.get(name, {}), workers, waits.get(name), snapshot["now"])
                for name in sorted(names, key=natural)
            ],
            "faults": merged([each["faults"] for each in launchers]),
            "totals": snapshot["totals"],
            "events": list(self._events),
        }

    def seen(self, snapshot: dict[str, Any]) -> int:
        """Return the number of the last event of a snapshot's launcher that views have had; 0: of none."""
        return self._last.get(_launcher(snapshot), 0)

    def _note_events(self, snapshot: dict[str, Any], prefix: str) -> None:
        for each in snapshot["last"]:
            seen, number = self.seen(snapshot), each["number"]
            if number <= seen:
                continue
            if seen and number > seen + 1:
                text = f"{prefix}{number - seen - 1} events are not shown: more came than are kept"
                self._event({"at": each["at"], "world": "", "level": "warning", "text": text})
            self._last[_launcher(snapshot)] = number
            shown = {key: each[key] for key in ("at", "world", "level")}
            self._event({**shown, "text": prefix + each["text"]})

    def _event(self, told: dict[str, Any]) -> None:
        self._count += 1
        self._events.append({"id": self._count, **told})

    def _world(
        self,
        name: str,
        launchers: Iterable[dict[str, Any]],
        told: dict[int, Status],
        workers: _Workers,
        waits: dict[str, Any] | None,
        now: float,
    ) -> dict[str, Any]:
        said = [each for launcher in launchers for each in launcher["worlds"] if each["name"] == name]
        reports: dict[int, dict[str, Any]] = {}
        for each in (each for one in said for each in one["members"]):
            # A node that has lost the rank says that it is gone, the one that has it now knows better.
            if each["state"] != "gone" or each["rank"] not in reports:
                reports[each["rank"]] = each
        state, generation, sizes = _state(said, reports)
        best = newest(told)
        roster = [] if best is None else self.rosters.of(name, best["generation"])
        status = {
            "backend": "", "size": max((each.get("size", 0) for each in said), default=0), "busy": [],
            "since": None, "cause": "", "ranks": [], "detail": "", **(best or {}),
            "name": name, "state": state, "generation": generation, "sizes": sizes,
        }  # fmt: skip
        rows = self._rows.setdefault(name, {})
        for row in roster:
            if (rank := workers.rank(row[2], row[1])) is not None:
                rows[rank] = row
        members, known = [], set()
        for rank, report in sorted(reports.items()):
            host, pid = workers.process(rank)
            before, own = rows.get(rank), told.get(rank, {})
            place = report.get("place", own.get("rank", -1 if before is None else before[0]))
            known.add(place)
            if report["state"] == "closed" and state != "closed":
                continue
            members.append(
                member(
                    {**status, "generation": report["generation"], "since": own.get("since")},
                    (place, pid, host, "" if before is None else before[3]),
                    f"{host}/{pid}", rank, state=report["state"],
                    received=report.get("received", 0), total=report.get("total", 0),
                )
            )  # fmt: skip
        # Those of which no launcher has told yet, or which have none: the others' roster has them.
        members += [
            member(status, row, f"{row[2]}/{row[1]}", workers.rank(row[2], row[1]))
            for row in roster
            if row[0] not in known
        ]
        return {
            **world(status, members, waits, self._links.of(name, generation, told, now)),
            "size": status["size"] or len(members),
            "note": next((each["note"] for each in said if each["note"]), ""),
            "candidates": sum(each.get("waiting", 0) for each in said),
            "left": _is_left(reports),
        }


def _is_left(reports: dict[int, dict[str, Any]]) -> bool:
    """Whether all have closed it, or were left by one that did. Those that are gone do not count."""
    there = [each for each in reports.values() if each["state"] != "gone"]
    return bool(there) and all(each["state"] == "closed" or each.get("left", False) for each in there)


def _launcher(snapshot: dict[str, Any]) -> str:
    return f"{snapshot['node']}/{snapshot['started']}"


class _Workers:
    """The workers of all launchers that answered."""

    def __init__(self, launchers: Iterable[dict[str, Any]]) -> None:
        self._processes: dict[int, tuple[str, int]] = {}
        for launcher in launchers:
            for each in launcher["workers"]:
                self._processes[each["rank"]] = launcher["node"], each["pid"]
        self._ranks = {process: rank for rank, process in self._processes.items()}

    def rank(self, host: str, pid: int) -> int | None:
        """Return the rank in the run of a process."""
        return self._ranks.get((host, pid))

    def process(self, rank: int) -> tuple[str, int]:
        """Return host and pid of the worker of this rank."""
        return self._processes.get(rank, ("", 0))


def _state(said: Sequence[dict[str, Any]], reports: Mapping[int, dict[str, Any]]) -> tuple[str, int, str]:
    """Return state, generation and range of sizes of a world, from what its launchers say."""
    sizes = next((each["sizes"] for each in said if each.get("sizes")), "")
    if len(said) == 1:
        return said[0]["state"], said[0]["generation"], sizes
    decide = range_state if sizes else world_state
    return *decide((each["state"], each["generation"]) for each in reports.values()), sizes


def _processes(launchers: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for launcher in launchers:
        for each in launcher["workers"]:
            process = _process(each, launcher["node"], logs=launcher is launchers[0])
            if process["id"] in found:  # two containers of one host's name
                process["id"] += f"#{each['rank']}"
            found[process["id"]] = process
    return list(found.values())


def _process(worker: dict[str, Any], node: str, *, logs: bool) -> dict[str, Any]:
    return {
        "id": f"{node}/{worker['pid']}",
        "rank": worker["rank"],
        "role": f"{worker['role']}:{worker['role_rank']}",
        "pid": worker["pid"],
        "host": node,
        "state": worker["state"],
        "since": worker["since"],
        "restarts": worker["restarts"],
        "last": worker["last"],
        # Those of another node are files of its host.
        "logs": sorted(worker.get("logs", {})) if logs else [],
    }
