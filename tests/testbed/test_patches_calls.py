"""In the modes that the patches leave alone, a patched build makes the calls of NCCL that the official one makes."""

from __future__ import annotations

import re
from collections import Counter

import pytest
from pairkit import running  # noqa: F401 -- a fixture

# What ranks of official builds call in each step of `calls`, by torch version: seen on the test bed, in each mode.
_BOTH = {
    "init": "ncclCommInitRankConfig",
    "all_reduce": "ncclAllReduce",
    "barrier": "ncclAllReduce",
    "batch": "ncclGroupEnd*3 ncclGroupStart*3 ncclRecv ncclSend",
    "block": "ncclBroadcast*2 ncclGroupEnd ncclGroupStart",
    "single": "ncclGroupEnd ncclGroupStart ncclSend",
    "new_group": "ncclAllReduce ncclCommSplit",
    "destroy": "ncclCommDestroy*2 ncclCommFinalize*2",
    "end": "",
}
_FIRST = {"init": "ncclCommInitRankConfig ncclGetUniqueId", "single": "ncclGroupEnd ncclGroupStart ncclRecv"}
_RANKS = [_BOTH | _FIRST, _BOTH]
# 2.6 makes a communicator for two that send to each other.
_PAIR = {"destroy": "ncclCommDestroy*3 ncclCommFinalize*3"}
_PAIRS = [
    _RANKS[0]
    | _PAIR
    | {"single": "ncclCommInitRankConfig ncclGetUniqueId ncclGroupEnd ncclGroupStart ncclRecv"},
    _RANKS[1] | _PAIR | {"single": "ncclCommInitRankConfig ncclGroupEnd ncclGroupStart ncclSend"},
]
RECORDED = {"2.6.0": _PAIRS, "2.9.1": _RANKS, "2.12.1": _RANKS, "2.14.1": _RANKS}


def counted(log):
    """The calls of each step, of a rank's stderr: names, with a number where one is called more than once."""
    steps = re.split(r"^step (\w+)$", log, flags=re.MULTILINE)[1:]
    found = {}
    for name, text in zip(steps[::2], steps[1::2], strict=True):
        names = Counter(re.findall(r"^m8d-bed\[\d+\]: (nccl\w+)\(", text, flags=re.MULTILINE))
        found[name] = " ".join(
            each if count == 1 else f"{each}*{count}" for each, count in sorted(names.items())
        )
    return found


@pytest.mark.parametrize("mode", ["0", "1", "3"])
def test_as_the_official_build(run, build, mode):
    version = build.torch.split("+")[0]
    if version not in RECORDED:
        pytest.skip(f"the calls of the official {version} are not on record")
    env = {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": mode,
        "TORCH_NCCL_USE_COMM_NONBLOCKING": "0",
        "M8D_BED_TRACE": "1",
    }
    with run("patches_ends:calls", env=env) as ranks:
        ranks.wait("done")
        ranks.join()
        told = [counted(ranks.stderr(rank)) for rank in range(2)]
    assert told == RECORDED[version]
