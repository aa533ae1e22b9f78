"""What only real NCCL or CUDA may do wrong, many times over: a peer is lost at the worst moment."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from hardware.records import Check
from hardware.verify import checked, without_folders

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from bed.crew import Event, Ranks
    from matrix.cells import Target

    from hardware.placed import Placed

__all__ = ["names", "risks"]

_START = 120.0
"""Seconds until the ranks of one run are where the fault is to meet them."""

_ANSWER = 30.0
"""Seconds from the fault until what was pending has ended, and from there to the process's end."""

_DELAYS = (0.0, 0.02, 0.1, 0.4)
"""Seconds from the moment in which the operation is called to the fault, in turns."""

_CLEAN_UP = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "100",
    "MALLOC_PERTURB_": "85",  # memory that was freed is not what it was
}


@dataclass(frozen=True)
class Risk:
    """A program, its fault, and what must come of it.

    Attributes:
        name: on the page.
        program: in `programs.risks`.
        fault: "kill", "stop", or "": the program makes its own.
        judge: says what is wrong with a run: of the ranks, and the time of the fault.
        ranks: how many.
        runs: how many times.
        config: of the program.
        small: the same where a fake stands in for the GPU.
        plain: it uses plain torch, whose process group only the patches mend.
        kernels: it needs a GPU that computes.
    """

    name: str
    program: str
    fault: str
    judge: Callable[[Ranks, float], list[str]]
    ranks: int = 2
    runs: int = 4
    config: Mapping[str, Any] = field(default_factory=dict)
    small: Mapping[str, Any] = field(default_factory=dict)
    plain: bool = False
    kernels: bool = False


def _told(ranks: Ranks, *, rank: int = 0, name: str = "told") -> Event:
    return ranks.wait(name, ranks=[rank], timeout=_ANSWER)[0]


def _ends(ranks: Ranks, rank: int = 0) -> list[str]:
    """A rank ends by itself, and in good order."""
    end = ranks.join(ranks=[rank], timeout=_ANSWER)[rank]
    if end.code == 0:
        return []
    said = [line.strip() for line in ranks.stderr(rank).splitlines() if line.strip()]
    return [f"{end}: {without_folders(said[-1])[-160:]}" if said else str(end)]


def _returns(ranks: Ranks, _at: float) -> list[str]:
    fields = _told(ranks).fields
    return ([] if fields["ok"] else [f"raised {fields['error']}: {fields['text'][:80]}"]) + _ends(ranks)


def _leaves(ranks: Ranks, _at: float) -> list[str]:
    ranks.tell("end", ranks=[0])
    return _ends(ranks)


def _breaks(ranks: Ranks, _at: float) -> list[str]:
    fields = _told(ranks).fields
    if fields["ok"] or fields["error"] != "BrokenWorldException":
        return [f"the operation {fields.get('error', 'returned')}"]
    return []


def _breaks_and_ends(ranks: Ranks, at: float) -> list[str]:
    return _breaks(ranks, at) + _ends(ranks)


def _keeps(ranks: Ranks, at: float) -> list[str]:
    return _breaks(ranks, at) + _is_kept(ranks)


def _raises_and_keeps(ranks: Ranks, _at: float) -> list[str]:
    return (["the operation returned"] if _told(ranks).fields["ok"] else []) + _is_kept(ranks)


def _is_kept(ranks: Ranks) -> list[str]:
    kept = _told(ranks, name="after").fields["kept"]
    return ([] if kept else ["the tensor was written after the exception"]) + _ends(ranks)


def _goes_on(ranks: Ranks, at: float) -> list[str]:
    wrong = _breaks(ranks, at)
    seen = _told(ranks, name="beside").fields
    if seen["wrong"]:
        wrong.append(f"{seen['wrong']} sums of the other world were wrong")
    if seen["after"] > seen["before"] + seen["held_ms"]:
        wrong.append(f"the other world was held up {seen['after']:.0f} ms, before {seen['before']:.0f}")
    return wrong + _ends(ranks)


def _asserted(ranks: Ranks, at: float) -> list[str]:
    wrong = _breaks(ranks, at)
    for name in ("sticky", "later"):
        if _told(ranks, rank=1, name=name).fields["ok"]:
            wrong.append(f"rank 1 heard nothing of its assertion ({name})")
    ranks.join(ranks=[1], timeout=_ANSWER)
    return wrong + _ends(ranks)


