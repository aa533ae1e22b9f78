"""Values of every collective, and worlds of multiworld, on hardware: right, or what was wrong."""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING, Any

from hardware.records import RIGHT, Check

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from bed.ranks import Event, Ranks

    from hardware.placed import Placed

__all__ = ["checked", "checks", "without_folders"]

_LONG = 400.0
"""Seconds for all collectives with all types, where ranks share a GPU by turns."""

_ANSWER = 60.0
"""Seconds for survivors to have seen a loss."""

_SOON_MS = 10_000
"""From a loss to the exception; how long it took is on the page."""

_QUICK = {"TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "100"}
_SHOWN = 300
_CYCLES = 6
_WHILE_KILLED = (
    ("method", "all_reduce"), ("method", "all_gather_into_tensor"), ("async", "all_reduce"), ("aio", "recv"),
    ("bare", "recv"), ("bare", "send"), ("bare", "batch"), ("bare", "coalesced"),
)  # fmt: skip
_WHILE_STOPPED = (("method", "all_reduce"), ("bare", "recv"))


def checks(placed: Placed, backend: str, gpus: int) -> list[tuple[str, Callable[[], Check]]]:
    """Name each check that this many GPUs allow, and give what runs it.

    Args:
        placed: the launcher.
        backend: which.
        gpus: how many there are.
    """
    listed: list[tuple[str, int, Callable[[int], Check]]] = []

    def add(name: str, ranks: int, run: Callable[..., tuple[list[Any], dict[str, Any]]], *more: Any) -> None:
        listed.append((name, ranks, partial(checked, name, partial(run, placed, backend, *more))))

    for size in (2, 3, 4):
        add(f"every collective, {size} ranks", size, _values, "values:collectives", size)
    add("groups beside the default one, 3 ranks", 3, _values, "values:groups", 3)
    for size in (2, 3):
        add(f"worlds: every operation in every way, {size} members", size, _world, size)
    add("worlds: left and rejoined", 2, _again)
    add("worlds: a member is killed and replaced, the others go on", 3, _lost, "kill", _WHILE_KILLED)
    add("worlds: a member is stopped and replaced, the others go on", 3, _lost, "stop", _WHILE_STOPPED)
    most = placed.placement.most(gpus)
    return [(name, run) for name, ranks, run in listed if most is None or ranks <= most]


def checked(name: str, run: Callable[[], tuple[list[Any], dict[str, Any]]]) -> Check:
    """Turn what was wrong into an outcome; that a rank died or never answered, which the launcher raises, is one."""
    try:
        wrong, more = run()
    except AssertionError as exc:
        lines = [line.strip() for line in str(exc).splitlines() if line.strip()]
        wrong, more = [without_folders(" / ".join(lines)) or "failed"], {}
    return Check(name, "; ".join(map(str, wrong))[:_SHOWN] if wrong else RIGHT, **more)


def without_folders(text: str) -> str:
    """Return a traceback's lines with files by name: where they lie on some machine says nothing on the page."""
    return re.sub(r'"/(?:[^/"]+/)*([^/"]+)"', r'"\1"', text)


def _values(placed: Placed, backend: str, program: str, size: int) -> tuple[list[Any], dict[str, Any]]:
    with placed.start(program, size, config={"backend": backend}, env=_QUICK, timeout=_LONG) as ranks:
        told = [event.fields for event in ranks.wait("checked")]
        ranks.wait("clean")
        wrong: list[Any] = _ended(ranks)
    failed = {
        f"{name}: {text.strip().splitlines()[-1]}" for each in told for name, text in each["failed"].items()
    }
    refused = len(told[0]["refused"])
    defects = {name: defect for each in told for name, defect in each["defects"].items()}
    return sorted(failed) + wrong, {
        "done": len(told[0]["done"]) - refused - len(defects),
        "refused": refused,
        "defects": tuple(f"{name}: {defects[name]}" for name in sorted(defects)),
    }


def _world(placed: Placed, backend: str, size: int) -> tuple[list[Any], dict[str, Any]]:
    with placed.start("worlds:values", size, config=_config(backend), env=_QUICK, timeout=_LONG) as ranks:
        told = [event.fields for event in ranks.wait("values")]
        closed = [event.fields for event in ranks.wait("closed")]
        ended = _ended(ranks)
    wrong = [each for found in told for each in found["wrong"]]
    wrong += ["close() did not free the communicator" for found in closed if not found["freed"]]
    return wrong + ended, {"done": size}


def _again(placed: Placed, backend: str) -> tuple[list[Any], dict[str, Any]]:
    config = {**_config(backend), "cycles": _CYCLES}
    with placed.start("worlds:again", 2, config=config, env=_QUICK, timeout=_LONG) as ranks:
        told = [event.fields for event in ranks.wait("after")]
        ranks.wait("closed")
        ended = _ended(ranks)
    wrong = [each for found in told for each in found["wrong"]]
    every = [found["generations"] for found in told]
    wrong += [f"generations {each}" for each in every if each != sorted(set(each)) or len(each) != _CYCLES]
    return wrong + ended, {"done": _CYCLES}


def _lost(
    placed: Placed, backend: str, how: str, cases: tuple[tuple[str, str], ...]
) -> tuple[list[Any], dict[str, Any]]:
    """Lose a member in each case, while two other worlds go on; the next generation is joined with another."""
    more = {**_config(backend), **({"hang_timeout": 1.5} if how == "stop" else {})}
    listed = {**more, "cases": [{"way": way, "name": op} for way, op in cases]}
    took: list[float] = []
    wrong: list[Any] = []
    with placed.start("worlds_faults:survives", 2, config=listed, env=_QUICK, timeout=_LONG) as ranks:
        port = ranks.wait("store")[0].fields["port"]
        for number, case in enumerate(cases):
            config = {**more, "rank": 2, "size": 3, "case": number, "port": port, "stores": 0}
            with placed.start(
                "worlds_faults:victim", 1, as_rank=2, config=config, env=_QUICK, timeout=_LONG
            ) as lost:
                lost.wait("ready")
                ranks.wait("ready", count=number + 1)
                at = lost.kill(0) if how == "kill" else lost.stop(0)
                after = ranks.wait("after", count=number + 1, timeout=_ANSWER)
                broke = ranks.wait("broken", count=number + 1)
            took += [(each.at - at) * 1000 for each in broke]
            wrong += [f"{case}: {what}" for pair in zip(broke, after, strict=True) for what in _unlike(*pair)]
            ranks.tell("go")
        for found in (event.fields for event in ranks.wait("values")):
            wrong += found["wrong"] + found["beside"]["wrong"]
        ranks.wait("closed")
        wrong += _ended(ranks)
    if max(took) > _SOON_MS:
        wrong.append(f"an operation raised only after {max(took):.0f} ms")
    return wrong, {"done": len(cases), "ms": tuple(map(round, took))}


def _unlike(broke: Event, after: Event) -> Iterator[str]:
    """Say what is not as it must be after a loss."""
    if broke.fields["kind"] != "BrokenWorldException":
        yield f"raised {broke.fields['kind']} {broke.fields['text'][:80]}, values {after.fields['values']}"
    later = {way: kind for way, kind in after.fields["later"].items() if kind != "BrokenWorldException"}
    if later:
        yield f"later operations: {later}"
    if after.fields["ranks"] != [2]:
        yield f"the breakage names {after.fields['ranks']}"


def _ended(ranks: Ranks) -> list[Any]:
    return [str(each) for each in ranks.join().values() if each.code != 0]


def _config(backend: str) -> dict[str, Any]:
    return {"backend": backend, "timeout": 60}
