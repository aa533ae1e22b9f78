"""A language model served under fire: a pipeline of stages, clients that stream from it, and kills meanwhile.

    python examples/llm_serving.py                                       a minute, nothing is killed
    python examples/llm_serving.py --kill-every 15 --change-replicas     a stage is killed every 15 s
    python examples/llm_serving.py --compare 5 --seconds 20              beside the same on plain torch.distributed

It starts `m8d-run` with a front and workers (llm_serving/serve.py), loads it (llm_serving/load.py), compares each token with
those of an undisturbed run of the whole model, prints what it measured, and ends all. It needs transformers, starlette
and uvicorn: pip install '.[examples]'
"""

from __future__ import annotations

import _ctrl_c  # first: Ctrl-C is quiet from here on

import argparse
import asyncio
import contextlib
import importlib.util
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent / "llm_serving"
sys.path.insert(0, str(HERE))

if missing := [
    name for name in ("transformers", "starlette", "uvicorn") if importlib.util.find_spec(name) is None
]:
    raise SystemExit(f"{' and '.join(missing)} missing: pip install '.[examples]'")

from load import Load, options  # of llm_serving/
from report import finish, merged  # of llm_serving/
from truth import cases  # of llm_serving/

PATIENCE = 300.0
"""Seconds until all are there."""
PRELOAD = "torch,multiworld,transformers.models.llama.modeling_llama,model,pipeline,wire"
"""What m8d-run imports once for all workers, which it forks then."""


@contextlib.contextmanager
def server(name: str, *args: str, launcher: tuple[str, ...], log: Path) -> Iterator[str]:
    """Start a front and its workers; gives the front's address, and ends all of them in the end."""
    with tempfile.TemporaryDirectory() as folder, log.open("w") as out:
        file = Path(folder, "address")
        command = [
            sys.executable, "-u", "-m", "multiworld.run", *launcher, "--grace", "3",
            str(HERE / "serve.py"), "--address-file", str(file), *args,
        ]  # fmt: skip
        # A session of its own: Ctrl-C is for this program, which then ends the launcher.
        with _ctrl_c.kept_back():
            process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            began = told = time.monotonic()
            while not file.exists():
                if process.poll() is not None or time.monotonic() > began + PATIENCE:
                    raise SystemExit(f"{name} did not come up; its last lines in {log}:\n" + _tail(log))
                now = time.monotonic()
                if sys.stdout.isatty():
                    print(f"\r{name} starts: {now - began:3.0f} s", end="", flush=True)
                elif now > told + 4:
                    print(f"{name} starts: {now - began:3.0f} s", flush=True)
                    told = now
                time.sleep(0.2)
            back = "\r" if sys.stdout.isatty() else ""
            print(f"{back}{name} serves at http://{file.read_text()}, its log is {log}", flush=True)
            yield file.read_text()
        finally:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)
            process.kill()  # its workers are ended by the process beside it
            process.wait()


def alone(load: Load, args: argparse.Namespace) -> int:
    """The load as asked for; with `--calm` beside the same without kills, before and after it."""
    changes = args.change_replicas
    calm = [asyncio.run(load.run("calm", args.calm, change_replicas=changes))] if args.calm else []
    story = asyncio.run(
        load.run(
            "fire" if args.kill_every else "load",
            args.seconds,
            kill_every=args.kill_every,
            change_replicas=changes,
        )
    )
    if not calm:
        return finish([story], args.plot)
    calm.append(asyncio.run(load.run("calm", args.calm, change_replicas=changes)))
    before, after = (part.rate() for part in calm)
    whole = merged("calm", calm)
    code = finish([whole, story], args.plot)
    print(
        f"{story.name}: {story.rate() / whole.rate():.1%} of the tokens per second when calm ({before:.0f} before, {after:.0f} after)"
    )
    return code


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-15:])


def main() -> int:
    """Start, load, tell, end."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options(parser)
    parser.add_argument(
        "--compare",
        type=int,
        default=0,
        metavar="ROUNDS",
        help="parts of --seconds each, in turns with plain torch.distributed",
    )
    parser.add_argument(
        "--calm",
        type=float,
        default=0,
        metavar="SECONDS",
        help="the same without kills before and after, to compare",
    )
    parser.add_argument(
        "--web", action="store_true", help="m8d-run's page beside it; its address is in the log"
    )
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the launcher is to end with this program
    logs = Path(tempfile.mkdtemp(prefix="m8d-llm-serving-"))
    known = cases()
    launcher = (
        "--worlds",
        str(HERE / "worlds.toml"),
        "--max-restarts",
        "10000",
        "--preload",
        PRELOAD,
        *(["--web"] if args.web else []),
    )
    _ctrl_c.raises()
    with contextlib.ExitStack() as stack:
        address = stack.enter_context(server("worlds", launcher=launcher, log=logs / "worlds.log"))
        load = Load(address, known, args.clients, args.pause)
        if not args.compare:
            return alone(load, args)
        # One group for the front and the stages of one pipeline.
        plainly = ("--standalone", "--nproc-per-node", "4")
        other = stack.enter_context(server("plain", "--plain", launcher=plainly, log=logs / "plain.log"))
        plain = Load(other, known, args.clients, args.pause)
        parts = []
        for number in range(2 * args.compare):
            # In turns, and each first as often as the other: the machine is not the same from minute to minute.
            which = ("worlds", "plain")[(number + number // 2) % 2]
            parts.append(asyncio.run((load if which == "worlds" else plain).run(which, args.seconds)))
            print(f"{which}: {parts[-1].rate():.0f} tokens/s", flush=True)
        both = [merged(name, [part for part in parts if part.name == name]) for name in ("plain", "worlds")]
        code = finish(both, None)
        print(
            f"worlds make {both[1].rate() / both[0].rate():.1%} of plain torch.distributed's tokens per second"
        )
        return code


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
