"""Features built on torch.distributed: meshes, DTensor, DDP, fully_shard, tensor parallel, pipelining."""

from __future__ import annotations

import contextlib
import copy
import importlib
import io
import pickle
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from kits.contract.battery.features_ops import feature, mine, same, total


def find(name: str, *modules: str) -> Any:
    """Return `name` from the first module that has it: their places moved between versions."""
    for module in modules:
        with contextlib.suppress(ImportError, AttributeError):  # not in this version
            return getattr(importlib.import_module(module), name)
    raise ImportError(f"{name} is in none of {modules}")


def dtensor(name: str) -> Any:
    return find(name, "torch.distributed.tensor", "torch.distributed._tensor")


def net(seed: int) -> nn.Module:
    torch_generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=torch_generator))
    return model


def batch(seed: int, rank: int) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(seed * 10 + rank))


def mean_gradients(seed: int) -> list[torch.Tensor]:
    """What data parallel gradients must be: the mean of both ranks', computed without communication."""
    found: list[list[torch.Tensor]] = []
    for rank in range(2):
        model = net(seed)
        model(batch(seed, rank)).sum().backward()
        found.append([parameter.grad for parameter in model.parameters()])
    return [(one + two) / 2 for one, two in zip(*found, strict=True)]


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    # Far wider than what the order of additions changes, which is not always the same; a mix-up is of the size of 1.
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)


@feature
def mesh_1d(seed: int) -> Iterator[None]:
    mesh = init_device_mesh("cpu", (2,))
    yield
    assert mesh.get_rank() == dist.get_rank()
    assert mesh.get_local_rank() == dist.get_rank()
    tensor = mine(seed)
    dist.all_reduce(tensor, group=mesh.get_group())
    same(tensor, total(seed))
    yield
    again = DeviceMesh("cpu", [0, 1])
    other = DeviceMesh("cpu", [0, 1], mesh_dim_names=("x",))
    assert again == mesh
    assert hash(again) == hash(mesh)
    assert other != mesh


@feature
def mesh_2d(seed: int) -> Iterator[None]:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    yield
    tp = mesh["tp"]
    yield
    assert tp.size() == 2
    assert tp.get_local_rank() == dist.get_rank()
    tensor = mine(seed)
    dist.all_reduce(tensor, group=tp.get_group())
    same(tensor, total(seed))
    yield
    tensor = mine(seed)
    dist.all_reduce(tensor, group=mesh.get_group("dp"))
    same(tensor, mine(seed))
    assert mesh["tp"] == tp
    assert len(mesh.get_all_groups()) == 2


@feature
def mesh_flatten(seed: int) -> Iterator[None]:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    flat = mesh["dp", "tp"]._flatten("all")
    yield
    assert flat.size() == 2
    assert mesh["all"] == flat
    tensor = mine(seed)
    dist.all_reduce(tensor, group=flat.get_group())
    same(tensor, total(seed))


@feature
def mesh_copies(seed: int) -> Iterator[None]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    yield
    found = pickle.loads(pickle.dumps(mesh))  # noqa: S301  (our own bytes)
    assert found == mesh
    assert hash(found) == hash(mesh)
    yield
    assert copy.copy(mesh) == mesh
    tensor = mine(seed)
    dist.all_reduce(tensor, group=found.get_group())
    same(tensor, total(seed))


@feature
def mesh_from_group(seed: int) -> Iterator[None]:
    mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu")
    yield
    tensor = mine(seed)
    dist.all_reduce(tensor, group=mesh.get_group())
    same(tensor, total(seed))


@feature
def dtensor_redistribute(seed: int) -> Iterator[None]:
    shard, replicate = dtensor("Shard"), dtensor("Replicate")
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(8.0).reshape(4, 2) + seed
    spread = dtensor("distribute_tensor")(whole, mesh, [shard(0)])
    yield
    same(spread.to_local(), whole.chunk(2)[dist.get_rank()])
    full = spread.redistribute(placements=[replicate()])
    yield
    same(full.to_local(), whole)
    same(spread.full_tensor(), whole)
    yield
    partial = dtensor("DTensor").from_local(mine(seed), mesh, [find_partial()()])
    same(partial.redistribute(placements=[replicate()]).to_local(), total(seed))


