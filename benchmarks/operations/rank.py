"""A member: the same operation, called in each of the compared forms."""

from __future__ import annotations

import asyncio
import os
import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from benchmarks.measuring.namespaces import enter
from benchmarks.measuring.rounds import order
from benchmarks.measuring.stock import Stock
from benchmarks.measuring.timing import gathered, settle, told, undisturbed
from benchmarks.operations import variants
from benchmarks.operations.floor import Floor
from benchmarks.operations.names import USUAL, VARIANTS
from benchmarks.operations.operation import Operation
from multiworld._c10d.routing import router
from multiworld.communicator import WorldCommunicator

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

    import multiworld as mw

NAME = "bench"
_NEWER = {"all_gather_into_tensor": "all_gather_single", "reduce_scatter_tensor": "reduce_scatter_single"}
"""torch 2.13 warns of the old names, at every call: stock is called as it would be called there."""

_clock = time.perf_counter_ns


def make(rank: int, count: int, args: dict[str, Any]) -> Member:
    """See `benchmarks.measuring.ranks`.

    `args` has "pin", on one core, by rank, of those there are; and "host" and "namespaces" of a
    `benchmarks.operations.session.Place`.
    """
    if args["namespaces"]:
        enter(args["namespaces"][rank])
        variants.never_read()  # which namespaces of the network do not forbid
    if args["pin"]:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(1)
    return Member(rank, count, args["host"], floor=not args["namespaces"])


