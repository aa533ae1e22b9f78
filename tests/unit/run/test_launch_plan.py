"""Configurations from what a script, the environment and the host say; no torch, no processes."""

from __future__ import annotations

import pickle
from dataclasses import fields, replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multiworld.errors import MultiworldError
from multiworld.launch.config import MultiprocessConfig
from multiworld.launch.errors import ConfigError, ProcessExitedError, ProcessRaisedError
from multiworld.launch.fill_in_config import Facts, address, complete
from multiworld.launch.first_failure import FailedProcess, first_failure
from multiworld.launch.host import gather
from multiworld.launch.parallelism import DIMENSIONS, groups_along

CPU = Facts({}, 0, frozenset({"gloo", "fake"}), "gloo")
GPUS = Facts({}, 4, frozenset({"gloo", "nccl"}), "nccl")


def env(**values: object) -> Facts:
    return replace(CPU, environ={name: str(value) for name, value in values.items()})


def test_nothing_said_on_a_cpu_is_one_process():
    (cfg,) = complete(MultiprocessConfig(), CPU).configs
    assert (cfg.rank, cfg.local_rank, cfg.world_size, cfg.local_world_size) == (0, 0, 1, 1)
    assert (cfg.master_addr, cfg.backend, cfg.model_parallel_backend) == ("127.0.0.1", "gloo", "gloo")


def test_nothing_said_with_gpus_is_one_process_for_each():
    made = complete(MultiprocessConfig(), GPUS)
    assert [cfg.rank for cfg in made.configs] == [0, 1, 2, 3]
    assert {cfg.backend for cfg in made.configs} == {"nccl"}
    assert made.binds
    assert not made.placed


def test_every_field_is_set_and_the_port_goes_in():
    made = complete(MultiprocessConfig(world_size=2), CPU).at(4711)
    for cfg in made.configs:
        assert [f.name for f in fields(cfg) if f.name != "_server" and getattr(cfg, f.name) is None] == []
        assert (cfg.init_method, cfg.master_port, cfg.served) == ("tcp://127.0.0.1:4711", 4711, True)


def test_one_of_several_hosts():
    cfg = MultiprocessConfig(world_size=8, local_world_size=4, master_addr="10.0.0.1", master_port=29500)
    first, second = complete(cfg, CPU), complete(cfg, CPU, rank_offset=4)
    assert [c.rank for c in (*first.configs, *second.configs)] == list(range(8))
    assert [c.local_rank for c in second.configs] == [0, 1, 2, 3]
    assert first.binds
    assert not second.binds
    same = complete(replace(cfg, rank=4), CPU)
    assert same == replace(second)


def test_a_rank_given_by_hand_is_this_process():
    cfg = MultiprocessConfig(rank=1, world_size=2, master_port=29500, master_addr="::1")
    made = complete(cfg, CPU)
    assert [(c.rank, c.local_rank, c.world_size) for c in made.configs] == [(1, 0, 2)]
    assert made.configs[0].init_method == "tcp://[::1]:29500"
    assert not made.binds
    assert complete(replace(cfg, rank=0), CPU).binds


def test_a_process_of_torchrun_is_taken_as_it_is():
    facts = env(
        RANK=3, LOCAL_RANK=1, WORLD_SIZE=4, LOCAL_WORLD_SIZE=2, MASTER_ADDR="h", MASTER_PORT=29400,
        TORCH_DISTRIBUTED_BACKEND="fake",
    )  # fmt: skip
    made = complete(MultiprocessConfig(), facts, rank_offset=2)
    (cfg,) = made.configs
    assert (cfg.rank, cfg.local_rank, cfg.world_size, cfg.local_world_size) == (3, 1, 4, 2)
    assert (cfg.init_method, cfg.backend) == ("tcp://h:29400", "fake")
    assert made.placed
    assert not made.binds
    assert complete(cfg, facts).configs == made.configs
    with pytest.raises(ConfigError, match="world_size=8, and WORLD_SIZE=4 in the environment"):
        complete(MultiprocessConfig(world_size=8), facts)


def test_a_file_needs_no_address():
    (cfg,) = complete(MultiprocessConfig(rank=1, world_size=2, init_method="file:///tmp/x"), CPU).configs
    assert (cfg.init_method, cfg.master_addr, cfg.master_port) == ("file:///tmp/x", "", 0)
    assert not complete(MultiprocessConfig(world_size=2, init_method="file:///tmp/x"), CPU).binds


