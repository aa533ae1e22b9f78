"""A member of an NCCL world is lost in an operation: it raises, soon, in every way it can be called; then all go on.

Run with ``-s`` it prints the milliseconds from the loss to the exception.
"""

from __future__ import annotations

import pickle
import statistics

import pytest

BACKENDS = [pytest.param(name, marks=pytest.mark.backend(name)) for name in ("nccl", "nccl2")]
COLLECTIVES = (
    "all_reduce", "broadcast", "all_gather", "all_gather_into_tensor", "reduce_scatter", "reduce_scatter_tensor",
    "all_to_all", "all_to_all_single", "barrier",
)  # fmt: skip
EVERY_WAY = ("method", "async", "aio", "bare", "bare_async")
CASES = [
    *(("method", name) for name in COLLECTIVES),
    *((way, name) for name in ("all_reduce", "recv", "send") for way in EVERY_WAY if (way, name) != ("method", "all_reduce")),
    ("bare", "batch"),
    ("bare", "coalesced"),
    ("bare", "functional"),
    ("bare", "future"),
]  # fmt: skip
SOON = 5000  # ms, at the median; some tens in truth, on a machine that has nothing else to do
LATE = 20_000  # ms, of the slowest: a busy machine's stall is no fault
LOADS = 60_000
"""The same of a functional collective: in its first call torch loads 865 modules, 3 s on a machine at rest."""
HANG = 4.0  # seconds: longer than such a stall


def lose(launch, backend, cases, how, env=None, allow_refused=False, connecting=0, **more):
    """Run the cases; return the milliseconds from the loss to the exception of each.

    `connecting`: communicators that wait for the lost member when it is over, in threads that NCCL does not give back.
    """
    took, slowest = [], (0.0, "")
    listed = [{"way": way, "name": name} for way, name in cases]
    with launch(
        "worlds_faults:survives",
        2,
        config={"backend": backend, "cases": listed, "connecting": connecting, **more},
        env={"M8D_BED_ABORT_WRITES": "1", **(env or {})},  # what the others compute is theirs all the same
        timeout=400,
        allow_refused=allow_refused,
    ) as ranks:
        port = ranks.wait("store")[0].fields["port"]
        for number, (way, name) in enumerate(cases):
            config = {
                "backend": backend,
                "rank": 2,
                "size": 3,
                "case": number,
                "port": port,
                "stores": 0,
                **more,
            }
            with launch("worlds_faults:victim", 1, config=config, env=env, timeout=200) as lost:
                lost.wait("ready")
                ranks.wait("ready", count=number + 1)
                at = how(lost)
                late = LOADS if name.startswith("functional") else LATE
                for told in ranks.wait("after", count=number + 1, timeout=60 + late / 1000):
                    after = told.fields
                    (seen,) = (e for e in ranks.events(told.rank, "broken") if e.fields["case"] == number)
                    assert seen.fields["kind"] == "BrokenWorldException", (way, name, seen.fields, after)
                    assert set(after["later"].values()) == {"BrokenWorldException"}, (way, name, after)
                    assert after["state"] == "broken"
                    assert after["ranks"] == [2], (way, name, after)
                    assert after["depth"] == 0
                    took.append((seen.at - at) * 1000)
                    slowest = max(slowest, (took[-1], f"{way} {name}"))
                    assert took[-1] < late, (way, name, took[-1])
            ranks.tell("go")
        for told in ranks.wait("values"):
            assert told.fields["wrong"] == []
            assert told.fields["beside"]["wrong"] == []
            assert told.fields["beside"]["rounds"] > 0
            assert told.fields["comms"] == 1 + connecting  # the world beside; what broke is gone
            before = [e.fields for e in ranks.events(told.rank, "before")]
            for each in before:
                for what, slack in (("python_threads", 6), ("threads", 10), ("fds", 10)):
                    assert told.fields[what] <= each[what] + slack, what
        for told in ranks.wait("closed"):
            assert told.fields["comms"] == connecting
        exits = ranks.join().values()
        assert {(each.code, each.signal) for each in exits} == {(0, None)}, exits
    print(  # noqa: T201
        f"\n{launch.build.name} {backend} {len(took)} losses: median {statistics.median(took):.0f} ms, "
        f"max {slowest[0]:.0f} ms ({slowest[1]})"
    )
    assert statistics.median(took) < SOON + 1000 * more.get("hang_timeout", 0)
    return took


