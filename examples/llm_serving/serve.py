"""A language model in a pipeline that outlives its stages, behind OpenAI's HTTP interface.

    m8d-run --worlds examples/llm_serving/worlds.toml --max-restarts 1000 examples/llm_serving/serve.py --port 8000

Then `curl localhost:8000/v1/completions -d '{"prompt": "Hello", "max_tokens": 32, "stream": true}'`, and kill any worker
meanwhile: GET /health says which one is what. `examples/llm_serving.py` does both, with many clients.

The model is a small Llama with random weights: the answers mean nothing, and each of their tokens can be checked. `--model`
takes one with real weights.
"""

from __future__ import annotations

import os
import signal
import threading

# Ctrl-C ends a worker at once, without a traceback, also while torch is loaded; the front has a handler of its own.
signal.signal(signal.SIGINT, signal.SIG_DFL)

GENTLE = 20.0
"""Seconds that a worker may take to load at the lowest priority: those that serve have the cores first."""


def _priority(policy: int) -> None:
    """Set it for all threads of this process."""
    for thread in os.listdir("/proc/self/task"):  # noqa: PTH208  (pathlib is not needed for anything else)
        try:
            os.sched_setscheduler(int(thread), policy, os.sched_param(0))
        except OSError:  # the thread has ended, or a sandbox forbids it
            continue


if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")):  # the others are at work already
    _priority(os.SCHED_IDLE)
    _enough = threading.Timer(GENTLE, _priority, [os.SCHED_OTHER])
    _enough.daemon = True
    _enough.start()

# After the priority:
import argparse
import asyncio
import contextlib
import functools
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist
from crew import Crew, Worker
from model import SHORTEST, Decoder, Settings, load, tokenizer_of
from pipeline import Scheduler
from wire import PlainLink, Shapes, WorldLink, serve_plain, serve_world

import multiworld as mw

PING_EVERY = 10.0
PATIENCE = 600.0


def parser() -> argparse.ArgumentParser:
    """The options."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument(
        "--model", default="", help="folder or name of a model with real weights; without: a small random one"
    )
    made.add_argument("--dtype", default="float64", help="of weights and activations (default float64)")
    made.add_argument("--length", type=int, default=128, help="tokens of the longest sequence (default 128)")
    made.add_argument("--slots", type=int, default=24, help="sequences in a pipeline at once (default 24)")
    made.add_argument("--stages", type=int, default=3, help="of a pipeline (default 3)")
    made.add_argument("--replicas", type=int, default=1, help="pipelines at first (default 1)")
    made.add_argument("--host", default="127.0.0.1")
    made.add_argument("--port", type=int, default=0, help="default 0: any that is free")
    made.add_argument("--address-file", type=Path, help="where the front writes host:port once it serves")
    made.add_argument(
        "--plain",
        action="store_true",
        help="plain torch.distributed instead of worlds, to compare: a kill ends it",
    )
    return made


def say(line: str) -> None:
    """Print a line in one write: those of other processes must not mix with it."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


# -- a worker ------------------------------------------------------------------------------------------------


def work(args: argparse.Namespace, settings: Settings) -> int:
    """Load the model, then join: a worker that is in its world is warm."""
    decoder = Decoder(settings, args.stages)
    decoder.warm()
    _priority(os.SCHED_OTHER)
    if args.plain:
        dist.init_process_group("gloo")
        serve_plain(decoder)
    (world,) = mw.join_all().values()
    say(f"worker {os.environ['ROLE_RANK']} is there, pid {os.getpid()}")
    serve_world(world, decoder)
    world.close()
    return 0


# -- the front -----------------------------------------------------------------------------------------------


