"""A router as InfScale builds it on pymultiworld's interface: for each world of two a task that sends or one that receives.

What it leans on: a receiving task ends by the error of its world, which no task removes; a sending task asks now and then
whether its world is broken; a new configuration cancels joins that are under way, and gives new names to what broke.
"""

from __future__ import annotations

import asyncio
import time

import pytest
import torch
from kits.contract.worldkit import PATIENCE, left_over

from multiworld._c10d import waiter_pool
from multiworld.communicator import BrokenWorldException
from multiworld.manager import WorldManager

pytestmark = pytest.mark.timeout(600)

WORKERS, ROUNDS, REQUESTS = 4, 25, 20
"""Each round two worlds of each worker break: 200 in all."""

WARM = 4
"""Rounds after which the router holds what it will ever hold."""

IDLE = 0.1
"""Seconds that a sending task waits for work before it asks whether its world is broken."""

LONG = 10 * PATIENCE
"""Seconds, of joins and operations: what ends before was ended by a breakage, or cancelled."""


async def join(manager, me, name, rank):
    port = int(me.store.rpartition(":")[2])
    await manager.initialize_world(name, rank, 2, addr="127.0.0.1", port=port, timeout=LONG)


# -- a worker: one world to receive from, one to send to -----------------------------------------------------------


def worker(me, requests, answers):
    asyncio.run(serve(me, requests, answers))


async def serve(me, requests, answers):
    manager = WorldManager()
    await asyncio.gather(join(manager, me, requests, 0), join(manager, me, answers, 1))
    tensor = torch.zeros(2)
    while True:
        await manager.communicator.recv(tensor, 1, requests)
        await manager.communicator.send(tensor * torch.tensor([1.0, 2.0]), 0, answers)


# -- the router ----------------------------------------------------------------------------------------------------


class Router:
    """Sends requests to any worker, and takes their answers."""

    def __init__(self, me):
        self.me = me
        self.manager = WorldManager()
        self.joins = {}  # name: the task of a join
        self.senders = {}  # name: task and queue
        self.receivers = {}  # name: task
        self.cancelled, self.broken = 0, 0
        self.answers = asyncio.Queue()

    async def configure(self, inbound, outbound):
        """Have these worlds, and no others: to receive from, to send to. Joins that are not wanted any more are cancelled."""
        wanted = {*inbound, *outbound}
        old = [task for name, task in self.joins.items() if name not in wanted]
        for task in old:
            task.cancel()
        for each in await asyncio.gather(*old, return_exceptions=True):
            self.cancelled += isinstance(each, asyncio.CancelledError)
        for name in self.senders.keys() - wanted:
            task, _ = self.senders.pop(name)
            task.cancel()
            self.manager.remove_world(name)  # not the receiving ones: they end by themselves
        for name in wanted - self.joins.keys() - self.senders.keys() - self.receivers.keys():
            self.joins[name] = asyncio.create_task(self.enter(name, sends=name in outbound))

    async def enter(self, name, *, sends):
        try:
            await join(self.manager, self.me, name, 1 if sends else 0)
        finally:
            del self.joins[name]
        if sends:
            queue = asyncio.Queue()
            self.senders[name] = asyncio.create_task(self.send(name, queue)), queue
        else:
            self.receivers[name] = asyncio.create_task(self.receive(name))

    async def joined(self):
        """Wait until no join is under way."""
        while self.joins:
            await asyncio.gather(*self.joins.values())

    async def send(self, name, queue):
        communicator = self.manager.communicator
        while True:
            try:
                request = await asyncio.wait_for(queue.get(), IDLE)
            except asyncio.TimeoutError:
                if communicator.is_broken(name):
                    break
                continue
            try:
                await communicator.send(torch.tensor([float(request)] * 2), 0, name)
            except BrokenWorldException:
                break
        self.broken += 1

    async def receive(self, name):
        tensor = torch.zeros(2)
        while True:
            try:
                await self.manager.communicator.recv(tensor, 1, name)
            except BrokenWorldException:
                break
            self.answers.put_nowait(tensor.tolist())
        self.broken += 1
        del self.receivers[name]

    def queues(self):
        return [queue for _, queue in self.senders.values()]

    async def ask(self, requests):
        """Have each request answered."""
        asked, seen = {float(each) for each in requests}, {}
        for number, each in enumerate(sorted(asked)):
            self.queues()[number % WORKERS].put_nowait(each)
        while seen.keys() != asked:
            number, answer = await asyncio.wait_for(self.answers.get(), PATIENCE)
            if number in asked:  # else of an earlier round
                seen[number] = answer
        assert all(answer == 2 * number for number, answer in seen.items())