@feature
def dtensor_reshard(seed: int) -> Iterator[None]:
    shard = dtensor("Shard")
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(16.0).reshape(4, 4) + seed
    spread = dtensor("distribute_tensor")(whole, mesh, [shard(0)])
    yield
    moved = spread.redistribute(placements=[shard(1)])
    assert (moved + moved).device_mesh.get_group().group_name == mesh.get_group().group_name
    yield
    same(moved.to_local(), whole.chunk(2, dim=1)[dist.get_rank()])
    scattered = (
        dtensor("DTensor").from_local(whole, mesh, [find_partial()()]).redistribute(placements=[shard(0)])
    )
    same(scattered.to_local(), whole.chunk(2)[dist.get_rank()] * 2)


def find_partial() -> Any:
    try:
        return dtensor("Partial")
    except ImportError:
        return find("_Partial", "torch.distributed._tensor.placement_types")


@feature
def dtensor_matmul(seed: int) -> Iterator[None]:
    shard, replicate = dtensor("Shard"), dtensor("Replicate")
    mesh = init_device_mesh("cpu", (2,))
    left = torch.arange(16.0).reshape(4, 4) + seed
    right = torch.arange(8.0).reshape(4, 2) - seed
    rows = dtensor("distribute_tensor")(left, mesh, [shard(1)])
    columns = dtensor("distribute_tensor")(right, mesh, [shard(0)])
    yield
    product = rows @ columns
    # What the sharding cache remembers of another world's operation would bring that world's mesh along.
    assert product.device_mesh.get_group().group_name == mesh.get_group().group_name
    yield
    same(product.redistribute(placements=[replicate()]).to_local(), left @ right)
    yield
    same(product.full_tensor(), left @ right)


@feature
def tensor_parallel(seed: int) -> Iterator[None]:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2,))
    model = parallelize_module(net(seed), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    yield
    out = model(batch(seed, 0))
    yield
    close(out, net(seed)(batch(seed, 0)))
    out.sum().backward()
    yield
    reference = net(seed)
    reference(batch(seed, 0)).sum().backward()
    close(model[0].weight.grad.full_tensor(), reference[0].weight.grad)


@feature
def ddp(seed: int) -> Iterator[None]:
    model = nn.parallel.DistributedDataParallel(net(seed + dist.get_rank()))
    yield
    # Construction takes rank 0's weights to all.
    for found, wanted in zip(model.parameters(), net(seed).parameters(), strict=True):
        same(found.detach(), wanted.detach())
    loss = model(batch(seed, dist.get_rank())).sum()
    yield
    loss.backward()
    yield
    for parameter, wanted in zip(model.parameters(), mean_gradients(seed), strict=True):
        close(parameter.grad, wanted)


def uneven_inputs(seed: int, **options: bool) -> Iterator[None]:
    model = nn.parallel.DistributedDataParallel(net(seed), **options)
    steps = 2 + dist.get_rank() * 2
    yield
    with model.join():
        for _ in range(steps):
            model(batch(seed, dist.get_rank())).sum().backward()
            model.zero_grad()
    yield
    tensor = torch.tensor([float(steps)])
    dist.all_reduce(tensor)
    same(tensor, torch.tensor([6.0]))


@feature
def ddp_uneven_inputs(seed: int) -> Iterator[None]:
    yield from uneven_inputs(seed)


@feature
def ddp_uneven_inputs_and_unused_parameters(seed: int) -> Iterator[None]:
    yield from uneven_inputs(seed, find_unused_parameters=True)


@feature
def ddp_uneven_inputs_divided_by_who_is_left(seed: int) -> Iterator[None]:
    rank, model = dist.get_rank(), nn.parallel.DistributedDataParallel(net(seed))
    yield
    with model.join(divide_by_initial_world_size=False):
        for step in range(2 + rank * 2):
            model(batch(seed, rank)).sum().backward()
            alone = net(seed)
            alone(batch(seed, rank)).sum().backward()
            own = [parameter.grad for parameter in alone.parameters()]
            wanted = mean_gradients(seed) if step < 2 else own
            for parameter, gradient in zip(model.parameters(), wanted, strict=True):
                close(parameter.grad, gradient)
            model.zero_grad()
    yield
    tensor = mine(seed)
    dist.all_reduce(tensor)
    same(tensor, total(seed))


@feature
def ddp_comm_hook(seed: int) -> Iterator[None]:
    def hook(group, bucket):  # torch reads the annotations, as types and not as strings
        assert dist.get_world_size() == 2
        work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
        return work.get_future().then(lambda future: future.value()[0] / 2)

    model = nn.parallel.DistributedDataParallel(net(seed))
    model.register_comm_hook(None, hook)
    yield
    model(batch(seed, dist.get_rank())).sum().backward()
    yield
    for parameter, wanted in zip(model.parameters(), mean_gradients(seed), strict=True):
        close(parameter.grad, wanted)


@feature
def zero_redundancy_optimizer(seed: int) -> Iterator[None]:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = nn.parallel.DistributedDataParallel(net(seed))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.SGD, lr=0.5)
    yield
    model(batch(seed, dist.get_rank())).sum().backward()
    optimizer.step()
    yield
    for found, start, gradient in zip(
        model.parameters(), net(seed).parameters(), mean_gradients(seed), strict=True
    ):
        close(found.detach(), start.detach() - 0.5 * gradient)


