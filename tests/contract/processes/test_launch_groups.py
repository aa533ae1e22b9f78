"""Groups of launched processes: torch's default one and named worlds, their dimensions, and all_to_all's gradients."""

from __future__ import annotations

import os
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist

import multiworld as mw
from multiworld.launch import (
    ConfigError,
    MultiprocessConfig,
    all_to_all,
    default_backend,
    get_distributed_backend,
    init_and_run,
    init_dist,
    init_parallelism,
    init_process_group_from_backend,
    launch_subprocesses,
    set_distributed_backend,
)

PATIENCE = 120.0  # seconds; several processes load torch on a machine that may be busy
WHERE = [None, "named"]  # torch's default group, or a world


def config(count: int, **more) -> MultiprocessConfig:
    return MultiprocessConfig(world_size=count, launch_method="forkserver", **more)


def run(func, count: int, world: str | None, *args, **more):
    """`func` in `count` processes, inside their group."""
    ready = partial(init_and_run, func, world=world, timeout=PATIENCE)
    return launch_subprocesses(ready, config(count, **more), None, 0, *args)


# -- what the processes do ---------------------------------------------------------------------------------------


def who(cfg):
    total = torch.tensor([float(cfg.rank)])
    dist.all_reduce(total)
    worlds = {name: (world.rank, world.world_size) for name, world in mw.worlds().items()}
    return dist.get_rank(), dist.get_world_size(), total.item(), worlds


def places(cfg, world):
    made = init_parallelism(cfg, world)
    with mw.worlds()[world] if world else _nothing():
        sums = {}
        for name in ("pipeline", "data", "model"):
            dimension = getattr(made, name)
            total = torch.tensor([10.0**cfg.rank])
            dist.all_reduce(total, group=dimension.group)
            through_mesh = made.mesh.get_group(name)
            sums[name] = (
                dimension.rank, dimension.size, dimension.ranks, total.item(),
                dist.get_process_group_ranks(through_mesh), made.mesh.get_local_rank(name),
                dist.get_backend(dimension.group),
            )  # fmt: skip
        return sums, made.mesh.mesh_dim_names, tuple(made.mesh.shape)


class _nothing:  # noqa: N801
    def __enter__(self):
        return None

    def __exit__(self, *_):
        return None


SPLITS = {  # rows that rank r sends to rank s
    2: [[1, 2], [3, 0]],
    3: [[1, 0, 2], [2, 1, 1], [0, 3, 1]],
    4: [[1, 1, 0, 2], [0, 0, 0, 1], [2, 1, 1, 1], [1, 0, 3, 0]],
}


def gradients(cfg, given):
    """Analytic and numerical gradient of a loss of all ranks by each rank's input; first and second derivative."""
    size, rank = dist.get_world_size(), dist.get_rank()
    splits = SPLITS[size]
    inputs, outputs = splits[rank], [row[rank] for row in splits]
    world = given if isinstance(given, str) else None
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(sum(inputs), 2, dtype=torch.float64, generator=generator, requires_grad=True)
    weight = torch.randn(sum(outputs), 2, dtype=torch.float64, generator=generator)

    def loss(value):
        return (all_to_all(value, outputs, inputs, world=world) ** 3 * weight).sum()

    (analytic,) = torch.autograd.grad(loss(x), x, create_graph=True)
    (second,) = torch.autograd.grad(analytic.sum(), x)
    numerical, step = torch.zeros_like(x), 1e-5
    first_sums = torch.zeros_like(x)  # differences of the analytic gradient's sum
    for owner in range(size):
        for at in range(2 * sum(splits[owner])):
            ends, grads = [], []
            for sign in (1, -1):
                moved = x.detach().clone()
                if rank == owner:
                    moved.view(-1)[at] += sign * step
                moved.requires_grad_()
                local = loss(moved)
                (grad,) = torch.autograd.grad(local, moved)
                both = torch.stack([local.detach(), grad.sum()])
                dist.all_reduce(both)
                ends.append(both[0])
                grads.append(both[1])
            if rank == owner:
                numerical.view(-1)[at] = (ends[0] - ends[1]) / (2 * step)
                first_sums.view(-1)[at] = (grads[0] - grads[1]) / (2 * step)
    worst = (analytic - numerical).abs().max().item() if x.numel() else 0.0
    worst_second = (second - first_sums).abs().max().item() if x.numel() else 0.0
    return worst, worst_second, analytic.abs().sum().item()


