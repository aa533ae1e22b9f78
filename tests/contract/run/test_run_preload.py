"""m8d-run --preload: modules are imported once, and workers are forked of the process that has them."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from types import SimpleNamespace

import pytest
from kits.contract import runkit

from multiworld.run.nodes.interface import Lost, Over, Reassigned, Stop
from multiworld.run.nodes.slots import Assignment
from multiworld.run.workers.agent import WorkerAgent
from multiworld.run.workers.node_events import NodeEvents

SLOW = """
import os
IMPORTED_BY = os.getpid()
os.environ["SET_BY_AN_IMPORT"] = "1"
"""
TELLS = """
import slow
tell("up", imported_by=slow.IMPORTED_BY, parent=_os.getppid(), session=_os.getsid(0), group=_os.getpgid(0),
     argv=sys.argv, file=__file__, module=__name__, path=sys.path[0], env=dict(_os.environ),
     handlers=[str(signal.getsignal(n)) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE)],
     main=sys.modules["__main__"].__dict__.get("hold") is hold, unbuffered=sys.stdout.write_through,
     line=open("/proc/self/cmdline").read().rstrip("\\0").split("\\0"),
     descriptors=sorted(int(n) for n in _os.listdir("/proc/self/fd")), original=sys.orig_argv, masked=len(signal.pthread_sigmask(0, [])))
hold()
"""
ITS_OWN = {"M8D_START", "M8D_RUNKIT", "M8D_RUNKIT_TOLD", "M8D_RUN_ID", "TORCHELASTIC_RUN_ID", "MASTER_PORT"}
"""Variables of the environment that differ from run to run."""


@pytest.fixture
def slow(tmp_path):
    (tmp_path / "slow.py").write_text(SLOW)
    return "slow"


def two(*more: str) -> list[str]:
    return ["--nproc-per-node", "2", "--max-restarts", "9", "--restart-backoff", "0", *more]


def server_of(run: runkit.Run) -> int:
    """Pid of the fork server, which imported the module."""
    return int(run.told("up")[-1].imported_by)


def comparable(told: runkit.Told) -> dict[str, object]:
    """What a worker told of itself, without what no two runs have in common."""
    changing = {"pid", "at", "imported_by", "parent", "session", "group", "env", "path"}
    env = {
        name: value
        for name, value in told.env.items()
        if name not in ITS_OWN and not name.startswith(("M8D_RUN_", "M8D_CONTROL", "TORCHELASTIC_ERROR"))
    }
    return {**{name: value for name, value in told.items() if name not in changing}, "env": env}


def test_a_forked_worker_is_what_a_new_one_is(tmp_path, slow):
    seen = []
    for options in (two(), two("--preload", slow)):
        runkit.script(tmp_path, TELLS, "relative.py")
        command = [sys.executable, "-m", "multiworld.run", *options, "relative.py", "a", "--b"]
        with runkit.launched(tmp_path, "", command=command) as run:
            told = sorted(run.wait_told("up", 2), key=lambda each: each.rank)
            for each in told:
                assert (each.parent, each.session, each.group) == (run.pid, each.pid, each.pid)
            assert len({each.imported_by for each in told}) == (1 if "--preload" in options else 2)
            assert all((each.imported_by == each.pid) != ("--preload" in options) for each in told)
            seen.append([comparable(each) for each in told])
            run.say()
            assert run.ended() == 0
            assert run.leftovers() == [], "the fork server ends with the launcher"
    assert seen[0] == seen[1]
    assert all(each["env"]["SET_BY_AN_IMPORT"] == "1" for each in seen[1])
    assert "Traceback" not in run.text()
    run.wait_line(r'--preload: slow imported in \d+\.\d s"')


def test_a_killed_worker_comes_back_of_the_same_fork(tmp_path, slow):
    with runkit.launched(tmp_path, TELLS, options=two("--preload", slow)) as run:
        run.wait_told("up", 2)
        first = server_of(run)
        for attempt in range(1, 6):
            os.kill(run.told("up", rank=1)[-1].pid, signal.SIGKILL)
            again = run.wait_told("up", 1, rank=1, attempt=attempt)[0]
            assert (again.imported_by, again.parent) == (first, run.pid)
            assert again.env["TORCHELASTIC_RESTART_COUNT"] == str(attempt)
        assert len(run.told("up", rank=0)) == 1
        assert len(run.wait_line(r"event=failed .*SIGKILL")) == 5
        run.say()
        assert run.ended() == 0
        assert run.leftovers() == []


ENDS = """
import slow
print(f"{_rank} says something", flush=True)
print(f"{_rank} complains", file=sys.stderr)
how = sys.argv[1]
if _attempt or _rank != 1:
    tell("up", imported_by=slow.IMPORTED_BY)
    hold()