_WAITS, _QUICK_VERDICT = {"timeout": 600}, {"hang_timeout": 1.5}
# How much longer an operation of another world may take while NCCL aborts; tests of this code share two cores.
_FREE, _BUSY = {"before": 100, "held_ms": 100.0}, {"before": 3, "held_ms": 2000.0}
_BIG, _SMALL = {"bytes": 4 << 30, "messages": 20}, {"bytes": 1 << 20, "messages": 0}

_ALL: tuple[Risk, ...] = (
    Risk("destroyed with an operation pending, the peer is killed", "destroyed", "kill", _returns, runs=50, config=_WAITS, plain=True),
    Risk("destroyed with an operation pending, the peer is stopped", "destroyed", "stop", _returns, runs=12, config={"timeout": 4}, plain=True),
    Risk("the program ends while a thread makes its first communicator", "absent", "", _leaves, config=_WAITS, plain=True),
    Risk("a first receive, the peer is killed", "cold", "kill", _breaks_and_ends, runs=12),
    Risk("a first receive, the peer is stopped", "cold", "stop", _breaks_and_ends, runs=12, config=_QUICK_VERDICT),
    Risk("the sender of 4 GB is killed, the tensor is filled again", "overwritten", "kill", _keeps, runs=12, config=_BIG, small=_SMALL),
    Risk("plain torch polls, the sender of 4 GB is killed, the tensor is filled again", "overwritten", "kill", _raises_and_keeps, config={**_BIG, "plain": True}, small=_SMALL, plain=True),
    Risk("another world's slowest operation during an abort", "beside", "kill", _goes_on, ranks=3, config=_FREE, small=_BUSY),
    Risk("a live CUDA graph, the peer is killed", "graphed", "kill", _breaks_and_ends, kernels=True),
    Risk("a device assertion in a member", "asserted", "", _asserted, kernels=True),
)  # fmt: skip


def names(*, patched: bool = True) -> tuple[str, ...]:
    """Name the risks of a build."""
    return tuple(risk.name for risk in _ALL if patched or not risk.plain)


def risks(placed: Placed, target: Target, gpus: int, jobs: int) -> list[tuple[str, Callable[[], Check]]]:
    """Name each risk that can be looked at here, and give what runs it.

    Args:
        placed: the launcher.
        target: build and backend.
        gpus: how many there are.
        jobs: runs side by side.
    """
    most = placed.placement.most(gpus)
    return [
        (risk.name, partial(checked, risk.name, partial(_run, risk, placed, target.backend, jobs)))
        for risk in _ALL
        if risk.name in names(patched=target.patched)
        and (most is None or risk.ranks <= most)
        and not (risk.kernels and placed.disguise)
    ]


def _run(risk: Risk, placed: Placed, backend: str, jobs: int) -> tuple[list[Any], dict[str, Any]]:
    runs = 1 if placed.disguise else risk.runs
    pool = ThreadPoolExecutor(jobs)
    try:
        found = list(pool.map(partial(_once, risk, placed, backend), range(runs)))
    finally:
        pool.shutdown(cancel_futures=True)
    wrong = sorted({what for said, _ in found for what in said})
    bad = sum(bool(said) for said, _ in found)
    if bad:
        wrong.insert(0, f"{bad} of {runs}")
    return wrong, {"done": runs, "ms": tuple(ms for _, ms in found if ms is not None)}


def _once(risk: Risk, placed: Placed, backend: str, number: int) -> tuple[list[str], int | None]:
    """Run it once: what was wrong, and the milliseconds from the fault to the end of what was pending."""
    config = {
        "backend": backend, "timeout": 60, **risk.config, **(risk.small if placed.disguise else {})
    }  # fmt: skip
    try:
        with placed.start(
            f"risks:{risk.program}", risk.ranks, config=config, env=_CLEAN_UP, timeout=_START
        ) as ranks:
            ranks.wait("pending")
            if risk.fault:
                time.sleep(_DELAYS[number % len(_DELAYS)])
            at = {"kill": ranks.kill, "stop": ranks.stop}[risk.fault](1) if risk.fault else time.monotonic()
            wrong = risk.judge(ranks, at)
            told = ranks.events(0, "told")
    except AssertionError as exc:
        lines = [line.strip() for line in str(exc).splitlines() if line.strip()]
        return [lines[0] if lines else "failed"], None
    return wrong, round((told[0].at - at) * 1000) if told else None