def exchange(cfg, kind):
    size, rank = dist.get_world_size(), dist.get_rank()
    dtype = getattr(torch, kind)
    sent = torch.arange(2 * size).reshape(size, 2).add(100 * rank).to(dtype)
    got = all_to_all(sent)
    assert type(got) is torch.Tensor
    assert all_to_all(sent.t().contiguous().t()).equal(got)
    expected = torch.stack([torch.tensor([2 * rank, 2 * rank + 1]) + 100 * each for each in range(size)]).to(
        dtype
    )
    return got.equal(expected), sent


def refusals(cfg):
    seen = []
    for call in (
        lambda: all_to_all(torch.zeros(3)),
        lambda: all_to_all(torch.zeros(2), [1, 1]),
        lambda: all_to_all(torch.zeros(2), [1, 1], [1, 2]),
        lambda: all_to_all(torch.zeros(2), [1], [2]),
        lambda: all_to_all(torch.zeros(2), [2, 0], [3, -1]),
        lambda: all_to_all(torch.tensor(1.0)),
    ):
        with pytest.raises(ConfigError) as caught:
            call()
        seen.append(str(caught.value))
    with pytest.raises(mw.UnknownWorldError):
        all_to_all(torch.zeros(2), world="nobody")
    with pytest.raises(ConfigError, match="multiple of 3"):
        init_parallelism(MultiprocessConfig(model_parallelism=3))
    if not mw.worlds():
        with pytest.raises(ConfigError, match="there already"):
            init_dist(cfg)
    return seen


def lose_a_member(cfg):
    """The other member leaves between the forward pass and the backward one."""
    world = init_dist(cfg, "lossy", timeout=PATIENCE)
    x = torch.ones(2, requires_grad=True)
    y = all_to_all(x, world=world)
    world.barrier()
    if cfg.rank == 1:
        world.close()
        return "left"
    deadline = time.monotonic() + PATIENCE
    while world.state is mw.State.ACTIVE and time.monotonic() < deadline:
        time.sleep(0.01)
    with pytest.raises(mw.BrokenWorldException) as backward:
        y.sum().backward()
    with pytest.raises(mw.BrokenWorldException) as forward:
        all_to_all(x, world="lossy")
    world.close()
    return [backward.value.cause, forward.value.cause]


def fails_in_its_function(cfg):
    """Rank 1's function ends with an exception; rank 0 waits for it in the world."""

    def work(cfg):
        mw.worlds()["named"].barrier()
        if cfg.rank == 1:
            raise LookupError("mine")
        dist.recv(torch.zeros(1), 1)

    try:
        init_and_run(work, cfg, world="named", timeout=PATIENCE)
    except mw.BrokenWorldException as broken:
        return broken.cause, broken.detail.rpartition(": ")[2]
    except LookupError:
        return "raised"


def two_worlds_at_once(cfg):
    """The default group, and a world beside it."""
    init_dist(cfg, timeout=PATIENCE)
    world = init_dist(cfg, "beside", timeout=PATIENCE)
    outside = all_to_all(torch.full((2,), float(cfg.rank)))
    inside = all_to_all(torch.full((2,), 10.0 + cfg.rank), world=world)
    dist.barrier()
    dist.destroy_process_group()
    world.barrier()
    world.close()
    return outside.tolist(), inside.tolist()


# -- tests -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", WHERE)
def test_the_group_is_there(world):
    for rank, seen in enumerate(run(who, 2, world)):
        assert seen == (rank, 2, 1.0, {"named": (rank, 2)} if world else {})


@pytest.mark.parametrize("world", WHERE)
def test_four_processes_in_dimensions(world):
    seen = run(places, 4, world, world, model_parallelism=2, pipeline_parallelism=2)
    for rank, (dimensions, names, shape) in enumerate(seen):
        assert names == ("pipeline", "data", "model")
        assert shape == (2, 1, 2)
        stage, part = divmod(rank, 2)
        for name, own, ranks in (
            ("pipeline", stage, (part, part + 2)),
            ("data", 0, (rank,)),
            ("model", part, (2 * stage, 2 * stage + 1)),
        ):
            total = float(sum(10**each for each in ranks))
            assert dimensions[name] == (own, len(ranks), ranks, total, list(ranks), own, "gloo"), (rank, name)


