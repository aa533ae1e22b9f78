"""Attacks on every port of a run, by what its own clients say, broken: worlds go on as if nothing were.

`--soak SECONDS` makes it long (nox -s soak: 300 s), `--seed N` says again what an earlier run has said. Secure mode is one
more way to connect.
"""

from __future__ import annotations

import operator
import shutil
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from re import search

import pytest
from kits import portkit
from kits.fuzzkit import Facts, Fuzzer
from runkit import Run, launched
from test_listening_ports import Scene, told

pytestmark = [pytest.mark.everyday, pytest.mark.soak, pytest.mark.timeout(1800)]

SIZE = 4
WORLD = "besieged"
SHORT = 10.0
"""Seconds of the attack where no soak is asked for."""
GAP = 5.0
"""Seconds between two operations, at most. On a quiet machine it is 0.2 s; this one is shared and noisy."""
GROWTH = 64 << 20
"""Bytes that a process may grow by: buffers, and torch's first uses of what joins need."""
BACK = 90.0
"""Seconds until a process has what it had: a store keeps a client that says nothing for a minute."""

WORLDS = f"""
[roles]
worker = {SIZE}

[worlds.{WORLD}]
members = [{", ".join(f'"worker:{rank}"' for rank in range(SIZE))}]
timeout = 60
hang_timeout = 30
"""

# One thread works in one world all the time; the main one joins others and leaves them, while it is told to.
WORKER = """
import threading, torch, multiworld as mw
from multiworld._c10d.gloo import listeners

(world,) = mw.join_all().values()
assert world.group is not None  # made now: gloo's ports are there as well
metrics = mw.serve_metrics()
slowest, rounds, over = [0.0], [0], threading.Event()

def work():
    going, last = torch.ones(1), time.monotonic()
    while going.item():
        going[0] = float(not over.is_set())
        world.all_reduce(going, torch.distributed.ReduceOp.MIN)
        now = time.monotonic()
        slowest[0], last = max(slowest[0], now - last), now
        rounds[0] += 1
        time.sleep(0.002)

def said(name):
    return _os.path.exists(_os.environ["M8D_RUNKIT_TOLD"] + "." + name)

def join(number):
    with mw.join(f"more{number % 3}", world.rank, world.world_size, store=world._plan.store, timeout=60) as more:
        ends = torch.tensor([float(said("calm"))])
        more.all_reduce(ends)  # all see the same
    more.close()
    return bool(ends.item())

def looked(name, joined):
    tell(name, gap=slowest[0], rounds=rounds[0], state=str(world.state), joined=joined)
    slowest[0] = 0.0

worker = threading.Thread(target=work)
worker.start()
for number in range(3):
    join(number)
gen = world._gen
tell("up", gloo=[port for _, port in listeners._known], metrics=[metrics.port], store=int(world._plan.store.rpartition(":")[2]),
     processes=[each.process for each in world.members], key=gen.roster.key, token=gen.roster.token.hex())
hold("attack")
slowest[0], joined, ends = 0.0, 0, False
while not ends:
    ends = join(joined)
    joined += 1
    looked("looked", joined)
    time.sleep(0.1)
looked("calm", joined)
hold()
over.set()
worker.join(60)
looked("done", joined)
world.all_reduce(torch.ones(1))  # no member leaves before all have looked
"""


def resources(pids: set[int]) -> dict[int, tuple[int, int]]:
    """Sockets and threads of each process."""
    return {
        pid: (len(portkit.sockets_of(pid)), len(list(Path(f"/proc/{pid}/task").iterdir()))) for pid in pids
    }


def more(before: dict[int, tuple[int, int]], now: dict[int, tuple[int, int]]) -> dict[int, tuple[int, int]]:
    """Those that have more of something than before; threads of pools end by themselves."""
    return {pid: each for pid, each in now.items() if any(map(operator.gt, each, before[pid]))}