@feature
def fully_shard(seed: int) -> Iterator[None]:
    shard = find("fully_shard", "torch.distributed.fsdp", "torch.distributed._composable.fsdp")
    mesh = init_device_mesh("cpu", (2,))
    model = net(seed)
    shard(model[0], mesh=mesh)
    shard(model, mesh=mesh)
    yield
    loss = model(batch(seed, dist.get_rank())).sum()
    yield
    loss.backward()
    yield
    for parameter, wanted in zip(model.parameters(), mean_gradients(seed), strict=True):
        close(parameter.grad.full_tensor(), wanted)


@feature
def fully_shard_default_mesh(seed: int) -> Iterator[None]:
    shard = find("fully_shard", "torch.distributed.fsdp", "torch.distributed._composable.fsdp")
    model = net(seed)
    shard(model)
    yield
    model(batch(seed, dist.get_rank())).sum().backward()
    yield
    for parameter, wanted in zip(model.parameters(), mean_gradients(seed), strict=True):
        close(parameter.grad.full_tensor(), wanted)


@feature
def fsdp1(seed: int) -> Iterator[None]:
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = FullyShardedDataParallel(net(seed), device_id=torch.device("cpu"), use_orig_params=True)
    yield
    model(batch(seed, dist.get_rank())).sum().backward()
    yield
    total_norm = model.clip_grad_norm_(1e9)
    wanted = torch.cat([gradient.flatten() for gradient in mean_gradients(seed)]).norm()
    close(total_norm, wanted)


@feature
def pipelining(seed: int) -> Iterator[None]:
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    rank = dist.get_rank()
    model = net(seed)
    part = nn.Sequential(model[0], model[1]) if rank == 0 else model[2]
    example = batch(seed, 0)[:1] if rank == 0 else torch.zeros(1, 8)
    try:
        stage = PipelineStage(part, rank, 2, torch.device("cpu"))
    except TypeError:
        stage = PipelineStage(part, rank, 2, torch.device("cpu"), input_args=(example,))
    schedule = ScheduleGPipe(stage, n_microbatches=3, loss_fn=lambda out, target: ((out - target) ** 2).sum())
    yield
    target = torch.zeros(3, 4)
    if rank == 0:
        schedule.step(batch(seed, 0))
    else:
        losses: list[torch.Tensor] = []
        out = schedule.step(target=target, losses=losses)
        close(out, net(seed)(batch(seed, 0)))
    yield
    reference = net(seed)
    (reference(batch(seed, 0)) ** 2).sum().backward()
    wanted = reference[0].weight.grad if rank == 0 else reference[2].weight.grad
    found = part[0].weight.grad if rank == 0 else part.weight.grad
    # Newer versions divide by the number of micro-batches.
    ratio = round(float(wanted.norm() / found.norm()), 2)
    assert ratio in {1.0, 3.0}, ratio
    close(found * ratio, wanted)


@feature
def checkpoint(seed: int) -> Iterator[None]:
    mesh = init_device_mesh("cpu", (2,))
    spread = dtensor("distribute_tensor")(torch.arange(8.0) + seed, mesh, [dtensor("Shard")(0)])
    yield
    buffer = io.BytesIO()
    torch.save(spread, buffer)
    buffer.seek(0)
    found = torch.load(buffer, weights_only=False)
    yield
    same(found.full_tensor(), torch.arange(8.0) + seed)
