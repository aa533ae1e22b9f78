"""A run's events for tests: a hub and workers in a world each, and what goes wrong there."""

from __future__ import annotations

from hypothesis import strategies as st

from multiworld.run import events as h
from multiworld.run.view.state import RunState

AT = 1_700_000_000.0


def begun(workers: int = 8, *, max_restarts: int = 3) -> list[h.RunEvent]:
    """A hub (rank 0) and `workers` workers, worker i with the hub in world "w{i}"; everything active."""
    told: list[h.RunEvent] = [
        h.RunStarted(AT, "job7", "worker", max_restarts, "train.py", "alpha"),
        h.SlotTaken(AT, 0, 1),
        h.WorkerStarted(AT, 0, "hub", 0, 0, 4000, 0),
    ]
    for i in range(workers):
        told.append(h.WorkerStarted(AT, i + 1, "worker", i, i + 1, 4001 + i, 0))
        told += [h.WorldChanged(AT + 1, rank, f"w{i}", "active", 1) for rank in (0, i + 1)]
    return told


def killed(rank: int = 3, at: float = AT + 100) -> list[h.RunEvent]:
    """That worker of `begun` is killed; the hub notices; it is started again, and back in its world."""
    world = f"w{rank - 1}"
    return [
        h.WorkerFailed(at, rank, 4000 + rank, 0, -9, "killed by SIGKILL"),
        h.WorkerRestarting(at, rank, 1, 0.0, 2),
        h.WorldChanged(
            at + 0.1, 0, world, "broken", 1, "rank 1 crashed: connection reset by peer", "crashed"
        ),
        h.WorkerStarted(at + 0.2, rank, "worker", rank - 1, rank, 4700 + rank, 1),
        h.WorldChanged(at + 0.3, 0, world, "joining", 0),
        h.WorldChanged(at + 0.4, rank, world, "joining", 0),
        h.WorldChanged(at + 0.5, rank, world, "active", 2),
        h.WorldChanged(at + 0.6, 0, world, "active", 2),
    ]


def run_of(*told: h.RunEvent, at: float = AT + 200) -> RunState:
    """A state of these events, looked at `at`."""
    state = RunState(clock=lambda: at)
    for each in told:
        state.apply(each)
    return state


_RANK = st.integers(0, 5)
_PID = st.integers(100, 105)
_TEXT = st.text(max_size=20)
_SEAT = st.none() | st.integers(0, 3)
_TIME = st.floats(0, 2e9)
_SMALL = st.integers(0, 9)

ANYTHING = st.one_of(
    st.builds(h.RunStarted, _TIME, _TEXT, st.sampled_from(["worker", "group"]), _SMALL, _TEXT, _TEXT),
    st.builds(h.SlotTaken, _TIME, _SEAT, _SMALL),
    st.builds(h.WorkerStarted, _TIME, _RANK, _TEXT, _RANK, _RANK, _PID, _SMALL),
    st.builds(h.WorkerFailed, _TIME, _RANK, _PID, _SMALL, st.integers(-70, 255), _TEXT),
    st.builds(h.WorkerRestarting, _TIME, _RANK, _SMALL, st.floats(0, 60), _SMALL),
    st.builds(h.WorkerEnded, _TIME, _RANK, _PID),
    st.builds(h.WorkerStopped, _TIME, _RANK, _PID, st.none() | st.integers(-70, 255)),
    st.builds(
        h.WorldChanged,
        _TIME,
        _RANK,
        st.sampled_from(["w1", "w2", "w10"]) | _TEXT,
        st.sampled_from(["joining", "active", "broken", "closed", "failed"]),
        _SMALL,
        _TEXT,
        size=_SMALL,
        sizes=st.sampled_from(["", "1:4"]),
    ),
    st.builds(h.WorkerRetiring, _TIME, _RANK, st.floats(0, 60)),
    st.builds(h.CallsRaised, _TIME, _RANK, st.sampled_from(["w1", "w2", "w10"]), _SMALL),
    st.builds(h.StateProgress, _TIME, _RANK, st.sampled_from(["w1", "w2", "w10"]), _SMALL, _SMALL),
    st.builds(h.NodeJoined, _TIME, _TEXT, _SEAT),
    st.builds(h.NodeLost, _TIME, _TEXT, _SEAT, st.sampled_from(["crashed", "left"]), st.tuples(_TEXT, _TEXT)),
    st.builds(h.Note, _TIME, st.integers(0, 60), _TEXT),
    st.builds(h.RunEnded, _TIME, st.integers(0, 255), _TEXT),
)
"""Any events, in any order."""