class Member(Stock):
    """One rank: in torch's own default group, and in worlds of the same size, over the same store."""

    def __init__(self, rank: int, count: int, host: str, *, floor: bool) -> None:
        super().__init__(rank, count, host)
        self._has_floor = floor  # a Unix socket, which is of one host
        self._world: mw.World
        self._worlds: dict[str, mw.World] = {}
        self._floor: Floor | None = None
        self._communicator = WorldCommunicator()
        self._loop = asyncio.new_event_loop()
        self._operation: Operation

    def serve(self) -> int:
        """Rank 0: serve the store, and the floor's socket; the store's port."""
        port = super().serve()
        if self._has_floor:
            self._floor = Floor(0, _floor_name(port))
        return port

    def meet(self, port: int, forms: list[str]) -> dict[str, str]:
        """Join the others: in stock's group, the world, and those variants of it that are compared.

        Returns:
            Of each variant that this version has not: why. Its world is a usual one.
        """
        self._join_stock(port)
        if self._rank == 1 and self._has_floor:
            self._floor = Floor(1, _floor_name(port))
        if self._floor is not None:
            self._floor.connect()
        wanted = [USUAL, *(form for form in forms if form in VARIANTS)]
        self._worlds = {each: variants.join(each, self._rank, self._count, self._store) for each in wanted}
        self._world = self._worlds[USUAL]
        self._communicator.set_world(NAME, self._world)
        settle()
        return {each: why for each in wanted if (why := variants.missing(each))}

    def prepare(self, op: str, size: int, forms: list[str]) -> str:
        """Make the operation's tensors, and see that every form of it is right.

        Returns:
            "", or why stock does not do it.
        """
        self._operation = Operation(op, size, self._rank, self._count)
        for form in forms:
            self._operation.begin_check()
            try:
                self._run(form, 1, 0)
            except (RuntimeError, NotImplementedError) as error:
                if form != "stock":
                    raise
                return str(error).strip().splitlines()[0]
            if form != "memcpy":
                self._operation.end_check()
        self._operation.fill(0.0)  # sums stay what they are
        return ""

    def rounds(
        self, forms: list[str], first: int, rounds: int, repeat: int, warm_up: int, *, gather: bool
    ) -> dict[str, dict[str, Any]]:
        """Some rounds, with the forms in turn; every rank does the same in the same order.

        Args:
            forms: what is compared.
            first: number of the first round; the order of the forms rotates with it.
            rounds: how many.
            repeat: timed operations of each form in each.
            warm_up: operations before those.
            gather: begin each with this process's threads on one core; see
                `benchmarks.measuring.timing.gathered`.

        Returns:
            For each form, in microseconds, one way for send_recv: "rounds", the median of each, and "chunk",
            what `told` tells of all its operations.
        """
        share = 0.5 if self._operation.name == "send_recv" else 1.0
        taken: dict[str, list[list[int]]] = {form: [] for form in forms}
        with undisturbed():
            for number in range(first, first + rounds):
                for form in order(forms, number):
                    taken[form].append(self._run(form, repeat, warm_up, gather=gather))
        return {
            form: {
                "rounds": [told(each, share)["p50"] for each in all_rounds],
                "chunk": told([each for one in all_rounds for each in one], share),
            }
            for form, all_rounds in taken.items()
        }

    def leave(self) -> None:
        """Close the worlds and torch's group."""
        router.install()
        for world in self._worlds.values():
            world.close()
        if self._floor is not None:
            self._floor.close()
        dist.destroy_process_group()
        self._loop.close()

    # -- forms -----------------------------------------------------------------------------------------------

    def _run(self, form: str, repeat: int, warm_up: int, *, gather: bool = False) -> list[int]:
        """Call the operation as often; nanoseconds of each call."""
        if self._operation.name == "send_recv" and self._rank > 1:
            return [0]  # the others look on
        if form == "stock":
            router.uninstall()
        else:
            router.install()
        call = self._ping if self._operation.name == "send_recv" else self._collective
        if form == "memcpy":
            call = self._copy
        if gather:
            with gathered(self._rank):
                call(form, warm_up)
        call(form, warm_up)
        return call(form, repeat)

    def _ping(self, form: str, repeat: int) -> list[int]:
        world = self._world
        aio, communicator = world.aio, self._communicator
        match form:
            case "stock":
                return self._to_and_fro(dist.send, dist.recv, repeat)
            case "floor":
                assert self._floor is not None  # noqa: S101  (for mypy; ranks 0 and 1 have it)
                return self._to_and_fro(self._floor.send, self._floor.recv, repeat)
            case "with_round":
                with world:
                    return self._to_and_fro(dist.send, dist.recv, repeat)
            case "with":
                return self._to_and_fro_inside(repeat)
            case "aio":
                return self._awaited(self._to_and_fro_awaited(aio.send, aio.recv, repeat))
            case "communicator":
                return self._awaited(
                    self._to_and_fro_awaited(communicator.send, communicator.recv, repeat, NAME)
                )
        own = self._worlds[form]
        return self._to_and_fro(own.send, own.recv, repeat)

    def _collective(self, form: str, repeat: int) -> list[int]:
        name, world = self._operation.name, self._world
        args = self._operation.arguments
        stock = getattr(dist, _NEWER.get(name, name), None) or getattr(dist, name)
        match form:
            case "stock":
                return _called(stock, args, repeat)
            case "with_round":
                with world:
                    return _called(stock, args, repeat)
            case "with":
                return _called_inside(world, stock, args, repeat)
            case "aio":
                return self._awaited(_called_awaited(getattr(world.aio, name), args, {}, repeat))
            case "communicator":
                fn = getattr(self._communicator, name)
                return self._awaited(_called_awaited(fn, args, {"world_name": NAME}, repeat))
        return _called(getattr(self._worlds[form], name), args, repeat)

    def _copy(self, form: str, repeat: int) -> list[int]:
        """Copy the same bytes in this process's memory; for a message there and back."""
        assert form == "memcpy"  # noqa: S101  (one signature for all)
        part, spare = self._operation.part, self._operation.spare
        pairs = [(spare, part), (part, spare)] if self._operation.name == "send_recv" else [(spare, part)]
        taken = [0] * repeat
        if self._operation.name == "send_recv" and self._rank:
            return taken  # of two ranks one copies at a time, as with messages
        for i in range(repeat):
            began = _clock()
            for target, source in pairs:
                target.copy_(source)
            taken[i] = _clock() - began
        return taken

    def _awaited(self, timed: Coroutine[Any, Any, list[int]]) -> list[int]:
        # One loop for all rounds, as in a program: what was learned in it stays learned.
        return self._loop.run_until_complete(timed)

    def _to_and_fro(self, send: Callable[..., Any], recv: Callable[..., Any], repeat: int) -> list[int]:
        tensor, first, peer = self._operation.part, self._rank == 0, 1 - self._rank
        taken = [0] * repeat
        for i in range(repeat):
            began = _clock()
            if first:
                send(tensor, peer)
                recv(tensor, peer)
            else:
                recv(tensor, peer)
                send(tensor, peer)
            taken[i] = _clock() - began
        return taken

    def _to_and_fro_inside(self, repeat: int) -> list[int]:
        tensor, first, peer = self._operation.part, self._rank == 0, 1 - self._rank
        world, send, recv = self._world, dist.send, dist.recv
        taken = [0] * repeat
        for i in range(repeat):
            began = _clock()
            if first:
                with world:
                    send(tensor, peer)
                with world:
                    recv(tensor, peer)
            else:
                with world:
                    recv(tensor, peer)
                with world:
                    send(tensor, peer)
            taken[i] = _clock() - began
        return taken

    async def _to_and_fro_awaited(
        self,
        send: Callable[..., Awaitable[Any]],
        recv: Callable[..., Awaitable[Any]],
        repeat: int,
        *more: str,
    ) -> list[int]:
        tensor, first, peer = self._operation.part, self._rank == 0, 1 - self._rank
        taken = [0] * repeat
        for i in range(repeat):
            began = _clock()
            if first:
                await send(tensor, peer, *more)
                await recv(tensor, peer, *more)
            else:
                await recv(tensor, peer, *more)
                await send(tensor, peer, *more)
            taken[i] = _clock() - began
        return taken


def _floor_name(port: int) -> str:
    """The store's port is free for one run at a time: so is the name."""
    return f"m8d-bench-floor-{port}"


def _called(fn: Callable[..., Any], args: tuple[Any, ...], repeat: int) -> list[int]:
    taken = [0] * repeat
    for i in range(repeat):
        began = _clock()
        fn(*args)
        taken[i] = _clock() - began
    return taken


def _called_inside(world: mw.World, fn: Callable[..., Any], args: tuple[Any, ...], repeat: int) -> list[int]:
    taken = [0] * repeat
    for i in range(repeat):
        began = _clock()
        with world:
            fn(*args)
        taken[i] = _clock() - began
    return taken


async def _called_awaited(
    fn: Callable[..., Awaitable[Any]], args: tuple[Any, ...], more: dict[str, str], repeat: int
) -> list[int]:
    taken = [0] * repeat
    for i in range(repeat):
        began = _clock()
        await fn(*args, **more)
        taken[i] = _clock() - began
    return taken