def router(me):
    asyncio.run(route(me))


async def route(me):
    # Threads that wait for works end when they were idle for five to ten seconds; here soon.
    waiter_pool.pool._idle_seconds = waiter_pool.ending._idle_seconds = 0.5
    made = Router(me)
    loop = asyncio.get_running_loop()
    noise = []
    loop.set_exception_handler(lambda _, context: noise.append(context))
    number, unanswered = 0, set()
    while (told := await asyncio.to_thread(me.hear, LONG)) is not None:
        configuration, then = told
        await made.configure(*configuration)
        if then == "another":
            await asyncio.sleep(0.02 * (number % 3))  # the joins are cancelled at different points
            continue
        await made.joined()
        await made.ask(unanswered | {*range(number, number + REQUESTS)})
        number += REQUESTS
        me.emit("served", held=await settled() if then == "look" else None)
        # Work is under way when the workers die: it is sent again, to others.
        unanswered = {*range(number, number + 2 * WORKERS)}
        for queue, each in zip(made.queues() * 2, unanswered, strict=True):
            queue.put_nowait(each)
        number += 2 * WORKERS
        me.emit("busy")
        until = time.monotonic() + PATIENCE
        while made.receivers or not all(task.done() for task, _ in made.senders.values()):
            assert time.monotonic() < until, (made.receivers, made.senders)
            await asyncio.sleep(0.01)
        me.emit("broken", count=made.broken, cancelled=made.cancelled)
    me.emit("noise", seen=[str(each) for each in noise])
    made.manager.cleanup()


async def settled():
    """What the process holds, when the worlds that broke before have been freed."""
    held, until = left_over(), time.monotonic() + PATIENCE
    last = time.monotonic()
    while time.monotonic() < min(until, last + 2.0):
        await asyncio.sleep(0.1)
        now = left_over()
        if any(now[each] != held[each] for each in ("fds", "tasks")):
            last = time.monotonic()
        held = now
    return held


# -- the test ------------------------------------------------------------------------------------------------------


def configuration(names):
    """Of the router: the worlds to receive from, and those to send to."""
    return [answers for _, answers in names], [requests for requests, _ in names]


def test_a_router_outlives_two_hundred_broken_worlds(cast):
    boss = cast.start(router)
    held, never = [], 0
    for number in range(ROUNDS):
        names = [(f"requests{slot}-{number}", f"answers{slot}-{number}") for slot in range(WORKERS)]
        if number % 5 == 1:
            # A configuration with workers that never come, replaced while they are waited for.
            ghosts = [(f"{one}-ghost", f"{other}-ghost") for one, other in names]
            boss.say((configuration(ghosts), "another"))
            never += 2 * WORKERS
        workers = [cast.start(worker, requests=one, answers=other) for one, other in names]
        looks = number < WARM or number == ROUNDS - 1
        boss.say((configuration(names), "look" if looks else "go"))
        seen = boss.expect("served")
        if looks:
            held.append(seen.held)
        boss.expect("busy")
        for each in workers:
            each.kill()
        seen = boss.expect("broken")
        assert (seen.count, seen.cancelled) == (2 * WORKERS * (number + 1), never)
    boss.say(None)
    assert boss.expect("noise").seen == []
    assert boss.finish() == 0
    for what in ("fds", "sockets", "tasks"):
        assert held[-1][what] <= max(each[what] for each in held[:-1]), (what, held)
