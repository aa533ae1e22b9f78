"""What deploy/Containerfile promises: m8d-run as an ordinary user on a root that cannot be written, and what filters take."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from pathlib import Path

import containerkit
import pytest
from containerkit import PATIENCE, Container, Security, bind, default_profile, refusing
from kits.contract.runkit import ROOT

pytestmark = [pytest.mark.everyday, pytest.mark.timeout(300)]

FILE = """
[roles]
hub = 1
worker = 2

[worlds."w{i}"]
for = "worker"
members = ["hub:0", "worker:{i}"]
timeout = 60
hang_timeout = 30
"""
# Messages of 1 MiB go to and fro in each world, on threads of the hub.
PROGRAM = """
import json, os, socket, struct, threading, time
import torch, multiworld as mw

def tell(**said):
    os.write(1, (json.dumps({"rank": int(os.environ["RANK"]), **said}) + "\\n").encode())

def refused(call):
    try:
        call()
    except OSError as error:
        return type(error).__name__
    return ""

def filtered():
    with socket.socket() as listener:
        rule = struct.pack("HBBI", 6, 0, 0, 0xFFFFFFFF)
        import ctypes
        code = ctypes.create_string_buffer(rule)
        listener.setsockopt(socket.SOL_SOCKET, 26, struct.pack("HxxxxxxP", 1, ctypes.addressof(code)))

def work(world):
    ball, known = torch.zeros(1 << 18), 0
    while True:
        try:
            if world.generation != known:
                known = world.generation
                lane = world._gen.lane
                tell(active=world.name, generation=known, reads=sorted(lane.endpoint._reading._readers))
            if world.rank == 0:
                world.send(ball + 1, 1)
                world.recv(ball, 1)
            else:
                world.recv(ball, 0)
                world.send(ball, 0)
            time.sleep(0.01)
        except mw.BrokenWorldException as broken:
            tell(broken=world.name, cause=str(broken.cause))
            world.wait_active(timeout=100)

torch.set_num_threads(1)
worlds = mw.join_all()
status = dict(line.split(":\\t") for line in open("/proc/self/status").read().splitlines() if ":\\t" in line)
tell(uid=os.getuid(), rights=int(status["CapBnd"], 16) | int(status["CapEff"], 16), seccomp=int(status["Seccomp"]),
     root=refused(lambda: open("/written", "w")), scratch=refused(lambda: open("/tmp/written", "w")),
     filter=refused(filtered), pidfd=refused(lambda: os.close(os.pidfd_open(os.getpid()))))