elif how == "raise":
    raise LookupError("no such thing")
elif how == "exit":
    sys.exit(7)
elif how == "text":
    sys.exit("it says why")
elif how == "signal":
    _os.kill(_os.getpid(), signal.SIGTERM)
elif how == "interrupt":
    raise KeyboardInterrupt
elif how == "thread":
    import threading
    threading.Thread(target=lambda: (time.sleep(0.3), print("a thread's last word", flush=True))).start()
    import atexit
    atexit.register(print, "at exit", flush=True)
    sys.exit(8)
"""


@pytest.mark.parametrize(
    ("how", "event"),
    [
        ("raise", "exitcode=1"),
        ("exit", "exitcode=7"),
        ("text", "exitcode=1"),
        ("signal", "SIGTERM"),
        ("interrupt", "SIGINT"),
        ("thread", "exitcode=8"),
    ],
)
def test_ends_are_told_as_those_of_other_workers(tmp_path, slow, how, event):
    options = two("--preload", slow, "--log-dir", str(tmp_path / "logs"), "--redirects", "3", "--tee", "3")
    with runkit.launched(tmp_path, ENDS, how, options=options) as run:
        run.wait_told("up", 1, rank=1, attempt=1)
        assert event in run.wait_line("event=failed")[0]
        run.say()
        assert run.ended() == 0
        assert run.leftovers() == []
    (folder,) = (tmp_path / "logs").iterdir()
    out, err = ((folder / "attempt_0" / "1" / name).read_text() for name in ("stdout.log", "stderr.log"))
    assert "1 says something" in out
    assert "1 complains" in err
    assert "1 says something" in (folder / "attempt_1" / "1" / "stdout.log").read_text()
    assert "fork_server" not in err, "a traceback begins with the script"
    if how == "raise":
        assert re.search(
            r"Traceback .*\n  File \".*worker.py\", line \d+, in <module>\n.*\n(.*\n)?LookupError: no such",
            err,
        )
    if how == "text":
        assert "it says why" in err
    if how == "thread":
        assert out.rstrip().endswith("a thread's last word\nat exit")


PROCESSES = """
import multiprocessing, random
import slow

def square(number):
    return number * number

if __name__ == "__main__":
    found = {}
    for method in ("fork", "spawn", "forkserver"):
        with multiprocessing.get_context(method).Pool(2) as pool:
            found[method] = pool.map(square, range(3))
    tell("up", found=found, drawn=random.random(), imported_by=slow.IMPORTED_BY)
    hold()
"""


def test_a_worker_has_processes_of_its_own(tmp_path, slow):
    with runkit.launched(tmp_path, PROCESSES, options=two("--preload", slow)) as run:
        told = run.wait_told("up", 2)
        assert all(set(map(tuple, each.found.values())) == {(0, 1, 4)} for each in told)
        assert told[0].drawn != told[1].drawn, "each draws its own numbers"
        run.say()
        assert run.ended() == 0
        assert run.leftovers() == []


def test_numpy_draws_other_numbers_in_each_worker(tmp_path):
    text = """