async def tend(crew: Crew, index: int, world: mw.World, shapes: Shapes) -> None:
    """Keep one worker's link: a standby when it comes, nothing when it dies, until this process leaves."""
    loop, broken = asyncio.get_running_loop(), asyncio.Event()
    world.on_break(lambda _: loop.call_soon_threadsafe(broken.set))
    while world.state is not mw.State.CLOSED:
        worker = None
        with contextlib.suppress(mw.WorldError):
            await asyncio.to_thread(world.wait_active, PATIENCE)
            broken.clear()
            link = WorldLink(world, shapes)
            worker = Worker(index, await link.ping(), link)
            await crew.add(worker)
            while world.state is mw.State.ACTIVE and not broken.is_set():
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(broken.wait(), PING_EVERY)
                await link.ping()
        if worker is not None:
            crew.lost(worker)


async def plain_crew(crew: Crew, shapes: Shapes) -> None:
    """The workers of one plain group, for the comparison."""
    dist.init_process_group("gloo")
    threads = ThreadPoolExecutor(2 * dist.get_world_size())
    for rank in range(1, dist.get_world_size()):
        link = PlainLink(rank, shapes, threads)
        await crew.add(Worker(rank - 1, await link.ping(), link))


async def front(args: argparse.Namespace, settings: Settings) -> int:
    """Serve until a signal comes."""
    from front import Front, Server  # noqa: PLC0415  (workers need no HTTP)

    config = load(settings).config  # for its sizes; the weights go at once
    shapes = Shapes(args.stages, config.hidden_size, settings.torch_dtype())
    crew = Crew()
    scheduler = Scheduler(crew, args.stages, settings.slots)
    name = settings.model or "random-llama"
    routes = Front(scheduler, tokenizer_of(settings), name, settings.length, config.vocab_size)
    server = Server(routes, args.host, args.port, functools.partial(serving_at, args.address_file))
    loop, worlds, tasks = asyncio.get_running_loop(), {}, []

    async def serve() -> None:
        if args.plain:
            await plain_crew(crew, shapes)
        else:
            worlds.update(await mw.join_all_async())
        # One thread for each link that waits for its worker, and one that closes it meanwhile.
        loop.set_default_executor(ThreadPoolExecutor(2 * len(worlds) + 4))
        for index, world in enumerate(worlds.values()):
            tasks.append(asyncio.create_task(tend(crew, index, world, shapes)))
        await scheduler.resize(args.replicas)
        await server.serve()

    serving = asyncio.create_task(serve())
    for signum in (signal.SIGINT, signal.SIGTERM):
        # Before it serves there are no streams to end, and what it waits for may never come.
        loop.add_signal_handler(signum, lambda: server.stop() if server.started else serving.cancel())
    await asyncio.wait([serving, scheduler.fault], return_when=asyncio.FIRST_COMPLETED)
    if scheduler.fault.done():
        scheduler.fault.result()
    if not serving.cancelled():
        serving.result()
    for task in [*tasks, *(task for each in scheduler.pipelines for task in each.running)]:
        task.cancel()
    await asyncio.gather(*(asyncio.to_thread(world.close, 1) for world in worlds.values()))
    return 0


def serving_at(file: Path | None, address: str) -> None:
    """Tell where the front serves."""
    say(f"serving on http://{address}")
    if file:
        part = file.with_suffix(".part")
        part.write_text(address)
        part.rename(file)  # there as a whole, or not


def main() -> int:
    """Be the front, or a worker, as the launcher says."""
    args = parser().parse_args()
    if args.slots < (fewest := max(2, args.stages)):
        raise SystemExit(
            f"--slots {args.slots}: each stage needs one, and 2 are the fewest. Give {fewest} or more."
        )
    if args.length < SHORTEST:
        raise SystemExit(
            f"--length {args.length}: a worker warms up with {SHORTEST} tokens. Give that or more."
        )
    torch.set_num_threads(1)  # stages share the cores of this host
    settings = Settings(args.model, args.dtype, args.length, args.slots)
    role = (
        os.environ.get("ROLE_NAME") if not args.plain else ("worker" if int(os.environ["RANK"]) else "front")
    )
    if role not in {"front", "worker"}:
        raise SystemExit(f"role {role!r}: start this with m8d-run --worlds examples/llm_serving/worlds.toml.")
    return work(args, settings) if role == "worker" else asyncio.run(front(args, settings))


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.exit(code)
