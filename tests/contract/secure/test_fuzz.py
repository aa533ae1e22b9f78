"""Attacks on every port of a run, by what its own clients say, broken: worlds go on as if nothing were.

`--soak SECONDS` makes it long (nox -s soak: 300 s), `--seed N` says again what an earlier run has said. In secure mode
strangers come with TLS, without a certificate, and without: then half of what they say are broken records of TLS.
"""

from __future__ import annotations

import operator
import shutil
import socket
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from re import search

import pytest
from kits import portkit
from kits.contract.portscenes import Scene, certificate, scripts, told, with_tls
from kits.contract.runkit import Run, Told, launched
from kits.contract.worldkit import free_port
from kits.fuzzkit import Facts, Fuzzer

pytestmark = [pytest.mark.everyday, pytest.mark.soak, pytest.mark.timeout(1800)]

SIZE = 4
WORLD = "besieged"
SHORT = 6.0
"""Seconds of the attack where no soak is asked for."""
GAP = 10.0
"""Seconds between two operations, at most. On a quiet machine it is 0.2 s; at a load of 20 on two cores it was 5.5 s."""
GROWTH = 64 << 20
"""Bytes that a process may grow by: buffers, and torch's first uses of what joins need."""
BACK = 90.0
"""Seconds until a process has what it had: a store keeps a client that says nothing for a minute."""

VISITED = {"metrics", "page"}
"""Kinds that answer clients without a certificate in secure mode: with a refusal, or to probes."""

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