C = MultiprocessConfig
WRONG = [
    (C(world_size=6, model_parallelism=4), CPU, 0, "multiple of 4"),
    (C(rank=2, world_size=2), CPU, 0, "Ranks are 0 to 1"),
    (C(rank=-1), CPU, 0, "rank=-1"),
    (C(world_size=True), CPU, 0, "world_size=True"),
    (C(world_size=2.0), CPU, 0, "whole number"),  # type: ignore[arg-type]
    (C(local_world_size=3, world_size=2), CPU, 0, "world_size=2"),
    (C(local_rank=2, local_world_size=2, world_size=4), CPU, 0, "local_rank is below local_world_size"),
    (C(world_size=2, model_parallelism=0), CPU, 0, "model_parallelism=0"),
    (C(world_size=2), CPU, -1, "rank_offset=-1"),
    (C(world_size=4), CPU, 2, "Give local_world_size"),
    (C(local_world_size=2), CPU, 2, "Give world_size"),
    (C(backend="glue"), CPU, 0, "This torch can build fake, gloo"),
    (C(backend="cpu:gloo,cuda:nccl"), CPU, 0, "backend="),
    (C(data_parallel_backend="nope"), CPU, 0, "data_parallel_backend='nope'"),
    (C(world_size=8, backend="nccl"), GPUS, 0, "8 processes on this host, 4 GPUs"),
    (C(launch_method="fork"), CPU, 0, "spawn or forkserver"),
    (C(grace=-1), CPU, 0, "grace=-1"),
    (C(master_port=65536), CPU, 0, "master_port=65536"),
    (C(rank=0, world_size=2), CPU, 0, "master_addr is not given"),
    (C(rank=0, world_size=2, master_addr="h"), CPU, 0, "master_port is not given"),
    (C(world_size=4, local_world_size=2, master_port=1), CPU, 0, "master_addr is not given"),
    (C(init_method="tcp://h"), CPU, 0, "init_method='tcp://h'"),
    (C(init_method="tcp://[h:1"), CPU, 0, "init_method="),
    (C(init_method="file://relative"), CPU, 0, "init_method="),
    (C(init_method="tcp://h:1", master_port=2), CPU, 0, "they say the same"),
    (C(), env(RANK="x", WORLD_SIZE=2), 0, "RANK='x'"),
    (C(), env(RANK=0, WORLD_SIZE=0), 0, "WORLD_SIZE='0'"),
    (C(), env(RANK=2, WORLD_SIZE=2, MASTER_ADDR="h", MASTER_PORT=1), 0, "Ranks are 0 to 1"),
    (C(rank=0, world_size=2, master_addr="h"), env(MASTER_PORT="x"), 0, "MASTER_PORT='x'"),
    (C(), env(TORCH_DISTRIBUTED_BACKEND="glue"), 0, "glue"),
]  # fmt: skip


@pytest.mark.parametrize(("cfg", "facts", "offset", "told"), WRONG, ids=range(len(WRONG)))
def test_every_rule_is_told_with_value_rule_and_next_step(cfg, facts, offset, told):
    with pytest.raises(ConfigError) as caught:
        complete(cfg, facts, offset)
    assert told in str(caught.value)
    assert caught.value.value
    assert caught.value.rule
    assert caught.value.next_step


small = st.none() | st.integers(-1, 6)


@given(
    st.builds(
        MultiprocessConfig,
        rank=small, local_rank=small, world_size=small, local_world_size=small,
        master_port=st.none() | st.just(29500),
        master_addr=st.none() | st.just("h"),
        model_parallelism=st.integers(0, 3), pipeline_parallelism=st.integers(0, 3),
        backend=st.none() | st.sampled_from(["gloo", "nccl", "nope"]),
    ),
    st.integers(0, 4),
    st.dictionaries(
        st.sampled_from(["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"]),
        st.integers(0, 5).map(str),
    ),
    st.integers(0, 4),
)  # fmt: skip
def test_a_plan_is_whole_or_refused(cfg, devices, environ, offset):
    facts = Facts(environ, devices, frozenset({"gloo", "nccl"}), "nccl" if devices else "gloo")
    try:
        made = complete(cfg, facts, offset)
    except ConfigError:
        return
    configs = made.configs
    assert configs
    for at, each in enumerate(configs):
        assert 0 <= each.rank < each.world_size
        assert 0 <= each.local_rank < each.local_world_size <= each.world_size
        assert each.rank == configs[0].rank + at
        for name in ("rank", "world_size", "local_world_size", "backend", "master_port"):
            said = getattr(cfg, name)
            # `rank` is that of the first process; an offset counts on top of it.
            if said is not None and at == 0 and not (name == "rank" and offset):
                assert getattr(each, name) == said
        assert each.data_parallelism * each.model_parallelism * each.pipeline_parallelism == each.world_size
        assert each.master_port or made.binds
    if len(configs) > 1:
        assert len(configs) == configs[0].local_world_size
        assert not made.placed
    # What was planned for a process is what that process finds when it looks again.
    bound = made.at(4711) if made.binds else made
    for each in bound.configs:
        assert complete(each, replace(facts, environ=environ if made.placed else {})).configs == (each,)