import numpy
tell("up", drawn=numpy.random.rand(), many=numpy.random.default_rng().random())
"""
    with runkit.launched(tmp_path, text, options=two("--preload", "numpy")) as run:
        told = run.wait_told("up", 2)
        assert run.ended() == 0
    assert len({each.drawn for each in told}) == len({each.many for each in told}) == 2


def test_a_module_runs_as_with_m(tmp_path, slow):
    runkit.script(tmp_path, TELLS, "program.py")
    command = [sys.executable, "-m", "multiworld.run", *two("--preload", slow), "-m", "program", "a"]
    with runkit.launched(tmp_path, "", command=command) as run:
        told = run.wait_told("up", 2)
        assert {tuple(each.argv) for each in told} == {(str(tmp_path / "program.py"), "a")}
        assert {each.module for each in told} == {"__main__"}
        assert len({each.imported_by for each in told}) == 1
        run.say()
        assert run.ended() == 0


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_workers_start_without_a_fork_server_that_is_lost(tmp_path, slow, how):
    """Its workers live on; it is started again, and later workers are forked of the new one."""
    with runkit.launched(tmp_path, TELLS, options=two("--preload", slow)) as run:
        run.wait_told("up", 2)
        first = server_of(run)
        os.kill(first, how)
        os.kill(run.told("up", rank=1)[-1].pid, signal.SIGKILL)
        again = run.wait_told("up", 1, rank=1, attempt=1)[0]
        assert again.imported_by != first
        run.wait_for(lambda: not runkit.is_living(first), "the old fork server is gone")
        run.wait_line("imported in", count=2)
        os.kill(again.pid, signal.SIGKILL)
        last = run.wait_told("up", 1, rank=1, attempt=2)[0]
        assert last.imported_by not in {first, last.pid}
        assert len(run.told("up", rank=0)) == 1, "the other worker did not notice"
        run.say()
        assert run.ended() == 0
        assert run.leftovers() == []


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_no_process_outlives_the_launcher(tmp_path, slow, number):
    with runkit.launched(tmp_path, TELLS, options=two("--preload", slow, "--grace", "5")) as run:
        run.wait_told("up", 2)
        run.signal(number)
        assert run.ended() == (-9 if number == signal.SIGKILL else 143)
        assert run.leftovers() == []


def test_a_signal_to_the_session_leaves_the_fork_server(tmp_path, slow):
    """A service manager signals all processes: the fork server is there for as long as the launcher is."""
    with runkit.launched(tmp_path, TELLS, options=two("--preload", slow)) as run:
        run.wait_told("up", 2)
        first = server_of(run)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
            os.kill(first, number)
        os.kill(run.told("up", rank=0)[-1].pid, signal.SIGTERM)
        assert run.wait_told("up", 1, rank=0, attempt=1)[0].imported_by == first
        run.say()
        assert run.ended() == 0


def test_an_interrupt_during_the_imports(tmp_path):
    (tmp_path / "endless.py").write_text("import time\ntime.sleep(600)\n")
    with runkit.launched(tmp_path, TELLS, options=two("--preload", "endless")) as run:
        run.wait_line("--preload: importing for 1 s")
        began = time.monotonic()
        run.signal(signal.SIGINT)
        assert run.ended() == 130
        assert time.monotonic() - began < 20
        assert run.leftovers() == []
    assert run.told() == []
    assert "Traceback" not in run.text()


def test_the_launcher_is_killed_during_the_imports(tmp_path):
    (tmp_path / "endless.py").write_text("import time\ntime.sleep(600)\n")
    with runkit.launched(tmp_path, TELLS, options=two("--preload", "endless")) as run:
        run.wait_line("--preload: importing for 1 s")
        assert len(run.alive()) == 2, "the launcher and its fork server"
        run.signal(signal.SIGKILL)
        assert run.ended() == -9
        assert run.leftovers() == []
    assert "Traceback" not in run.text()


SEAT = Assignment(slot=1, base_rank=2, world_size=4, nodes=2, store="tcp://a:1")
NO_SEAT = Assignment(slot=None, base_rank=0, world_size=4, nodes=2, store="tcp://a:1")
MOVED = Assignment(slot=1, base_rank=2, world_size=4, nodes=2, store="tcp://b:1")


class Importing:
    """A fork server whose modules are imported once `events` have come of the other nodes, or never."""

    def __init__(self, events, *, endless):
        self.news, self.events, self.endless = [], events, endless

    def poll(self):
        news, self.news = self.news, []
        return news

    def wait_ready(self, interrupted):
        assert not interrupted()
        self.news.extend(self.events)
        assert interrupted() or not self.endless, "it waits for the modules"


def agent_with(imports, started):
    """An agent with the workers of `SEAT`, which are about to start."""
    agent = object.__new__(WorkerAgent)
    wake = SimpleNamespace(listen=lambda _: None, came=lambda _: False)
    agent._context = SimpleNamespace(wake=wake, signals=(), forks=imports, nodes=imports)
    agent._events = NodeEvents(imports)
    agent.assignment = SEAT
    agent._scaler = SimpleNamespace(signals=())
    agent._crew = SimpleNamespace(places={2: SimpleNamespace(rank=2, local_rank=0)}, wanted={2})
    agent._torch_environments, agent._logs = lambda _: {}, SimpleNamespace(prepare=lambda _: None)
    agent._start = lambda place: started.append(place.rank) or 1
    return agent


@pytest.mark.parametrize("endless", [False, True])
@pytest.mark.parametrize("event", [Reassigned(NO_SEAT), Stop("a node was lost"), Over()])
def test_a_node_that_lost_its_seat_during_the_imports_starts_no_worker(event, endless):
    started = []
    agent = agent_with(Importing([event], endless=endless), started)
    assert agent._start_workers(None) == {}
    assert started == []
    assert agent._events.take() == event, "the loop handles it"


def test_other_news_during_the_imports_keep_no_worker_back():
    started = []
    events = [Lost("b", 0, "crashed", (0, 1), ()), Reassigned(MOVED)]
    agent = agent_with(Importing(events, endless=False), started)
    assert agent._start_workers(None) == {0: 1}
    assert started == [2]
    assert [agent._events.take() for _ in range(3)] == [*events, None]


AT_ONCE = """
if _rank == 0:
    sys.exit(3)