secure = "M8D_TLS_CERT" in _os.environ
world = mw.join("WORLD", _rank, SIZE, store=sys.argv[1], timeout=60, hang_timeout=30) if secure else mw.join_all()["WORLD"]
assert secure or world.group is not None  # made now: gloo's ports are there as well
metrics = mw.serve_metrics() if world.rank == 0 or not secure else None
page = mw.serve_page("127.0.0.1:0") if secure and metrics else None
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
    with mw.join(f"more{number % 3}", world.rank, world.world_size, store=world._plan.store, timeout=60, hang_timeout=30) as more:
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
tell("up", gloo=[port for _, port in listeners._known], metrics=[metrics.port] if metrics else [], page=[page.port] if page else [], store=int(world._plan.store.rpartition(":")[2]),
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
""".replace("WORLD", WORLD).replace("SIZE", str(SIZE))


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


def steady(pids: set[int], seconds: float = 4.0) -> dict[int, tuple[int, int]]:
    """What processes have, once it has not changed for a while.

    Helpers come a moment after a join. An early-close connection that was dialed with a world which had ended at the
    other end by then is dialed again after 1 s, and 2 s after that.
    """
    now, since, deadline = resources(pids), time.monotonic(), time.monotonic() + 30
    while time.monotonic() < min(since + seconds, deadline):
        time.sleep(0.1)
        before, now = now, resources(pids)
        since = since if now == before else time.monotonic()
    return now


@pytest.fixture
def home():
    """A folder with a short name: a unix socket's path is short."""
    folder = tempfile.mkdtemp(prefix="m8df")
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def seconds(request) -> float:
    """How long the attack lasts."""
    asked = request.config.getoption("--soak")
    return asked if asked >= 60 else SHORT


def soon(listener: portkit.Listener) -> socket.socket:
    """Connect, and do not wait for ports that look filtered."""
    return portkit.plain(listener, timeout=0.02)


def test_worlds_go_on_under_attacks_at_every_port(tmp_path, home, seed, seconds):
    (tmp_path / "worlds.toml").write_text(WORLDS)
    options = ["--web", "127.0.0.1:0", "--worlds", str(tmp_path / "worlds.toml")]
    with launched(tmp_path, WORKER, options=options, env={"XDG_RUNTIME_DIR": home}) as run:
        one = heard_of([run], "up", seed)[0]
        page = int(search(r":(\d+)/\?token", run.wait_line("page: http")[0])[1])
        known = {page: "page", one.store: "store", **told([run], "gloo", "metrics")}
        kinds = {"store", "watchdog", "helper", "gloo", "metrics", "page", "control", "rendezvous"}
        besiege(Scene([run], known, kinds), soon, seed, seconds)


@pytest.mark.parametrize("connect", [soon, with_tls], ids=["without TLS", "with TLS"])
def test_secure_worlds_go_on_under_attacks_without_a_certificate(tmp_path, seed, seconds, connect):
    store = free_port()
    where = f"tcp://127.0.0.1:{store}"
    with scripts(tmp_path, WORKER, where, env=certificate(tmp_path), size=SIZE) as runs:
        heard_of(runs, "up", seed)
        known = {store: "store", **told(runs, "metrics", "page")}
        besiege(
            Scene(runs, known, {"store", "watchdog", "helper", *VISITED}), connect, seed, seconds, secure=True
        )


def besiege(
    scene: Scene, connect: portkit.Connect, seed: int, seconds: float, *, secure: bool = False
) -> None:
    """Attack, see that worlds work meanwhile, and that all is as before afterwards."""
    runs = scene.runs
    assert set(scene.standing().values()) >= scene.kinds
    # Each worker has a program that answers for it, which starts a moment after a join.
    programs = lambda: sum(portkit.helps(pid) for pid in processes(runs))  # noqa: E731
    assert until(30, lambda: programs() == SIZE)
    pids = processes(runs)
    before, sizes = steady(pids), {pid: memory(pid) for pid in pids}
    were = {pid: portkit.described(pid) for pid in pids}
    say(runs, "attack")
    one = next(each for run in runs for each in run.told("up"))
    facts = Facts(one.key, tuple(one.processes), bytes.fromhex(one.token))
    # Lanes listen for milliseconds: that takes a thread which looks for nothing else.
    records = secure and connect is not with_tls
    fuzzers = [
        Fuzzer(seed, scene.listeners, facts, connect, records),
        Fuzzer(seed + 1, lambda: portkit.lanes(runs[0].pid), facts, connect, records),
    ]
    attack(fuzzers, seconds)
    say(runs, "calm")
    looked = heard_of(runs, "calm", seed)
    until(BACK, lambda: not more(before, resources(pids)))
    stayed, grown = more(before, resources(pids)), {pid: memory(pid) - size for pid, size in sizes.items()}
    came = {
        pid: sorted(what for inode, what in portkit.described(pid).items() if inode not in were[pid])
        for pid in stayed
    }
    report = "\n".join(run.report() for run in runs)
    assert processes(runs) == pids, f"--seed {seed}\n{report}"
    say(runs, "go")
    assert [run.ended() for run in runs] == [0] * len(runs), f"--seed {seed}\n{report}"

    looked += [each for name in ("looked", "done") for run in runs for each in run.told(name)]
    worst, calls = max(each.gap for each in looked), sum((each.calls for each in fuzzers), Counter())
    heard = sum((each.heard for each in fuzzers), Counter())
    print(  # noqa: T201  (what a soak measured)
        f"--seed {seed}, {seconds:.0f} s: calls {dict(calls)}, answers in bytes"
        f" {dict(heard)}, {looked[-1].joined} joins,"
        f" {looked[-1].rounds} operations, longest gap {worst:.3f} s, growth {max(grown.values()) >> 10} KiB"
    )
    assert {each.state for each in looked} == {"active"}, f"--seed {seed}"
    assert looked[-1].joined > 1, f"--seed {seed}: no world could be joined meanwhile"
    assert worst < GAP, f"--seed {seed}"
    assert not stayed, (
        f"--seed {seed}: sockets and threads that stayed: {stayed} beyond {before}; came: {came}"
    )
    assert max(grown.values()) < GROWTH, f"--seed {seed}: {grown}"
    inside = {kind: heard[kind] for kind in +heard if kind not in VISITED}
    assert connect is not with_tls or not inside, f"--seed {seed}: {inside} came back inside TLS"
    assert not records or calls["tls"], f"--seed {seed}"
    missed = scene.kinds - {"gloo", *calls}  # gloo's ports look filtered
    assert not missed or connect is with_tls, f"--seed {seed}"


def processes(runs: list[Run]) -> set[int]:
    return {pid for run in runs for pid in portkit.children(run.pid)}


def say(runs: list[Run], name: str) -> None:
    for run in runs:
        run.say(name)


def heard_of(runs: list[Run], name: str, seed: int) -> list[Told]:
    """Wait until all workers have told it, or one has ended; return what they told."""

    def heard() -> list[Told]:
        return [each for run in runs for each in run.told(name)]

    over = lambda: any(run.process.poll() is not None for run in runs)  # noqa: E731
    runs[0].wait_for(lambda: len(heard()) == SIZE or over(), name)
    report = "\n".join(run.report() for run in runs)
    assert len(heard()) == SIZE, f"--seed {seed}\n{report}"
    return heard()


def attack(fuzzers: list[Fuzzer], seconds: float) -> None:
    end = time.monotonic() + seconds
    threads = [threading.Thread(target=each.run, args=(end,), daemon=True) for each in fuzzers]
    for each in threads:
        each.start()
    for each in threads:
        each.join(seconds + 60)
        assert not each.is_alive()