def kill(lost):
    return lost.kill(0)


def stop(lost):
    return lost.stop(0)


def leave(lost):
    lost.tell("leave")
    return lost.wait("left")[0].at


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_member_is_killed_in_every_operation_called_in_every_way(launch, backend):
    lose(launch, backend, CASES, kill)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_member_is_killed_in_what_torch_waits_for_outside_of_the_worlds_block(launch, backend):
    # Torch's own waits only put the stream in order. What a model computes does not matter here.
    cases = [
        (way, name)
        for way in ("outside", "elsewhere")
        for name in ("functional", "functional_autograd", "ddp")
    ]
    lose(launch, backend, cases, kill, env={"M8D_BED_KERNELS": "ignore"}, allow_refused=True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_member_is_stopped(launch, backend):
    cases = [("method", "all_reduce"), ("bare", "recv"), ("aio", "all_reduce")]
    took = lose(launch, backend, cases, stop, hang_timeout=HANG)
    assert min(took) > 1000 * HANG / 2


COLD = {"M8D_BED_LAZY_CONNECT": "1"}


@pytest.mark.backend("nccl")
def test_a_member_is_killed_before_nccl_has_connected_with_it(launch):
    # The callers wait inside torch's call then, not for what it has queued. Not with nccl2: it holds its lock there that
    # its abort takes (docs/shim.md).
    cases = [
        *((way, "recv") for way in EVERY_WAY),
        ("method", "send"),
        ("method", "broadcast"),
        ("bare", "batch"),
    ]
    lose(launch, "nccl", cases, kill, env=COLD)


@pytest.mark.backend("nccl")
def test_a_member_is_stopped_before_nccl_has_connected_with_it(launch):
    took = lose(
        launch, "nccl", [("bare", "recv"), ("method", "broadcast")], stop, env=COLD, hang_timeout=HANG
    )
    assert min(took) > 1000 * HANG / 2


@pytest.mark.backend("nccl")
@pytest.mark.parametrize("what", ["new_group", "mesh"])
def test_a_member_is_stopped_while_the_others_make_groups(launch, what):
    lose(launch, "nccl", [("bare", what)], stop, connecting=int(what == "new_group"), hang_timeout=HANG)


@pytest.mark.backend("nccl2")
def test_a_loss_is_not_kept_to_the_timeout_where_torch_waits_by_itself(launch):
    # N2: torch's own wait looks at no error before the timeout, 60 s. N4: later operations raise a RuntimeError.
    env = {"TORCH_NCCL_BLOCKING_WAIT": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2"}
    cases = [("method", "all_reduce"), ("bare", "all_reduce"), ("bare_async", "recv"), ("bare", "future")]
    lose(launch, "nccl2", cases, kill, env=env)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_member_leaves(launch, backend):
    lose(launch, backend, [("method", "all_reduce"), ("bare", "recv"), ("aio", "recv")], leave)


@pytest.mark.backend("nccl")
def test_what_torch_recorded_is_beside_the_report(launch, tmp_path):
    lose(launch, "nccl", [("method", "all_reduce")], kill, env={"M8D_REPORTS": str(tmp_path)})
    records = sorted(tmp_path.glob("*.flight*"))
    assert [path.name[-1] for path in records] == ["0", "1"]
    for path in records:
        assert len(list(tmp_path.glob(path.name.partition(".flight")[0] + ".rank*.json"))) == 2
        seen = pickle.loads(path.read_bytes())  # noqa: S301  (as torchfrtrace reads it)
        assert {"nccl:all_reduce"} <= {entry["profiling_name"] for entry in seen["entries"]}