tell("up")
hold()
"""


def test_the_first_signal_ends_a_worker_that_has_just_started(tmp_path, slow):
    """Rank 0 fails in its first moment: the others are ended in theirs, not after --grace."""
    options = ["--nproc-per-node", "6", "--preload", slow, "--grace", "60"]
    with runkit.launched(tmp_path, AT_ONCE, options=options) as run:
        began = time.monotonic()
        assert run.ended() == 3
        assert time.monotonic() - began < 45
        assert run.leftovers() == []


@pytest.mark.parametrize(
    ("module", "said"),
    [
        ("raise LookupError('no such thing')\n", "no such thing"),
        ("import not_there_at_all\n", "not_there_at_all"),
        ("raise SystemExit(3)\n", "SystemExit: 3"),
        ("import os\nos._exit(4)\n", "ended with 4"),
        ("import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True, name='tick').start()\n",
         "starts threads when it is imported (tick)"),
    ],
    ids=["raises", "lacks another", "exits", "ends", "thread"],
)  # fmt: skip
def test_modules_that_workers_cannot_be_forked_with(tmp_path, module, said):
    (tmp_path / "bad.py").write_text(module)
    with runkit.launched(tmp_path, TELLS, options=two("--preload", "json,bad")) as run:
        assert run.ended() == 1
        assert said in run.text("err")
        assert "m8d-run: --preload json,bad" in run.text("err")
        assert run.leftovers() == []
    assert run.told() == []


@pytest.mark.parametrize(
    "options",
    [["--restart", "group"], ["--no-python"], ["--run-path"]],
    ids=lambda options: options[0],
)
def test_options_that_exclude_it(tmp_path, options):
    with runkit.launched(tmp_path, TELLS, options=["--preload", "json", *options]) as run:
        assert run.ended() == 2
        assert "--preload json" in run.text("err")
        assert "Traceback" not in run.text()


def test_exit_codes_where_sigchld_was_ignored(tmp_path, slow):
    """A service that ignores SIGCHLD hands that on, and the kernel drops the exit codes of its children."""
    command = [
        sys.executable, "-c",
        "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); os.execv(sys.executable, sys.argv[1:])",
        sys.executable, "-m", "multiworld.run", *two("--preload", slow, "--max-restarts", "0"), "{script}",
    ]  # fmt: skip
    with runkit.launched(tmp_path, TELLS + "sys.exit(75)\n", command=command) as run:
        told = run.wait_told("up", 2)
        assert {each.parent for each in told} == {run.pid}
        run.say()
        assert run.ended() == 75
        assert run.leftovers() == []


WORLDS = """
import torch
import multiworld as mw
before = set(sys.modules)
(world,) = mw.join_all().values()
tell("joined", generation=world.generation, threads=torch.get_num_threads(),
     late=sorted(name for name in set(sys.modules) - before if name.startswith("multiworld")))
told = 0
while True:
    try:
        over = _rank == 0 and _os.path.exists(_os.environ["M8D_RUNKIT_TOLD"] + ".go")
        t = torch.tensor([world.rank + 1.0, float(over)])
        world.all_reduce(t)
        if world.generation != told:
            told = world.generation
            tell("sum", sum=t[0].item(), generation=told)
        if t[1].item():
            break
        time.sleep(0.01)
    except mw.BrokenWorldException:
        world.wait_active(timeout=60)
world.close()
"""
PAIR = '[roles]\nworker = 2\n[worlds.pair]\nmembers = ["worker:0", "worker:1"]\ntimeout = 60\n'


@pytest.mark.parametrize("secure", [(), ("--secure",)], ids=["plain", "secure"])
def test_worlds_heal_with_forked_workers(tmp_path, secure):
    worlds = tmp_path / "worlds.toml"
    worlds.write_text(PAIR)
    options = ["--worlds", str(worlds), "--max-restarts", "9", "--preload", "torch,multiworld", *secure]
    with runkit.launched(tmp_path, WORLDS, options=options) as run:
        run.wait_told("sum", 2)
        os.kill(run.told("joined", rank=1)[-1].pid, signal.SIGKILL)
        run.wait_told("sum", 2, generation=2)
        run.say()
        assert run.ended() == 0
        assert run.leftovers() == []
    assert {each.sum for each in run.told("sum")} == {3.0}
    assert {each.threads for each in run.told("joined")} == {1}, "as OMP_NUM_THREADS says"
    if not secure:
        late = {name for each in run.told("joined") for name in each.late}
        assert not late, "--preload multiworld: a join loads nothing (add these to multiworld/preloaded.py)"
    assert "Traceback" not in run.text()
