"""Cost of a world: join, keep, close; with 1 to 256 of them in one process."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from benchmarks.figures.figure import Figure, Goal, distribution, quantile, ratio, summary
from benchmarks.measuring.part import Part, Run
from benchmarks.measuring.ranks import Ranks
from benchmarks.measuring.rounds import interleaved

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from benchmarks.measuring.ranks import Rank

USUAL = "shared store, own device"
"""What `dist.new_group` makes: worlds are drawn and compared beside it."""
THREADS = 16
"""So many join at the same time in the parallel form."""

_AT = 100
_GOALS = {
    "join": Goal(at_most=15.0),
    "threads": Goal(at_most=1.1),
    "descriptors": Goal(at_most=2.0),
    "memory": Goal(at_most=0.1),
    "idle_cpu": Goal(at_most=0.6),
    "close": Goal(at_most=2000.0),
}
_PAIR = {
    "joined": (Goal(at_most=3.0), "a two-member world, joined; no collective was made"),
    "used": (Goal(at_most=5.0), "the same, and its first all_reduce"),
}
_MANY, _SOME = 256, 30
_GROWTH = Goal(at_most=1.2)
_HELD = {"threads": "threads", "descriptors": "fds", "memory": "MB", "private_dirty": "MB"}
_NOTES = {
    "join": "one after the other: each of those that were joined with so many in the end",
    "join_threads": f"{THREADS} threads join, for each world",
    "join_async": "join_async of all, gathered, for each world",
    "threads": "for each world, beyond the first",
    "descriptors": "for each world, beyond the first",
    "memory": "anonymous and shared pages (PSS), for each world, beyond the first",
    "private_dirty": "all private pages that were written, for each world, beyond the first",
    "idle_cpu": "of one core, by the whole process",
    "close": "all of them, one after the other",
    "close_broken": "all of them in the partner's process, which the other has left",
}
Found = dict[str, list[float]]


def measure(run: Run) -> Iterator[Figure]:
    """Worlds of two members, in two processes."""
    counts = run.options.counts or run.pick([1, 30, 100], [1, 3, 10, 30, 100, 256])
    rounds = run.options.rounds or run.pick(1, 3)
    found: dict[int, Found] = {count: defaultdict(list) for count in counts}
    plain: dict[str, Found] = {}
    pair: Found = {}
    for number in range(rounds):
        run.progress(f"starting processes, round {number + 1} of {rounds}")
        with Ranks("benchmarks.worlds.rank:make", count=2) as ranks:
            session = Session(ranks)
            if number == 0:
                run.progress("one world at a time")
                pair = _pair(session, run.options.pairs or run.pick(20, 60))
            _one_by_one(run, session, found, rounds - number)
            _together(run, session, [count for count in counts if count >= min(_SOME, counts[-1])], found)
            if number == 0:
                run.progress("plain groups")
                plain = _plain(session, run.options.plain or run.pick(10, 30))
    for kind, values in pair.items():
        goal, note = _PAIR[kind]
        yield summary(
            "worlds", f"pair/{kind}", values, "ms", goal=goal, note=note, quantiles=distribution(values)
        )
    yield from figures(found, plain)


class Session:
    """The processes of one round.

    Args:
        ranks: a member, and its partner, which keeps the store.

    Attributes:
        member, partner: as given.
        store: its address.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.member: Rank = ranks[0]
        self.partner: Rank = ranks[1]
        self.store: str = self.partner.call("address")

    def both(self, name: str, **args: Any) -> tuple[Any, Any]:
        """A command in member and partner at once."""
        for rank in (self.member, self.partner):
            rank.start(name, **args)
        return self.member.result(), self.partner.result()

    def close(self, names: Sequence[str]) -> tuple[float, float]:
        """All in the member, then what is left of them in the partner; seconds of both."""
        return self.member.call("close", names=names), self.partner.call("close", names=names)


def _pair(session: Session, rounds: int) -> Found:
    """Milliseconds of the slower member, while there is no other world but one, as in most programs."""
    session.both("join", store=session.store, names=["beside"])
    made = 0

    def one(kind: str) -> float:
        nonlocal made
        made += 1
        took = session.both("pair", store=session.store, world=f"pair{made}", used=kind == "used")
        return float(1e3 * max(took))

    found = interleaved(tuple(_PAIR), rounds, one, warm_up=3)
    session.close(["beside"])
    return found


def _one_by_one(run: Run, session: Session, found: Mapping[int, Found], rounds_left: int) -> None:
    """Join one after the other, and look at the member whenever there are as many as wanted."""
    session.both("join", store=session.store, names=["warm-up"])
    before = session.member.call("held")
    last, joined = 0, list[str]()
    for count, values in found.items():
        run.progress(f"{count} worlds, {rounds_left} rounds to go")
        fresh = names("w", last, count)
        took, _ = session.both("join", store=session.store, names=fresh)
        joined, last = [*joined, *fresh], count
        values["join"] += [1e3 * each for each in took]
        for kind, each in marginal(before, session.member.call("held"), count).items():
            values[kind].append(each)
        if run.full or count == max(found):
            values["idle_cpu"].append(session.member.call("idle", seconds=run.options.idle))
    right, _ = session.both("use", names=joined)  # the member receives
    if right != last:
        raise RuntimeError(f"{right} of {last} messages arrived: the worlds that were measured do not work")
    ours, theirs = session.close(joined)
    found[last]["close"].append(1e3 * ours)
    found[last]["close_broken"].append(1e3 * theirs)


