"""Every collective torch's NCCL backends offer, with values: nothing the double does may be almost right."""

from __future__ import annotations

import pytest
from bed.builds import BACKENDS
from bed.defects import PREMUL, premul_of_bfloat16

LIMIT = 150.0  # seconds; a run takes 1 to 3 on two free cores
# How a group comes to its communicators.
INITS = {
    "lazy": ({}, {}),
    "eager": ({"eager": True, "split": True}, {}),
    "non-blocking": (
        {"eager": True, "split": True},
        {"TORCH_NCCL_USE_COMM_NONBLOCKING": "1"},
    ),
}
EVERY = pytest.mark.parametrize(
    "backend", [pytest.param(each, marks=pytest.mark.backend(each)) for each in BACKENDS]
)
INIT = pytest.mark.parametrize("init", INITS)
# Each way with one size, each size in one way: how a group comes to them changes nothing in what they calculate.
SIZED = pytest.mark.parametrize(("init", "size"), [*((init, 3) for init in INITS), ("lazy", 2), ("lazy", 4)])

# What torch 2.6 does not know: an average by a factor in bfloat16, and eight-bit floats outside of ProcessGroupNCCL's
# own table. In scatter and all_to_all it finds out with an NCCL group open, and leaves it open.
UNKNOWN = {"bfloat16 premul", "float8_e4m3fnuz", "float8_e5m2fnuz"}
LEFT_OPEN = ("scatter float8", "all_to_all float8")


def run(launch, program, size, backend, init, **config):
    more, env = INITS[init]
    # Destructors of torch and of Python take most of a rank's time, and are no part of what is calculated.
    config |= {"backend": backend, "exit": "hard", **more}
    with launch(f"values:{program}", size, config=config, env=env, timeout=LIMIT) as ranks:
        told = [each.fields for each in ranks.wait("checked")]
        clean = [each.fields for each in ranks.wait("clean")]
        codes = {each.code for each in ranks.join().values()}
    return told, clean, codes


def once_per_class(build, backend):
    """Two names of one implementation are shown once (that the other name means it, the build has said)."""
    names = [name for name in BACKENDS if build.backends.get(name) == build.backends[backend]]
    if names[0] != backend:
        pytest.skip(f"{backend} is what {build.name} calls {names[0]} as well")


@EVERY
@SIZED
def test_every_collective(launch, build, backend, init, size):
    once_per_class(build, backend)
    told, clean, codes = run(launch, "collectives", size, backend, init)
    assert [each["failed"] for each in told] == [{}] * size
    # Each that torch has, in each collective, and no other.
    wrong = {
        name: PREMUL
        for name in told[0]["done"]
        if "bfloat16 premul" in name and name not in told[0]["refused"] and premul_of_bfloat16(build.torch)
    }
    assert [each["defects"] for each in told] == [wrong] * size
    assert {len(each["done"]) for each in told} == {len({*told[0]["done"]})}
    assert len(told[0]["done"]) > 350
    for each in told:
        for name, left_open in each["refused"].items():
            assert build.torch.startswith("2.6."), f"{name} is refused"
            assert any(text in name for text in UNKNOWN), name
            assert left_open == int(name.startswith(LEFT_OPEN)) or build.patched, name
    assert [(each["pending"], each["left"]) for each in clean] == [(0, 0)] * size
    assert codes == {0}


@EVERY
@INIT
def test_groups_beside_the_default_one(launch, build, backend, init):
    size = 3
    once_per_class(build, backend)
    # With nccl-lazy the name of a pair's communicator has a number that counts the pairs of that name over all groups
    # of a process, so that two processes with different groups wait for each other under different names.
    unbatched = backend != "nccl-lazy"
    told, clean, codes = run(launch, "groups", size, backend, init, unbatched=unbatched)
    assert [each["failed"] for each in told] == [{}] * size
    assert [each["defects"] for each in told] == [{}] * size
    assert all(len(each["done"]) > 70 for each in told)
    assert [(each["pending"], each["left"]) for each in clean] == [(0, 0)] * size
    assert codes == {0}


@pytest.mark.backend("nccl")
def test_a_wrong_value_is_found(launch):
    """The checks themselves: a rank that gives something else than it says."""
    told, _, _ = run(launch, "collectives", 2, "nccl", "lazy", spoil=1)
    for name in ("all_reduce float32 sum", "broadcast int64", "send and recv float16", "all_to_all_uneven"):
        assert name in told[0]["failed"], name
    assert "instead of" in told[0]["failed"]["all_reduce float32 sum"]