def memory(pid: int) -> int:
    """Bytes of a process in memory."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


def until(seconds: float, holds: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + seconds
    while not (met := holds()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return met


def steady(pids: set[int], seconds: float = 1.5) -> dict[int, tuple[int, int]]:
    """What processes have, once it has not changed for a while; helpers come a moment after a join."""
    now, since, deadline = resources(pids), time.monotonic(), time.monotonic() + 30
    while time.monotonic() < min(since + seconds, deadline):
        time.sleep(0.1)
        before, now = now, resources(pids)
        since = since if now == before else time.monotonic()
    return now


CONNECTS = {"plainly": lambda listener: portkit.plain(listener, timeout=0.02)}


@pytest.fixture
def home():
    """A folder with a short name: a unix socket's path is short."""
    folder = tempfile.mkdtemp(prefix="m8df")
    yield folder
    shutil.rmtree(folder)


@pytest.mark.parametrize("connect", CONNECTS.values(), ids=CONNECTS)
def test_worlds_go_on_under_attacks_at_every_port(tmp_path, home, request, seed, connect):
    seconds = request.config.getoption("--soak")
    seconds = seconds if seconds >= 60 else SHORT
    (tmp_path / "worlds.toml").write_text(WORLDS)
    options = ["--web", "127.0.0.1:0", "--worlds", str(tmp_path / "worlds.toml")]
    with launched(tmp_path, WORKER, options=options, env={"XDG_RUNTIME_DIR": home}) as run:
        heard_of(run, "up", seed)
        one = run.told("up")[0]
        page = int(search(r":(\d+)/\?token", run.wait_line("page: http")[0])[1])
        known = {page: "page", one.store: "store", **told([run], "gloo", "metrics")}
        scene = Scene(
            [run], known, {"store", "watchdog", "helper", "gloo", "metrics", "page", "control", "rendezvous"}
        )
        assert set(scene.standing().values()) >= scene.kinds
        pids = set(portkit.children(run.pid))
        before, sizes = steady(pids), {pid: memory(pid) for pid in pids}

        run.say("attack")
        facts = Facts(one.key, tuple(one.processes), bytes.fromhex(one.token))
        # Lanes listen for milliseconds: that takes a thread which looks for nothing else.
        fuzzers = [
            Fuzzer(seed, scene.listeners, facts, connect),
            Fuzzer(seed + 1, lambda: portkit.lanes(run.pid), facts, connect),
        ]
        attack(fuzzers, seconds)
        run.say("calm")
        heard_of(run, "calm", seed)
        until(BACK, lambda: not more(before, resources(pids)))
        stayed, grown = (
            more(before, resources(pids)),
            {pid: memory(pid) - size for pid, size in sizes.items()},
        )
        assert portkit.children(run.pid) == pids, f"--seed {seed}\n{run.report()}"
        run.say()
        assert run.ended() == 0, f"--seed {seed}\n{run.report()}"

        looked = [each for name in ("looked", "calm", "done") for each in run.told(name)]
        worst, calls = max(each.gap for each in looked), sum((each.calls for each in fuzzers), Counter())
        print(  # noqa: T201  (what a soak measured)
            f"--seed {seed}, {seconds:.0f} s: calls {dict(calls)}, answers in bytes"
            f" {dict(sum((each.heard for each in fuzzers), Counter()))}, {looked[-1].joined} joins,"
            f" {looked[-1].rounds} operations, longest gap {worst:.3f} s, growth {max(grown.values()) >> 10} KiB"
        )
        assert {each.state for each in looked} == {"active"}, f"--seed {seed}"
        assert looked[-1].joined > 1, f"--seed {seed}: no world could be joined meanwhile"
        assert worst < GAP, f"--seed {seed}"
        assert not stayed, f"--seed {seed}: sockets and threads that stayed: {stayed} beyond {before}"
        assert max(grown.values()) < GROWTH, f"--seed {seed}: {grown}"
        missed = scene.kinds - {"gloo", *calls}  # gloo's ports look filtered
        assert not missed, f"--seed {seed}"


def heard_of(run: Run, name: str, seed: int) -> None:
    """Wait until all workers have told it, or the run has ended."""
    run.wait_for(lambda: len(run.told(name)) == SIZE or run.process.poll() is not None, name)
    assert len(run.told(name)) == SIZE, f"--seed {seed}\n{run.report()}"


def attack(fuzzers: list[Fuzzer], seconds: float) -> None:
    end = time.monotonic() + seconds
    threads = [threading.Thread(target=each.run, args=(end,), daemon=True) for each in fuzzers]
    for each in threads:
        each.start()
    for each in threads:
        each.join(seconds + 60)
        assert not each.is_alive()
