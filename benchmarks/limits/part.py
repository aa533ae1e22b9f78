"""Limits beside messages and sums: copying the same bytes, and MPI."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from benchmarks.figures.sizes import KB, MB, parse_size
from benchmarks.limits.mpi import MpiError, MpiRanks, missing
from benchmarks.measuring.part import Part, Run
from benchmarks.operations.cases import Case, figures_of
from benchmarks.operations.session import WARM_UP_ROUNDS, session

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from benchmarks.figures.figure import Figure
    from benchmarks.operations.cases import Tail
    from benchmarks.operations.session import Session

OPS = ("send_recv", "all_reduce")
QUICK = (4, 64 * KB, MB)
FULL = (4, 64 * KB, MB, 4 * MB, 16 * MB, 64 * MB)
MPI = "mpi"
FORMS = ("stock", "world", "memcpy", MPI)


def rounds_of(size: int, *, full: bool) -> tuple[int, int, int]:
    """Rounds that count, and operations of each form in a round: those timed, and those before them."""
    if size <= 4 * KB:
        rounds, repeat, warm_up = 30, 30, 10
    elif size <= 256 * KB:
        rounds, repeat, warm_up = 30, 10, 4
    elif size <= 4 * MB:
        rounds, repeat, warm_up = 20, 6, 2
    else:
        rounds, repeat, warm_up = 16, 2 if size <= 16 * MB else 1, 1
    return rounds * (2 if full else 1), repeat, warm_up


def cases_of(run: Run, *, mpi: bool) -> list[Case]:
    """What is measured; 4 bytes are not worth a copy."""
    options, found = run.options, []
    for op in options.ops or OPS:
        for size in options.sizes or run.pick(QUICK, FULL):
            rounds, repeat, warm_up = rounds_of(size, full=run.full)
            left_out = {MPI} if not mpi else set()
            if size < KB:
                left_out.add("memcpy")
            forms = tuple(form for form in FORMS if form not in left_out)
            found.append(Case("limits", op, size, 2, forms, options.rounds or rounds, repeat, warm_up))
    return found


def measure(run: Run) -> Iterator[Figure]:
    """Every case, between two members; beside them two processes of MPI, where there is one."""
    with contextlib.ExitStack() as stack:
        mpi, why = None, missing()
        if not why:
            try:
                mpi = stack.enter_context(MpiRanks(2))
                run.remark(f"MPI is {mpi.library}.")
            except MpiError as error:
                why = str(error)
        if why:
            run.remark(f"MPI is left out: {why}")
        cases = cases_of(run, mpi=mpi is not None)
        members = stack.enter_context(session(2, FORMS))
        for case in cases:
            run.progress(case.name.replace("/", ", "))
            members.prepare(case, [form for form in case.forms if form != MPI])
            yield from _measured(members, mpi, case)


def _measured(members: Session, mpi: MpiRanks | None, case: Case) -> Iterator[Figure]:
    rounds: dict[str, list[float]] = {form: [] for form in case.forms}
    chunks: dict[str, list[Tail]] = {form: [] for form in case.forms}
    ours = [form for form in case.forms if form != MPI]
    for number in range(-WARM_UP_ROUNDS, case.rounds):
        told, tails = members.rounds(case, ours, number, 1)
        if mpi is not None:
            told[MPI], tails[MPI] = _round_of_mpi(mpi, case)
        for form in case.forms if number >= 0 else ():
            rounds[form] += told[form]
            chunks[form].append(tails[form])
    yield from figures_of(case, rounds, chunks, {}, lambda _case, _form: None)


def _round_of_mpi(mpi: MpiRanks, case: Case) -> tuple[list[float], Tail]:
    told = mpi.rounds(op=case.op, size=case.size, rounds=1, repeat=case.repeat, warm_up=case.warm_up)
    slowest = max(told[:1] if case.op == "send_recv" else told, key=lambda each: float(each["rounds"][0]))
    return slowest["rounds"], slowest["chunk"]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Which cases; everything by default."""
    parser.add_argument("--ops", nargs="+", choices=OPS, metavar="OP", help="only these operations")
    parser.add_argument("--sizes", nargs="+", type=parse_size, metavar="SIZE", help="4B, 64KB, 1MB, ...")
    parser.add_argument("--rounds", type=int, help="that count, of each case")


PART = Part(
    name="limits",
    title="Limits",
    description=(
        "A message between two members and the sum of two, beside what bounds them: `memcpy`, the same bytes "
        "copied within a process (for a message to and fro two copies, halved), and `mpi`, the operation "
        "of MPI through mpi4py, between two processes of its own. Rounds of all take turns. MPI waits by "
        "looking, which takes a core of each process while it waits; the others sleep. It needs "
        "`openmpi-bin` of Debian and `pip install mpi4py`; without them the part says so and has no `mpi`."
    ),
    measure=measure,
    add_options=add_options,
)
