"""Features of torch.distributed itself: collectives, point to point, objects, groups.

Each is a generator that runs in one world with plain torch.distributed; `seed` differs between worlds, so a value of
another world is a wrong value. At each `yield` the battery may go on with another world.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

FEATURES: dict[str, Callable[[int], Iterator[None]]] = {}


def feature(function: Callable[[int], Iterator[None]]) -> Callable[[int], Iterator[None]]:
    FEATURES[function.__name__] = function
    return function


def mine(seed: int, rank: int | None = None) -> torch.Tensor:
    rank = dist.get_rank() if rank is None else rank
    return torch.full((4,), float(seed * 100 + rank + 1))


def total(seed: int) -> torch.Tensor:
    return sum((mine(seed, rank) for rank in range(dist.get_world_size())), torch.zeros(4))


def same(found: Any, wanted: Any) -> None:
    if not torch.equal(torch.as_tensor(found), torch.as_tensor(wanted)):
        raise AssertionError(f"found {found}, wanted {wanted}")


@feature
def identity(seed: int) -> Iterator[None]:
    world = dist.group.WORLD
    yield
    assert dist.is_initialized()
    assert dist.group.WORLD is world
    assert dist.get_world_size() == 2
    assert dist.get_rank() == dist.get_rank(world) == world.rank()
    assert dist.get_process_group_ranks(world) == [0, 1]
    assert dist.get_backend() == "gloo"
    yield
    assert dist.get_global_rank(world, 1) == 1


@feature
def all_reduce(seed: int) -> Iterator[None]:
    tensor = mine(seed)
    dist.all_reduce(tensor)
    yield
    same(tensor, total(seed))
    tensor = mine(seed)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    yield
    same(tensor, mine(seed, 1))


@feature
def all_reduce_async(seed: int) -> Iterator[None]:
    tensor = mine(seed)
    work = dist.all_reduce(tensor, async_op=True)
    yield
    work.wait()
    same(tensor, total(seed))


@feature
def broadcast(seed: int) -> Iterator[None]:
    for src in range(2):
        tensor = mine(seed)
        dist.broadcast(tensor, src=src)
        yield
        same(tensor, mine(seed, src))


@feature
def reduce(seed: int) -> Iterator[None]:
    tensor = mine(seed)
    dist.reduce(tensor, dst=1)
    yield
    if dist.get_rank() == 1:
        same(tensor, total(seed))


@feature
def all_gather(seed: int) -> Iterator[None]:
    parts = [torch.zeros(4) for _ in range(2)]
    dist.all_gather(parts, mine(seed))
    yield
    for rank, part in enumerate(parts):
        same(part, mine(seed, rank))


@feature
def all_gather_into_tensor(seed: int) -> Iterator[None]:
    whole = torch.zeros(8)
    dist.all_gather_into_tensor(whole, mine(seed))
    yield
    same(whole, torch.cat([mine(seed, 0), mine(seed, 1)]))


@feature
def gather(seed: int) -> Iterator[None]:
    root = dist.get_rank() == 0
    parts = [torch.zeros(4) for _ in range(2)] if root else None
    dist.gather(mine(seed), parts, dst=0)
    yield
    for rank, part in enumerate(parts or ()):
        same(part, mine(seed, rank))


@feature
def scatter(seed: int) -> Iterator[None]:
    tensor = torch.zeros(4)
    dist.scatter(tensor, [mine(seed, 0), mine(seed, 1)] if dist.get_rank() == 1 else None, src=1)
    yield
    same(tensor, mine(seed))


@feature
def reduce_scatter(seed: int) -> Iterator[None]:
    tensor = torch.zeros(4)
    dist.reduce_scatter(tensor, [mine(seed), mine(seed) * 2])
    yield
    same(tensor, total(seed) * (dist.get_rank() + 1))


@feature
def reduce_scatter_tensor(seed: int) -> Iterator[None]:
    tensor = torch.zeros(4)
    dist.reduce_scatter_tensor(tensor, torch.cat([mine(seed), mine(seed) * 2]))
    yield
    same(tensor, total(seed) * (dist.get_rank() + 1))


@feature
def all_to_all(seed: int) -> Iterator[None]:
    rank = dist.get_rank()
    out = [torch.zeros(4) for _ in range(2)]
    dist.all_to_all(out, [mine(seed) + 10 * dst for dst in range(2)])
    yield
    for src in range(2):
        same(out[src], mine(seed, src) + 10 * rank)


@feature
def all_to_all_single(seed: int) -> Iterator[None]:
    rank = dist.get_rank()
    out = torch.zeros(8)
    dist.all_to_all_single(out, torch.cat([mine(seed), mine(seed) + 10]))
    yield
    same(out, torch.cat([mine(seed, 0), mine(seed, 1)]) + 10 * rank)


@feature
def barriers(seed: int) -> Iterator[None]:
    dist.barrier()
    yield
    dist.barrier(async_op=True).wait()
    yield
    dist.monitored_barrier(timeout=dt.timedelta(seconds=20))


@feature
def send_recv(seed: int) -> Iterator[None]:
    rank = dist.get_rank()
    tensor = torch.zeros(4)
    if rank == 0:
        dist.send(mine(seed), dst=1)
    else:
        dist.recv(tensor, src=0)
        same(tensor, mine(seed, 0))
    yield
    if rank == 1:
        dist.send(mine(seed), dst=0, tag=seed)
    else:
        sender = dist.recv(tensor, tag=seed)
        assert sender == 1
        same(tensor, mine(seed, 1))


@feature
def isend_irecv(seed: int) -> Iterator[None]:
    other = 1 - dist.get_rank()
    tensor = torch.zeros(4)
    works = [dist.isend(mine(seed), dst=other), dist.irecv(tensor, src=other)]
    yield
    for work in works:
        work.wait()
    same(tensor, mine(seed, other))


@feature
def batch_isend_irecv(seed: int) -> Iterator[None]:
    other = 1 - dist.get_rank()
    tensor = torch.zeros(4)
    ops = [dist.P2POp(dist.isend, mine(seed), other), dist.P2POp(dist.irecv, tensor, other)]
    yield
    works = dist.batch_isend_irecv(ops)
    yield
    for work in works:
        work.wait()
    same(tensor, mine(seed, other))


@feature
def coalescing_manager(seed: int) -> Iterator[None]:
    tensors = [mine(seed), mine(seed) * 3]
    with dist._coalescing_manager():
        for tensor in tensors:
            dist.all_reduce(tensor)
    yield
    same(tensors[0], total(seed))
    same(tensors[1], total(seed) * 3)


@feature
def coalescing_manager_async(seed: int) -> Iterator[None]:
    tensors = [mine(seed), mine(seed) * 3]
    with dist._coalescing_manager(async_ops=True) as manager:
        dist.all_reduce(tensors[0])
        yield
        dist.all_reduce(tensors[1])
    yield
    manager.wait()
    same(tensors[0], total(seed))
    same(tensors[1], total(seed) * 3)


@feature
def objects(seed: int) -> Iterator[None]:
    rank = dist.get_rank()
    item = {"seed": seed, "rank": rank}
    everyone = [{"seed": seed, "rank": each} for each in range(2)]
    found: list[Any] = [None, None]
    dist.all_gather_object(found, item)
    yield
    assert found == everyone, found
    found = [item, seed] if rank == 1 else [None, None]
    dist.broadcast_object_list(found, src=1)
    yield
    assert found == [everyone[1], seed], found
    found = [None, None]
    dist.gather_object(item, found if rank == 0 else None, dst=0)
    yield
    assert rank or found == everyone, found
    out: list[Any] = [None]
    dist.scatter_object_list(out, everyone if rank == 0 else None, src=0)
    yield
    assert out == [item], out


@feature
def object_list_point_to_point(seed: int) -> Iterator[None]:
    if dist.get_rank() == 0:
        dist.send_object_list([seed, {"a": seed}], dst=1)
    else:
        found: list[Any] = [None, None]
        dist.recv_object_list(found, src=0)
        assert found == [seed, {"a": seed}], found
    yield


@feature
def new_group(seed: int) -> Iterator[None]:
    group = dist.new_group([0, 1])
    alone = dist.new_group([0])
    yield
    tensor = mine(seed)
    dist.all_reduce(tensor, group=group)
    same(tensor, total(seed))
    yield
    assert dist.get_process_group_ranks(group) == [0, 1]
    assert dist.get_rank(group) == dist.get_rank()
    assert dist.get_rank(alone) == (0 if dist.get_rank() == 0 else -1)
    tensor = mine(seed)
    dist.broadcast(tensor, src=1, group=group)
    same(tensor, mine(seed, 1))
    yield
    dist.destroy_process_group(group)
    if dist.get_rank() == 0:
        # Some versions of torch count a rank's groups to name hashed ones: unequal counts would hang them.
        dist.destroy_process_group(alone)
    yield
    tensor = mine(seed)
    dist.all_reduce(tensor)
    same(tensor, total(seed))


@feature
def new_group_local_synchronization(seed: int) -> Iterator[None]:
    first = dist.new_group([0, 1], use_local_synchronization=True)
    yield
    second = dist.new_group([0, 1], use_local_synchronization=True)
    assert first.group_name != second.group_name
    for group in (first, second):
        tensor = mine(seed)
        dist.all_reduce(tensor, group=group)
        same(tensor, total(seed))
        yield


@feature
def new_subgroups(seed: int) -> Iterator[None]:
    own, groups = dist.new_subgroups(group_size=2)
    assert len(groups) == 1
    yield
    tensor = mine(seed)
    dist.all_reduce(tensor, group=own)
    same(tensor, total(seed))
    yield
    own, groups = dist.new_subgroups_by_enumeration([[0], [1]])
    assert len(groups) == 2
    tensor = mine(seed)
    dist.all_reduce(tensor, group=own)
    same(tensor, mine(seed))


@feature
def second_default_group_is_refused(seed: int) -> Iterator[None]:
    refused = ""
    try:
        dist.init_process_group("gloo", init_method="tcp://127.0.0.1:1", rank=dist.get_rank(), world_size=2)
    except ValueError as error:
        refused = str(error)
    assert "twice" in refused, refused
    yield


@feature
def functional_collectives(seed: int) -> Iterator[None]:
    import torch.distributed._functional_collectives as funcol

    group = dist.group.WORLD
    reduced = funcol.all_reduce(mine(seed), "sum", group)
    gathered = funcol.all_gather_tensor(mine(seed), 0, group)
    yield
    same(reduced + 0, total(seed))
    same(gathered + 0, torch.cat([mine(seed, 0), mine(seed, 1)]))
    yield
    sent = funcol.broadcast(mine(seed), 1, group)
    yield
    same(funcol.wait_tensor(sent), mine(seed, 1))


@feature
def functional_collectives_scattering(seed: int) -> Iterator[None]:
    import torch.distributed._functional_collectives as funcol

    group = dist.group.WORLD
    scattered = funcol.reduce_scatter_tensor(torch.cat([mine(seed), mine(seed) * 2]), "sum", 0, group)
    yield
    same(scattered + 0, total(seed) * (dist.get_rank() + 1))
    swapped = funcol.all_to_all_single(torch.cat([mine(seed), mine(seed) + 10]), None, None, group)
    yield
    same(swapped + 0, torch.cat([mine(seed, 0), mine(seed, 1)]) + 10 * dist.get_rank())


@feature
def autograd_collectives(seed: int) -> Iterator[None]:
    import torch.distributed.nn.functional as dnn

    tensor = mine(seed).requires_grad_()
    summed = dnn.all_reduce(tensor)
    yield
    same(summed.detach(), total(seed))
    (summed * seed).sum().backward()
    yield
    same(tensor.grad, torch.full((4,), 2.0 * seed))