def test_a_backend_of_its_own_for_a_dimension():
    seen = run(places, 2, None, None, data_parallel_backend="cpu:gloo")
    for rank, (dimensions, _, shape) in enumerate(seen):
        assert shape == (1, 2, 1)
        assert dimensions["data"][:4] == (rank, 2, (0, 1), 11.0)
        assert dimensions["data"][6] != dimensions["model"][6] == "gloo"


@pytest.mark.parametrize("world", WHERE)
@pytest.mark.parametrize("count", [2, 3, 4])
def test_all_to_alls_gradient_is_the_numerical_one(world, count):
    for worst, worst_second, size in run(gradients, count, world, world):
        assert worst < 1e-6
        assert worst_second < 1e-6
        assert size > 0.01  # a gradient of zero would agree with anything wrong


@pytest.mark.parametrize("kind", ["float32", "int64", "float64"])
def test_all_to_all_moves_rows(kind):
    assert [right for right, _ in run(exchange, 2, None, kind)] == [True, True]


@pytest.mark.parametrize("world", WHERE)
def test_what_is_refused(world):
    for seen in run(refusals, 2, world):
        assert len(seen) == 6
        assert all("shape" in each for each in seen)


def test_a_member_that_leaves_is_told_in_the_backward_pass_too():
    assert launch_subprocesses(lose_a_member, config(2)) == [["left", "left"], "left"]


def test_an_exception_that_ends_the_function_is_told_with_its_type():
    seen = launch_subprocesses(fails_in_its_function, config(2))
    assert seen == [("failed", "its function ended with LookupError"), "raised"]


def test_the_default_group_and_a_world_beside_it():
    assert launch_subprocesses(two_worlds_at_once, config(2)) == [
        ([0.0, 1.0], [10.0, 11.0]),
        ([0.0, 1.0], [10.0, 11.0]),
    ]


def test_a_single_process_has_a_group_too():
    assert run(who, 1, None) == [(0, 1, 0.0, {})]
    assert run(who, 1, "named") == [(0, 1, 0.0, {"named": (0, 1)})]
    assert not dist.is_initialized()
    assert mw.worlds() == {}


def test_a_resolved_configuration_keeps_its_port():
    cfg = MultiprocessConfig().resolve()
    assert cfg.master_port
    assert cfg.served
    try:
        assert init_dist(cfg) is dist.group.WORLD
        del cfg
        group = dist.new_group([0])  # needs the store
        dist.barrier(group)
    finally:
        dist.destroy_process_group()


def test_a_group_from_a_backend(tmp_path):
    where = f"file://{tmp_path}/store"
    try:
        init_process_group_from_backend("GLOO", rank=0, world_size=1, init_method=where, timeout=PATIENCE)
        assert dist.get_backend() == "gloo"
    finally:
        dist.destroy_process_group()
    with pytest.raises(ConfigError, match="glue"):
        init_process_group_from_backend("glue", rank=0, world_size=1, init_method=where)


def test_the_environment_names_the_backend(monkeypatch):
    monkeypatch.delenv("TORCH_DISTRIBUTED_BACKEND", raising=False)
    assert default_backend("cpu") == "gloo"
    assert get_distributed_backend() == default_backend()
    set_distributed_backend("cpu:gloo")
    assert os.environ["TORCH_DISTRIBUTED_BACKEND"] == get_distributed_backend() == "cpu:gloo"
    assert MultiprocessConfig().resolve().backend == "cpu:gloo"
    set_distributed_backend(None)
    assert "TORCH_DISTRIBUTED_BACKEND" not in os.environ
    with pytest.raises(ConfigError, match="glue"):
        set_distributed_backend("glue")
    monkeypatch.setenv("TORCH_DISTRIBUTED_BACKEND", "glue")
    with pytest.raises(ConfigError, match="TORCH_DISTRIBUTED_BACKEND='glue'"):
        get_distributed_backend()