threads = [threading.Thread(target=work, args=(world,)) for world in worlds.values()]
[each.start() for each in threads]
[each.join() for each in threads]
"""
TABLES = ("unshare", "close_range")
MEMORY = ("process_vm_readv",)
HANDLES = ("pidfd_open", "pidfd_send_signal")


@pytest.fixture
def launched(tmp_path, need):
    """Starts the program in a container, under tini as in the image."""
    containerkit.check(need)
    tini = need("tini", "apt-get install tini")
    (tmp_path / "app").mkdir(mode=0o755)
    made = []

    def start(security, program=PROGRAM, *options, first=(tini, "--"), **more):
        (tmp_path / "app" / "program.py").write_text(program)
        (tmp_path / "app" / "worlds.toml").write_text(FILE)
        line = [*first, sys.executable, "-m", "multiworld.run", *options, "/app/program.py"]
        mounts = [bind(tmp_path / "app", "/app")]
        made.append(
            Container(
                tmp_path, line, {"PET_VERBOSE": "1"}, name="box", security=security, mounts=mounts, **more
            )
        )
        return made[-1]

    yield start
    for each in made:
        each.close()


def told(container, **match):
    lines = [json.loads(line) for line in container.lines("out") if line.startswith("{")]
    return [each for each in lines if all(each.get(key) == value for key, value in match.items())]


def wait_told(container, count=1, **match):
    container.wait_for(lambda: len(told(container, **match)) >= count, f"{count} x {match}")
    return told(container, **match)


def threads_with_tables(pid):
    """Threads of a process that have a table of descriptors of their own."""
    own, tasks = len(entries(f"/proc/{pid}/fd")), Path(f"/proc/{pid}/task")
    return sum(len(entries(task / "fd")) < own / 2 for task in tasks.iterdir())


def entries(folder):
    return list(Path(folder).iterdir())


CASES = {
    "a runtime's filter": ("default", ()),
    "no memory of others": (refusing(*MEMORY), MEMORY),
    "none of them": (refusing(*MEMORY, *TABLES, *HANDLES), (*MEMORY, *TABLES, *HANDLES)),
}


@pytest.mark.parametrize("case", CASES)
def test_worlds_join_break_and_heal_in_a_container_without_rights(launched, case):
    seccomp, taken = CASES[case]
    box = launched(
        Security(seccomp=default_profile("unshare") if seccomp == "default" else seccomp),
        PROGRAM, "--worlds", "/app/worlds.toml", "--max-restarts", "3",
    )  # fmt: skip
    facts = [wait_told(box, rank=rank, uid=containerkit.USER)[0] for rank in range(3)]
    for each in facts:
        assert (each["rights"], each["root"], each["scratch"]) == (0, "OSError", "")
        assert each["filter"] in {"", "PermissionError"}, "some kernels have it for CAP_NET_ADMIN alone"
        assert bool(each["pidfd"]) == (HANDLES[0] in taken)
        assert each["seccomp"] == (2 if seccomp else 0)
    for name in ("w0", "w1"):
        reads = wait_told(box, 2, active=name, generation=1)
        assert all(bool(each["reads"]) == (MEMORY[0] not in taken) for each in reads), reads
    pids = box.inside("/app/program.py")
    workers = [pid for pid in pids if b"RANK=" in Path(f"/proc/{pid}/environ").read_bytes()]
    (victim,) = [pid for pid in workers if b"\0RANK=1\0" in Path(f"/proc/{pid}/environ").read_bytes()]
    assert len(workers) == 3
    assert [threads_with_tables(pid) > 0 for pid in workers] == [TABLES[0] not in taken] * 3
    os.kill(victim, signal.SIGKILL)
    assert wait_told(box, broken="w0")[0]["cause"] == "crashed"
    wait_told(box, 2, active="w0", generation=2)
    assert told(box, broken="w1") == []
    box.tell(signal.SIGTERM)
    assert box.ended() == 128 + signal.SIGTERM


def test_a_filter_at_gloos_ports_is_to_be_had_with_a_capability(launched):
    box = launched(
        Security(user=0, capabilities=["CAP_NET_ADMIN"]), PROGRAM, "--worlds", "/app/worlds.toml",
    )  # fmt: skip
    assert [wait_told(box, rank=rank, uid=0)[0]["filter"] for rank in range(3)] == [""] * 3


ORPHANS = """
import os, time
if os.fork() == 0:
    if os.fork() == 0:  # whose parent ends first: it is process 1's
        os._exit(0)
    time.sleep(0.2)
    os._exit(0)
os.wait()
time.sleep(0.5)
states = []
for name in os.listdir("/proc"):
    if name.isdigit():
        states.append(open(f"/proc/{name}/stat").read().rpartition(")")[2].split()[0])
print("zombies", states.count("Z"), flush=True)
"""


@pytest.mark.parametrize("init", ["tini", "m8d-run"])
def test_tini_reaps_what_workers_leave_to_process_1(launched, init):
    more = {} if init == "tini" else {"first": ()}
    box = launched(Security(), ORPHANS, **more)
    assert box.ended(PATIENCE) == 0
    assert box.text("out") == ("zombies 0" if init == "tini" else "zombies 1")


def test_the_image_has_what_these_tests_are_about():
    text = (ROOT / "deploy" / "Containerfile").read_text()
    assert re.search(rf"^USER {containerkit.USER}:{containerkit.USER}$", text, re.MULTILINE)
    assert 'ENTRYPOINT ["tini", "--", "m8d-run"]' in text
    assert "STOPSIGNAL SIGTERM" in text
    copied = {
        name for line in re.findall(r"^COPY (?!--)(.+) \S+$", text, re.MULTILINE) for name in line.split()
    }
    assert all((ROOT / name).exists() for name in copied)
    assert copied >= {"pyproject.toml", "multiworld", "patches", "m8d.py"}


def test_the_image_can_hold_the_rendezvous_of_the_manifests():
    """torch's etcd-v2 imports the module `etcd`, of python-etcd; the extra `etcd` is for stores, and brings urllib3."""
    text = (ROOT / "deploy" / "Containerfile").read_text()
    manifests = (ROOT / "deploy" / "kubernetes").glob("*.yaml")
    assert any("--rdzv-backend=etcd-v2" in each.read_text() for each in manifests)
    assert "python-etcd" in re.search(r"^ARG MORE=(.*)$", text, re.MULTILINE)[1].split()
