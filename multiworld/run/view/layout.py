"""Layout of a snapshot as lines of text, within a given width and height. Pure.

The live view draws it with colours, ``m8d-run status`` without. The snapshot's keys are those of
`RunState.snapshot`.
"""

from __future__ import annotations

import time
import unicodedata
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

from multiworld.run.view.messages import count, one_line, span

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["Line", "Piece", "layout", "plain"]

STYLES = {
    "active": "green", "up": "green",
    "starting": "yellow", "joining": "yellow", "restarting": "yellow", "retiring": "yellow",
    "broken": "red", "failed": "red", "gone": "red",
    "ended": "dim", "stopped": "dim", "closed": "dim",
}  # fmt: skip
"""Style of each state, in the order of the counts."""

_ORDER = {"failed": 0, "restarting": 0, "stopped": 1, "starting": 2, "retiring": 2, "up": 3, "ended": 4}
_TROUBLED = {"broken", "failed", "gone"}
_MOST_EVENTS = 6
_MOST_WAITING = 5
_LONGEST_ID = 20
_GAP = 2
_GIVEN_UP_FIRST = ("node", "age", "pid", "state", "last event", "worlds", "restarts")


class Piece(NamedTuple):
    """Text with a rich style ("": plain)."""

    text: str
    style: str = ""


Line = tuple[Piece, ...]


class _Column(NamedTuple):
    name: str
    cells: list[Piece]
    right: bool = False
    least: int = 0  # width that it may be cut to; 0: never cut


