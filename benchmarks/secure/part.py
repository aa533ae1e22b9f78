"""Secure mode: what mutual TLS adds to joins, control messages, the store's answers, and messages."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, NamedTuple

from benchmarks.figures.figure import Figure, Goal, quantile, quartiles, ratio, summary
from benchmarks.figures.sizes import KB, MB, parse_size, size_name
from benchmarks.hosts.network import DEVICE, Cable
from benchmarks.measuring.part import Part, Run
from benchmarks.measuring.ranks import Ranks
from benchmarks.measuring.rounds import interleaved
from benchmarks.secure.certificates import certificates

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Sequence

KINDS = ("control", "store", "join/first", "join/later", "lane", "host")
SIZES = (4, 64 * KB, MB, 16 * MB, 64 * MB)
SUM = MB
HOST = 16 * MB
FORMS = ("plain", "tls")

_MAKE = "benchmarks.secure.rank:make"
_JOIN, _CONTROL, _THROUGHPUT = Goal(at_most=5.0), Goal(at_most=25.0), Goal(at_least=0.5)
_TIMEOUT = 300.0
_HOLDS = ("the join", "the join and a first all_reduce")


class Pair(NamedTuple):
    """Two members of one form, and where their store is."""

    members: Ranks
    host: str
    port: int


def added(name: str, unit: str, pairs: Sequence[Sequence[float]], note: str, goal: Goal | None) -> Figure:
    """What TLS adds: the median of the differences, round by round; the medians of both beside it.

    Args:
        name: of the figure.
        unit: of the times.
        pairs: of each round the time without, and with TLS.
        note: what it is.
        goal: for the difference.
    """
    plain, tls = zip(*pairs, strict=True)
    low, middle, high = quartiles([with_it - without for without, with_it in pairs])
    return Figure(
        "secure", name, middle, unit, low, high, len(pairs), goal=goal, note=note,
        baseline=quantile(plain, 0.5), absolute=quantile(tls, 0.5), absolute_unit=unit,
        series={"plain": [round(each, 3) for each in plain], "tls": [round(each, 3) for each in tls]},
    )  # fmt: skip


def carried(name: str, size: int, plain: Sequence[float], tls: Sequence[float], note: str) -> Figure:
    """The time of a small operation against that without TLS; of one from 1 MB on the throughput.

    Args:
        name: of the figure.
        size: bytes.
        plain: µs of each round.
        tls: the same.
        note: what it is.
    """
    if size < MB:
        return ratio("secure", name, tls, plain, note=f"{note}: time", absolute_unit="us")
    rates = [[size / each / 1e3 for each in form] for form in (tls, plain)]
    return ratio("secure", name, *rates, note=f"{note}: throughput", absolute_unit="GB/s", goal=_THROUGHPUT)


def measure(run: Run) -> Iterator[Figure]:
    """Each kind, plain and over TLS in turns.

    Raises:
        Unavailable: no namespaces are to be had, or `cryptography` is missing.
    """
    kinds = run.options.kinds or KINDS
    with contextlib.ExitStack() as ends:
        secure = ends.enter_context(certificates())
        cable = ends.enter_context(Cable(""))
        forms = {"plain": dict[str, str](), "tls": secure}
        run.progress("starting processes")
        if {*kinds} - {"host"}:
            pairs = {
                form: _pair(ends, environment, cable.hosts, cable.address(0))
                for form, environment in forms.items()
            }
            if "control" in kinds:
                yield _control(run, pairs["tls"].members)
            if "store" in kinds:
                yield _stored(run, pairs)
            if "join/first" in kinds:
                yield from _first(run, pairs, forms, cable.hosts)
            if "join/later" in kinds:
                yield from _later(run, pairs)
            if "lane" in kinds:
                yield from _lane(run, pairs)
            _leave(pairs)
        if "host" in kinds:
            here = {form: _pair(ends, environment, []) for form, environment in forms.items()}
            note = "a message within a host, which takes a Unix socket: no TLS"
            yield _carried(run, here, "send_recv", HOST, f"host/send_recv/{size_name(HOST)}", note)
            _leave(here)


def _pair(
    ends: contextlib.ExitStack, environment: dict[str, str], namespaces: list[str], host: str = "127.0.0.1"
) -> Pair:
    device = DEVICE if namespaces else "lo"
    env = {"GLOO_SOCKET_IFNAME": device, "M8D_IFNAME": device, **environment}
    keeper = ends.enter_context(
        Ranks(_MAKE, 1, args={"kind": "keeper", "namespaces": namespaces[:1]}, env=env)
    )
    port = keeper[0].call("serve", host=host)
    members = ends.enter_context(Ranks(_MAKE, 2, args={"kind": "member", "namespaces": namespaces}, env=env))
    members.call("meet", timeout=_TIMEOUT, host=host, port=port)
    return Pair(members, host, port)


def _leave(pairs: dict[str, Pair]) -> None:
    for pair in pairs.values():
        pair.members.call("leave")


def _control(run: Run, members: Ranks) -> Figure:
    run.progress("control")
    found = [members[0].call("sealed", repeat=2000) for _ in range(run.options.rounds or run.pick(9, 30))]
    return summary(
        "secure", "control/beat", found, "us", goal=_CONTROL,
        note="a watchdog's sign of life is sealed, and opened by the other end, in one process",
    )  # fmt: skip


def _stored(run: Run, pairs: dict[str, Pair]) -> Figure:
    run.progress("store")
    found = interleaved(
        FORMS,
        run.options.rounds or run.pick(9, 30),
        lambda form: float(
            pairs[form].members[0].call("asked", host=pairs[form].host, port=pairs[form].port, repeat=200)
        ),
    )
    told = list(zip(*found.values(), strict=True))
    return added("store/compare_set", "us", told, "a call of the store from the host that has it", None)


def _first(
    run: Run, pairs: dict[str, Pair], forms: dict[str, dict[str, str]], namespaces: list[str]
) -> Iterator[Figure]:
    args = {"kind": "zygote", "namespaces": namespaces}
    env = {"GLOO_SOCKET_IFNAME": DEVICE, "M8D_IFNAME": DEVICE}
    rounds = run.options.rounds or run.pick(9, 40)
    numbers = iter(range(1_000_000))
    with Ranks(_MAKE, 2, args=args, env=env) as herd:

        def once(form: str) -> list[float]:
            number = next(numbers)
            run.progress(f"join/first, {number // 2 + 1} of {rounds + 2}")
            told = herd.call(
                "first", timeout=150.0, host=pairs[form].host, port=pairs[form].port, world=f"first{number}",
                environment=forms[form],
            )  # fmt: skip
            return [max(each) for each in zip(*told, strict=True)]

        found = interleaved(FORMS, rounds, once)
    what = "the first world of two processes, which have loaded all modules"
    yield from _joins("first", found, what)


def _later(run: Run, pairs: dict[str, Pair]) -> Iterator[Figure]:
    numbers = iter(range(1_000_000))

    def once(form: str) -> list[float]:
        told = pairs[form].members.call("later", timeout=150.0, worlds=[f"later{next(numbers)}"])
        return [max(each) for each in zip(*(line[0] for line in told), strict=True)]

    run.progress("join/later")
    found = interleaved(FORMS, run.options.rounds or run.pick(20, 100), once)
    yield from _joins("later", found, "a further world of two processes whose watchdogs are connected")


def _joins(name: str, found: dict[str, list[list[float]]], what: str) -> Iterator[Figure]:
    for number, (end, held) in enumerate(zip(("joined", "used"), _HOLDS, strict=True)):
        told = [[round_[number] for round_ in each] for each in zip(*found.values(), strict=True)]
        yield added(f"join/{name}/{end}", "ms", told, f"{what}: {held}", _JOIN)


def _lane(run: Run, pairs: dict[str, Pair]) -> Iterator[Figure]:
    for size in run.options.sizes or SIZES:
        name = f"lane/send_recv/{size_name(size)}"
        yield _carried(run, pairs, "send_recv", size, name, "a message between hosts")
    if SUM in (run.options.sizes or SIZES):
        note = "an all_reduce between hosts; gloo's without TLS"
        yield _carried(run, pairs, "all_reduce", SUM, f"lane/all_reduce/{size_name(SUM)}", note)


def _carried(run: Run, pairs: dict[str, Pair], op: str, size: int, name: str, note: str) -> Figure:
    run.progress(name.replace("/", ", "))
    for pair in pairs.values():
        pair.members.call("prepare", timeout=_TIMEOUT, op=op, size=size)
    repeat = 100 if size < KB else 20 if size < MB else 3

    def once(form: str) -> float:
        told = pairs[form].members.call("run", timeout=_TIMEOUT, repeat=repeat)
        return float(told[0] if op == "send_recv" else max(told))

    found = interleaved(FORMS, run.options.rounds or run.pick(15, 60 if size <= 16 * MB else 30), once)
    return carried(name, size, found["plain"], found["tls"], note)


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kinds", nargs="+", choices=KINDS, metavar="KIND", help=f"of {', '.join(KINDS)}")
    parser.add_argument("--sizes", nargs="+", type=parse_size, metavar="SIZE", help="4B, 64KB, 1MB, ...")
    parser.add_argument("--rounds", type=int, help="of each kind (default: 9 to 20; more with --full)")


PART = Part(
    name="secure",
    title="Secure mode",
    description=(
        "Two members in two network namespaces with a cable (veth) between them, with mutual TLS and without "
        "it in turns, each in processes of their own; a further process has the store of each. Times are "
        "told with what TLS adds to them; of messages from 1 MB on the throughput, against that without TLS. "
        "Needs root, ip(8), tc(8) and the package cryptography."
    ),
    measure=measure,
    add_options=_options,
)