def test_a_server_stays_with_its_process():
    cfg = replace(MultiprocessConfig(world_size=2), _server=object())
    again = pickle.loads(pickle.dumps(cfg))  # noqa: S301
    assert again == MultiprocessConfig(world_size=2)
    assert again._server is None
    assert "object" not in repr(cfg)


def test_sizes_are_known_after_resolving():
    with pytest.raises(ConfigError, match="resolve"):
        _ = MultiprocessConfig().data_parallelism
    assert MultiprocessConfig(world_size=8, model_parallelism=2, pipeline_parallelism=2).data_parallelism == 2


def test_addresses():
    assert address("10.0.0.1", 1) == "tcp://10.0.0.1:1"
    assert address("::1", 1) == "tcp://[::1]:1"


def test_eight_ranks_in_three_dimensions():
    sizes = {"pipeline": 2, "data": 2, "model": 2}
    assert groups_along("model", **sizes) == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert groups_along("data", **sizes) == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert groups_along("pipeline", **sizes) == [(0, 4), (1, 5), (2, 6), (3, 7)]


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4))
def test_groups_divide_all_ranks_evenly(pipeline, data, model):
    sizes = {"pipeline": pipeline, "data": data, "model": model}
    for name in DIMENSIONS:
        groups = groups_along(name, **sizes)
        assert sorted(rank for group in groups for rank in group) == list(range(pipeline * data * model))
        assert {len(group) for group in groups} == {sizes[name]}
        assert all(a < b for group in groups for a, b in pairwise(group))
    for group in groups_along("model", **sizes):
        assert list(group) == list(range(group[0], group[0] + model))


def failure(rank, code, at, message=None):
    raised = None if message is None else {"type": "ValueError", "message": message, "traceback": "..."}
    return FailedProcess(rank, rank, 100 + rank, code, at, raised, began=True)


def test_who_was_killed_comes_before_who_complains_of_it():
    first, others = first_failure([failure(0, 1, 1.0, "connection closed"), failure(1, -9, 2.0)])
    assert first.rank == 1
    assert [each.line() for each in others] == ["rank 0: ValueError: connection closed"]


def test_otherwise_the_earliest_is_first():
    first, others = first_failure(
        [failure(2, -6, 3.0), failure(1, 1, 2.0, "late"), failure(0, 1, 1.0, "boom\nmore")]
    )
    assert (first.rank, [each.rank for each in others]) == (0, [1, 2])
    assert others[1].line() == "rank 2: SIGABRT"
    assert first.line() == "rank 0: ValueError: boom"


def test_errors_say_all_they_know():
    raised = ProcessRaisedError(
        2,
        0,
        11,
        1,
        type_name="KeyError",
        message="'x'",
        traceback="Traceback\n  here\n",
        also=("rank 1: SIGKILL",),
    )
    text = str(raised)
    assert "Rank 2 raised KeyError: 'x'." in text
    assert "In rank 2 (pid 11):\nTraceback\n  here" in text
    assert "Failed too: rank 1: SIGKILL" in text
    assert str(ProcessExitedError(1, 1, 5, -9, began=True)).startswith("Rank 1 (pid 5) ended by SIGKILL.")
    assert "__main__" in str(ProcessExitedError(1, 1, 5, 1, began=False))
    assert str(ProcessExitedError(1, 1, 5, -63, began=True)).startswith("Rank 1 (pid 5) ended by signal 63.")
    for each in (raised, ProcessExitedError(1, 1, 5, 1, began=False)):
        again = pickle.loads(pickle.dumps(each))  # noqa: S301
        assert (type(again), str(again), again.rank) == (type(each), str(each), each.rank)


def test_in_secure_mode_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("M8D_TLS_CERT", "M8D_TLS_KEY", "M8D_TLS_CA"):
        monkeypatch.setenv(name, "/a/file")
    with pytest.raises(MultiworldError, match="m8d-run --secure"):
        gather()