def layout(snapshot: dict[str, Any], width: int, height: int | None = None) -> tuple[Line, ...]:
    """Return the lines that show `snapshot`.

    Args:
        snapshot: of `RunState`.
        width: columns of the terminal; no line is wider.
        height: most lines (kept to from 8 on); None: no limit. Where not all workers fit, those in trouble
            are shown and the others counted.
    """
    head = _head(snapshot)
    workers: list[dict[str, Any]] = snapshot["workers"]
    events: list[dict[str, Any]] = snapshot["last"][-_MOST_EVENTS:]
    others: list[dict[str, Any]] = []
    if height is not None:
        room = max(
            2, height - len(head) - 4
        )  # a blank line, the columns' names, the others' count, a blank line
        events = events[-max(room - len(workers), room // 6, 1) :]
        workers, others = _choose(workers, max(1, room - len(events)))
    lines = [*head, ()]
    if workers:
        lines += _table(_columns(workers, snapshot["node"], snapshot["now"]), width)
    else:
        lines.append((Piece("no workers on this node", "dim"),))
    if others:
        text = f"and {len(others)} more: {_counted(Counter(each['state'] for each in others))}"
        lines.append((Piece(text, "dim"),))
    if events:
        lines += [(), *map(_event, events)]
    return tuple(_cut(line, width) for line in lines[:height])


def plain(lines: Iterable[Line]) -> str:
    """Return the lines as text without colours."""
    return "\n".join("".join(piece.text for piece in line).rstrip() for line in lines)


def _event(event: dict[str, Any]) -> Line:
    clock = time.strftime("%H:%M:%S", time.localtime(event["at"]))
    return Piece(clock, "dim"), Piece(f"  {one_line(event['text'])}")


def _head(snapshot: dict[str, Any]) -> list[Line]:
    workers, worlds, ended = snapshot["workers"], snapshot["worlds"], snapshot["ended"]
    lines = [_joined(_about(snapshot))]
    states = Counter(each["state"] for each in workers)
    second = [Piece(f"{count(len(workers), 'worker')}: {_counted(states)}" if workers else "0 workers")]
    second.append(Piece(count(sum(each["restarts"] for each in workers), "restart")))
    if worlds:
        second.append(Piece(f"{count(len(worlds), 'world')}: {_in_short(worlds, 3)}", _worst(worlds)))
    lines.append(_joined(second))
    lines += [_sized(each) for each in worlds if each.get("sizes")]
    for state in ("broken", "failed"):
        names = [one_line(each["name"]) for each in worlds if each["state"] == state]
        if names:  # in full: the counts above and the table's cells are cut first
            lines.append((Piece(f"{state}: {', '.join(names)}", "red"),))
    lines += _waiting(snapshot.get("pending", {}))
    lost = [one_line(each["node"]) for each in snapshot["peers"] if each["state"] == "lost"]
    not_whole = [one_line(each["name"]) for each in worlds if each["note"]]
    if lost:
        text = f"lost: {', '.join(lost)}" + (f"; not whole: {', '.join(not_whole)}" if not_whole else "")
        lines.append((Piece(text, "red"),))
    if ended is not None:
        reason = f": {one_line(ended['reason'])}" if ended["reason"] else ""
        style = "bold red" if ended["exitcode"] else "bold green"
        lines.append((Piece(f"ended with exit code {ended['exitcode']}{reason}", style),))
    return lines


def _waiting(pending: dict[str, list[dict[str, Any]]]) -> list[Line]:
    """Operations that wait, the longest first: who is missing, and what it does instead."""
    found = [(each["since"], f"{name}: {each['text']}") for name, rows in pending.items() for each in rows]
    lines: list[Line] = [(Piece(one_line(text), "yellow"),) for _, text in sorted(found)[:_MOST_WAITING]]
    if len(found) > _MOST_WAITING:
        lines.append(
            (Piece(f"and {count(len(found) - _MOST_WAITING, 'operation')} more that wait", "yellow"),)
        )
    return lines


def _sized(world: dict[str, Any]) -> Line:
    """A world of a range: its members, who waits to be one, and who gets its state."""
    text = f"{one_line(world['name'])}: {world['size']} of {one_line(world['sizes'])} members"
    if world["waiting"]:
        text += f", {world['waiting']} waiting"
    for member in world["members"]:
        if "total" in member:
            share = 100 * member["received"] // member["total"]
            text += f", rank {member['rank']} has {share} % of its state"
    return (Piece(text, STYLES.get(world["state"], "")),)


def _about(snapshot: dict[str, Any]) -> Iterable[Piece]:
    slot, nodes = snapshot["seat"], snapshot["nodes"]
    yield Piece(f"run {_fit(one_line(snapshot['run_id']), _LONGEST_ID)}", "bold")
    yield Piece(f"node {one_line(snapshot['node'])}")
    if slot is None and nodes:
        yield Piece("spare", "yellow")
    elif slot is not None:
        yield Piece(f"seat {slot} of {nodes}")
    if snapshot["started"] is not None:
        yield Piece(f"up {span(snapshot['now'] - snapshot['started'])}")
    if snapshot.get("secure"):
        yield Piece("secure", "green")
    each = "each" if snapshot["restart"] == "worker" else "in all"
    yield Piece(f"restart {snapshot['restart']}, {snapshot['max_restarts']} {each}")


def _columns(workers: Sequence[dict[str, Any]], node: str, now: float) -> list[_Column]:
    names = [one_line(f"{each['role']}:{each['role_rank']}") for each in workers]
    return [
        _Column("rank", [Piece(str(each["rank"])) for each in workers], right=True),
        _Column("worker", [Piece(name) for name in names], least=12),
        _Column("pid", [Piece(str(each["pid"])) for each in workers], right=True),
        _Column("node", [Piece(one_line(node))] * len(workers), least=12),
        _Column("state", [Piece(each["state"], STYLES.get(each["state"], "")) for each in workers]),
        _Column("worlds", [_worlds(each["worlds"]) for each in workers], least=12),
        _Column("restarts", [Piece(str(each["restarts"])) for each in workers], right=True),
        _Column("last event", [Piece(one_line(each["last"])) for each in workers], least=14),
        _Column("age", [Piece(span(now - each["since"])) for each in workers], right=True),
    ]


def _worlds(worlds: Sequence[dict[str, Any]]) -> Piece:
    text = _in_short(worlds, 1) if len(worlds) > 2 else ", ".join(map(_world, worlds))
    return Piece(text, _worst(worlds))


def _world(world: dict[str, Any]) -> str:
    generation = f" {world['generation']}" if world["generation"] else ""
    return one_line(f"{world['name']} {world['state']}{generation}")


def _in_short(worlds: Sequence[dict[str, Any]], most: int) -> str:
    """Return the names of up to `most` worlds in trouble, and the counts of the others by state."""
    troubled = [each for each in worlds if each["state"] in _TROUBLED]
    more = _counted(Counter(each["state"] for each in troubled[most:]))
    well = _counted(Counter(each["state"] for each in worlds if each["state"] not in _TROUBLED))
    return ", ".join(filter(None, [*map(_world, troubled[:most]), more and f"+{more}", well]))


def _worst(worlds: Sequence[dict[str, Any]]) -> str:
    states = {each["state"] for each in worlds}
    order = ("broken", "failed", "gone", "joining", "active")
    return next((STYLES[state] for state in order if state in states), "dim")


def _counted(states: Counter[str]) -> str:
    known = [state for state in STYLES if state in states]
    return ", ".join(
        f"{states[state]} {one_line(state)}" for state in [*known, *sorted(set(states) - set(known))]
    )


def _choose(workers: list[dict[str, Any]], room: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    if len(workers) <= room:
        return workers, []

    def urgency(each: dict[str, Any]) -> tuple[int, int]:
        troubled = any(world["state"] in _TROUBLED for world in each["worlds"])
        return (1 if troubled and each["state"] == "up" else _ORDER.get(each["state"], 0)), each["rank"]

    ordered = sorted(workers, key=urgency)
    return sorted(ordered[:room], key=lambda each: int(each["rank"])), ordered[room:]


def _table(columns: list[_Column], width: int) -> list[Line]:
    columns, wide = _widths(columns, width)
    rows: list[Line] = [tuple(_cells(columns, wide, None))]
    rows += [tuple(_cells(columns, wide, at)) for at in range(len(columns[0].cells))]
    return rows


def _widths(columns: list[_Column], width: int) -> tuple[list[_Column], dict[str, int]]:
    """Return the columns that fit, and how wide each is."""
    columns = [each for each in columns if any(cell.text for cell in each.cells)]
    wide = {
        each.name: max(_length(text) for text in (each.name, *(c.text for c in each.cells)))
        for each in columns
    }
    least = {each.name: min(wide[each.name], each.least or wide[each.name]) for each in columns}
    kept = [each.name for each in columns]
    for name in _GIVEN_UP_FIRST:
        if sum(least[each] + _GAP for each in kept) - _GAP <= width:
            break
        kept = [each for each in kept if each != name]
    over = sum(wide[each] + _GAP for each in kept) - _GAP - width
    for _ in range(over):  # the widest column that can be cut shrinks by one
        able = [name for name in kept if wide[name] > least[name]]
        if not able:
            break
        wide[max(able, key=wide.__getitem__)] -= 1
    return [each for each in columns if each.name in kept], wide


def _cells(columns: Sequence[_Column], wide: dict[str, int], at: int | None) -> Iterable[Piece]:
    for place, column in enumerate(columns):
        cell = Piece(column.name, "dim") if at is None else column.cells[at]
        text = _fit(cell.text, wide[column.name])
        blank = " " * (wide[column.name] - _length(text))
        gap = " " * _GAP if place else ""
        yield Piece(f"{gap}{blank}{text}" if column.right else f"{gap}{text}{blank}", cell.style)


def _joined(parts: Iterable[Piece]) -> Line:
    return tuple(piece for part in parts for piece in (Piece(" · ", "dim"), part))[1:]


def _cut(line: Line, width: int) -> Line:
    left, kept = width, []
    for piece in line:
        text = _fit(piece.text, left)
        kept.append(Piece(text, piece.style))
        left -= _length(text)
        if text != piece.text:
            break
    return tuple(kept)


def _fit(text: str, width: int) -> str:
    if _length(text) <= width:
        return text
    left, kept = width - 1, ""
    for each in text:
        left -= _length(each)
        if left < 0:
            break
        kept += each
    return kept + "…" if width > 0 else ""


def _length(text: str) -> int:
    """Return the width of `text` on a terminal."""
    if text.isascii():
        return len(text)
    wide = sum(unicodedata.east_asian_width(each) in "WF" for each in text)
    return len(text) + wide - sum(bool(unicodedata.combining(each)) for each in text)
