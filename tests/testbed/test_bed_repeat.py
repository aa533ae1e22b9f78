"""The same kill, twenty times: the same ends, the same exceptions, in times of one kind."""

from __future__ import annotations

import statistics

import pytest

RUNS = 20
# Stock builds sleep four times this before they abort; what is repeated here is not that.
ENV = {
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    # Nor a second's work on a stack trace before the abort.
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "0",
    "TORCH_FR_BUFFER_SIZE": "0",
}
MODES = {
    "default": {},
    "clean-up only": {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "2"},
    "no handling": {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"},
    "blocking wait": {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "2", "TORCH_NCCL_BLOCKING_WAIT": "1"},
}
BAND = 15.0  # seconds around the median; milliseconds on a free machine, and this one may be busy


def once(launch, mode, op):
    """Kill rank 1 while rank 0 waits for it: how rank 0 ended, what it saw, and the seconds it took."""
    config = {"op": op, "seconds": 0.25 if mode == "no handling" else 30.0, "exit": "hard"}
    with launch("killed:waits", 2, config=config, env={**ENV, **MODES[mode]}, timeout=120) as ranks:
        ranks.wait("pending")
        at = ranks.kill(1)
        ranks.tell("killed", ranks=[0])
        ended = ranks.join(ranks=[0])[0]
        seen = {each.name: each for each in ranks.events(0)}
    waited = seen.get("waited")
    end = waited or seen.get("gave up") or ended
    saw = waited.fields.get("error", "none") if waited else "gave up" if "gave up" in seen else "nothing"
    return (ended.code, ended.signal, saw), end.at - at


@pytest.mark.parametrize(
    ("mode", "op"), [*((mode, "all_reduce") for mode in MODES), ("clean-up only", "recv")]
)
def test_twenty_kills_agree(launch, mode, op):
    runs = [once(launch, mode, op) for _ in range(RUNS)]
    assert len({end for end, _ in runs}) == 1, runs
    times = [seconds for _, seconds in runs]
    middle = statistics.median(times)
    assert max(times) - middle < BAND, times
    assert middle - min(times) < BAND, times
