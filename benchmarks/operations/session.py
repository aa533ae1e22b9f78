"""Members that run cases: rounds of all forms in turn, in the same processes."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from benchmarks.figures.sizes import KB
from benchmarks.measuring.ranks import Ranks
from benchmarks.operations.cases import AWAITED, figures_of
from benchmarks.operations.names import CHECKED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from benchmarks.figures.figure import Figure, Goal
    from benchmarks.measuring.part import Run
    from benchmarks.operations.cases import Case, Tail

CHUNK = 20
"""Rounds that the ranks do on their own before they tell."""
TAIL_ROUNDS, TAIL_NEEDS = 30, 200
"""Rounds for the 99th percentile, and operations of each form in one."""
WARM_UP_ROUNDS = 2
TIMEOUT = 300.0
"""Seconds that a chunk may take: much more than it does."""
OPTIONAL = frozenset({CHECKED})
"""Variants that are left out where this version has not their setting."""
GATHERED = 64 * KB
"""Up to this size all forms begin with the threads of each rank on one core."""


@dataclass(frozen=True)
class Place:
    """Where members are.

    Attributes:
        device: the network interface that leads to the others.
        host: address of the store, which rank 0 serves.
        namespaces: of the network, by rank; none: this process's own.
    """

    device: str = "lo"
    host: str = "127.0.0.1"
    namespaces: tuple[str, ...] = ()


HERE = Place()


class Session:
    """Members that have met.

    Args:
        ranks: of `benchmarks.operations.rank`.
        missing: of variants that this version has not: why.

    Attributes:
        missing: as given.
    """

    def __init__(self, ranks: Ranks, missing: dict[str, str]) -> None:
        self._ranks = ranks
        self.missing = missing

    def prepare(self, case: Case, forms: Sequence[str]) -> str:
        """Make the operation's tensors, and see that every form is right; "" or why stock refuses it."""
        told = self._ranks.call("prepare", op=case.op, size=case.size, forms=forms, timeout=TIMEOUT)
        return next((each for each in told if each), "")

    def rounds(
        self, case: Case, forms: Sequence[str], first: int, count: int, *, gather: bool = True
    ) -> tuple[dict[str, list[float]], dict[str, Tail]]:
        """Some rounds of all forms.

        Args:
            case: what is measured.
            forms: of it.
            first: number of the first round.
            count: how many.
            gather: threads of a rank begin on one core, up to `GATHERED`.

        Returns:
            By form, the slowest member's time of each round in microseconds, and what the slowest member
            tells of all operations.
        """
        told: list[Any] = self._ranks.call(
            "rounds", forms=forms, first=first, rounds=count, repeat=case.repeat, warm_up=case.warm_up,
            gather=gather and case.size <= GATHERED, timeout=TIMEOUT,
        )  # fmt: skip
        if case.op == "send_recv":
            told = told[:1]  # rank 0 times the way to and fro
        # A collective is over when it is over for the slowest.
        rounds = {
            form: [max(each) for each in zip(*(rank[form]["rounds"] for rank in told), strict=True)]
            for form in forms
        }
        tails = {form: max((rank[form]["chunk"] for rank in told), key=_middle) for form in forms}
        return rounds, tails

    def leave(self) -> None:
        """Close everything."""
        self._ranks.call("leave")


def _middle(tail: Tail) -> float:
    return tail["p50"]


@contextmanager
def session(
    members: int, forms: Iterable[str], *, pin: bool = False, place: Place = HERE
) -> Iterator[Session]:
    """Members of stock's group, of the world, and of those variants of it that are among the forms."""
    args = {"pin": pin, "host": place.host, "namespaces": place.namespaces}
    env = {"GLOO_SOCKET_IFNAME": place.device, **({"M8D_IFNAME": place.device} if place.namespaces else {})}
    with Ranks("benchmarks.operations.rank:make", members, args=args, env=env) as ranks:
        port = ranks[0].call("serve")
        missing = ranks.call("meet", port=port, forms=[*forms], timeout=TIMEOUT)[0]
        found = Session(ranks, missing)
        yield found
        found.leave()


def measured(
    run: Run,
    cases: Sequence[Case],
    goal_of: Callable[[Case, str], Goal | None],
    *,
    pin: bool = False,
    place: Place = HERE,
) -> Iterator[Figure]:
    """The figures of cases, all with as many members; what stock refuses is remarked and left out."""
    forms = dict.fromkeys(form for case in cases for form in case.forms)
    with session(cases[0].members, forms, pin=pin, place=place) as members:
        refused: set[str] = set()
        for form, why in members.missing.items():
            what = "left out" if form in OPTIONAL else "measured as a world without it"
            run.remark(f"{form}: {what}: {why}")
        for each in cases:
            left = tuple(form for form in each.forms if form not in members.missing or form not in OPTIONAL)
            case = replace(each, forms=left)
            if case.op in refused:
                continue
            run.progress(f"{case.name.replace('/', ', ')} members")
            why = members.prepare(case, case.forms)
            if why:
                refused.add(case.op)
                run.remark(f"{case.op}: torch.distributed does not do it on gloo: {why}")
                continue
            yield from _measured(members, case, goal_of)


def _measured(members: Session, case: Case, goal_of: Callable[[Case, str], Goal | None]) -> Iterator[Figure]:
    rounds: dict[str, list[float]] = {form: [] for form in case.forms}
    chunks: dict[str, list[Tail]] = {form: [] for form in case.forms}
    for first in (-WARM_UP_ROUNDS, *range(0, case.rounds, CHUNK)):
        count = min(CHUNK, case.rounds - first) if first >= 0 else WARM_UP_ROUNDS
        told, tails = members.rounds(case, case.forms, first, count)
        for form in case.forms if first >= 0 else ():
            rounds[form] += told[form]
            chunks[form].append(tails[form])
    yield from figures_of(case, rounds, chunks, _tails(members, case), goal_of)


def _tails(members: Session, case: Case) -> dict[str, list[Tail]]:
    """Long rounds of the base and of awaited forms, threads unpinned: moving them makes tails."""
    forms = [form for form in case.forms if form == case.base or form in AWAITED]
    if case.op != "send_recv" or case.size > 4 * KB or len(forms) == 1:
        return {}
    found: dict[str, list[Tail]] = {form: [] for form in forms}
    long = replace(case, repeat=TAIL_NEEDS, warm_up=TAIL_NEEDS // 10)
    for number in range(-1, min(TAIL_ROUNDS, case.rounds)):
        _, tails = members.rounds(long, forms, number, 1, gather=False)
        for form in forms if number >= 0 else ():
            found[form].append(tails[form])
    return found