def _together(run: Run, session: Session, counts: Sequence[int], found: Mapping[int, Found]) -> None:
    """Join all of them at the same time."""
    for count in counts:
        for how, more in (("join_threads", {"threads": THREADS}), ("join_async", {})):
            run.progress(f"{count} at once, {how}")
            fresh = names(f"{how}-{count}-", 0, count)
            took, _ = session.both(how, store=session.store, names=fresh, **more)
            found[count][how].append(1e3 * took / count)
            ours, theirs = session.close(fresh)
            found[count]["close"].append(1e3 * ours)
            found[count]["close_broken"].append(1e3 * theirs)


def _plain(session: Session, count: int) -> dict[str, Found]:
    """The same with torch alone: what each group of two members costs."""
    return {
        "own store, own device": _plain_form(session, count, own_stores=True, shared_device=False),
        USUAL: _plain_form(session, count, own_stores=False, shared_device=False),
        "shared store, shared device": _plain_form(session, count, own_stores=False, shared_device=True),
    }


def _plain_form(session: Session, count: int, *, own_stores: bool, shared_device: bool) -> Found:
    before = session.member.call("held")
    served = session.member.call("plain_serve", count=count if own_stores else 1)
    if not own_stores:  # the default group's is there already, whichever process serves it
        before = session.member.call("held")
    form = f"plain-{own_stores}-{shared_device}-"
    groups = {"ports": served["ports"], "names": names(form, 0, count), "shared_device": shared_device}
    took, _ = session.both("plain_join", **groups)
    each = marginal(before, session.member.call("held"), count)
    closed, _ = session.both("plain_close")
    serving = served["took"] if own_stores else [0.0] * count
    return {
        "join": [1e3 * (one + two) for one, two in zip(serving, took, strict=True)],
        "close": [1e3 * closed / count],
        **{kind: [value] for kind, value in each.items()},
    }


def marginal(before: Mapping[str, float], after: Mapping[str, float], count: int) -> dict[str, float]:
    """What each of `count` worlds added, by kind."""
    return {kind: (after[kind] - before[kind]) / count for kind in before}


def names(prefix: str, first: int, last: int) -> list[str]:
    """Names of worlds `first` to `last - 1`."""
    return [f"{prefix}{number}" for number in range(first, last)]


def figures(
    found: Mapping[int, Mapping[str, Sequence[float]]], plain: Mapping[str, Found]
) -> Iterable[Figure]:
    """All of the part's figures.

    Args:
        found: by number of worlds and kind, the values: of each join, otherwise of each round.
        plain: by form and kind, the values of plain groups.
    """
    usual = plain.get(USUAL, {})
    for count, kinds in found.items():
        for kind, values in kinds.items():
            unit = _HELD.get(kind, "%" if kind == "idle_cpu" else "ms")
            more: dict[str, Any] = {"note": _NOTES[kind], "goal": _GOALS.get(kind) if count == _AT else None}
            if kind in usual and kind != "close":
                more |= {
                    "absolute": quantile(values, 0.5),
                    "baseline": quantile(usual[kind], 0.5),
                    "absolute_unit": unit,
                }
            if kind == "join":
                more["quantiles"] = distribution(values)
            yield summary("worlds", f"{kind}/{count}", values, unit, **more)
    if _MANY in found and _SOME in found:
        yield from _growth(found)
    for form, kinds in plain.items():
        for kind, values in kinds.items():
            note = f"a plain gloo group of two members, {form}"
            yield summary("worlds", plain_name(form, kind), values, _HELD.get(kind, "ms"), note=note)


def plain_name(form: str, kind: str) -> str:
    """The name of the figure of a plain group."""
    return f"plain/{form.replace(', ', '+').replace(' ', '_')}/{kind}"


def _growth(found: Mapping[int, Mapping[str, Sequence[float]]]) -> Iterator[Figure]:
    for kind in ("join", *_HELD):
        many, some = found[_MANY][kind], found[_SOME][kind]
        if kind == "join":  # so many in each round: the medians are compared
            many, some = [quantile(many, 0.5)], [quantile(some, 0.5)]
        if min(some) <= 0:
            continue  # nothing to be found at 30: there is no ratio to it
        yield ratio(
            "worlds",
            f"{kind}/{_MANY}:{_SOME}",
            many,
            some,
            goal=None if kind == "private_dirty" else _GROWTH,
            note=f"for each of {_MANY} worlds, against each of {_SOME}",
            absolute_unit=_HELD.get(kind, "ms"),
        )


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--counts", type=int, nargs="+", metavar="N", help="numbers of worlds, ascending (default: by form)"
    )
    parser.add_argument("--rounds", type=int, help="each in fresh processes (default: 1; 3 with --full)")
    parser.add_argument(
        "--plain", type=int, help="plain gloo groups, for comparison (default: 10; 30 with --full)"
    )
    parser.add_argument(
        "--pairs", type=int, help="joins of one world at a time (default: 20; 60 with --full)"
    )
    parser.add_argument("--idle", type=float, default=5.0, metavar="SECONDS", help="of looking at idle CPU")


PART = Part(
    name="worlds",
    title="Worlds",
    description="Two-member worlds of one process: time to join one at a time, without a collective and with "
    "its first; with many kept, time to join (one by one, by threads, by join_async), threads, descriptors "
    "and memory of each, CPU of the idle process, time to close.",
    measure=measure,
    add_options=_options,
)
