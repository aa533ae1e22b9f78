"""A hub and workers under several launchers, and what each of them told: for tests that lose nodes."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time

from kits.contract.runkit import Run, script

PATIENCE = 180.0
"""Seconds: three launchers and five workers that all import torch, on two busy cores."""

WORLDS = """
[roles]
hub = 1
worker = 3

[worlds."w{i}"]
for = "worker"
members = ["hub:0", "worker:{i}"]
timeout = 90
hang_timeout = 5
"""
"""Two nodes of two workers: hub and worker 0 (world w0) on the first, worker 1 and 2 (w1, w2) on the second."""

SCRIPT = """
import threading, torch, multiworld as mw

tell("born")
worlds = mw.join_all(timeout=150)

def work(w):
    told = 0
    while True:
        try:
            t = torch.tensor([1.0, float(_os.path.exists(_os.environ["M8D_RUNKIT_TOLD"] + ".go"))])
            w.all_reduce(t)
            assert t[0].item() == w.world_size
            if w.generation != told:
                told = w.generation
                tell("active", world=w.name, generation=told)
            if t[1].item():
                return
            tick[w.name] = tick.get(w.name, 0) + 1
            time.sleep(0.02)
        except mw.BrokenWorldException as exc:
            tell("broke", world=w.name, cause=exc.cause, generation=exc.generation)
            if _os.path.exists(_os.environ["M8D_RUNKIT_TOLD"] + ".go"):
                return
            try:
                w.wait_active(150)
            except mw.MultiworldError as error:
                tell("lost", world=w.name, error=repr(error))
                return

def count():
    while True:
        time.sleep(0.5)
        tell("tick", **tick)

tick = {}
threads = [threading.Thread(target=work, args=(w,)) for w in worlds.values()]
threading.Thread(target=count, daemon=True).start()
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
tell("end")
"""


class Hub(contextlib.ExitStack):
    """Launchers of one run.

    Args:
        folder: for scripts and what comes of them.
        options: for every launcher, after ``--nproc-per-node 2`` and the worlds file.
        text: of the workers' script.
    """

    def __init__(self, folder, options, text=SCRIPT):
        super().__init__()
        self.folder, self.text = folder, text
        self.runs = []
        worlds = folder / "worlds.toml"
        worlds.write_text(WORLDS)
        self.options = [
            "--nproc-per-node", "2", "--worlds", str(worlds), "--max-restarts", "5",
            "--node-hang-timeout", "3", *options,
        ]  # fmt: skip

    def start(self, *options, netns=None):
        folder = self.folder / f"node{len(self.runs)}"
        folder.mkdir()
        prefix = ["ip", "netns", "exec", netns] if netns else []
        line = [
            *prefix,
            sys.executable,
            "-m",
            "multiworld.run",
            *self.options,
            *options,
            str(script(folder, self.text)),
        ]
        run = Run(folder, line, {}, None)
        self.callback(run.close)
        self.runs.append(run)
        return run

    def told(self, name, **match):
        return [each for run in self.runs for each in run.told(name, **match)]

    def wait(self, count, name, **match):
        deadline = time.monotonic() + PATIENCE
        while len(found := self.told(name, **match)) < count:
            assert time.monotonic() < deadline, (
                f"{count} x {name} {match}: there are {len(found)}\n"
                + "\n".join(r.report() for r in self.runs)
            )
            time.sleep(0.05)
        return found

    def running(self):
        """Wait until all worlds are active for the first time; who is on which node, as rank: (run, pid)."""
        self.wait(6, "active", generation=1)
        return {each["rank"]: (run, each["pid"]) for run in self.runs for each in run.told("born")}

    def ticks_on(self, world):
        """Wait until a world has done more than it had."""

        def seen():
            return max((each.get(world, 0) for each in self.told("tick", rank=0)), default=0)

        before, deadline = seen(), time.monotonic() + PATIENCE
        while seen() <= before:
            assert time.monotonic() < deadline, f"{world} stands still\n" + "\n".join(
                r.report() for r in self.runs
            )
            time.sleep(0.1)

    def end(self, runs):
        """Let the workers end, and see that every launcher ends with 0 and leaves nothing behind."""
        for run in runs:
            run.say()
        for run in runs:
            assert run.ended(PATIENCE) == 0, run.report()
        for run in self.runs:
            assert run.leftovers() == []


def kill_host(run):
    """End all processes of a node at once, as a host does that loses its power."""
    for pid in (run.pid, *run.alive()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
