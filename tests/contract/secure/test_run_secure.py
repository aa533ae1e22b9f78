"""``m8d-run --secure``: every connection of a run over TLS, with certificates that go with the run."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from kits.contract.nodekit import free_port
from kits.contract.runkit import PATIENCE, ROOT, launched
from kits.tlskit import Files, authority

from multiworld._net.stores.tcp_client import TcpClient
from multiworld.run.secure import authority_folder

pytestmark = [pytest.mark.timeout(300)]

WORLDS = """
[roles]
hub = 1
worker = {workers}

[worlds."w{{i}}"]
for = "worker"
members = ["hub:0", "worker:{{i}}"]
timeout = 60
hang_timeout = 30
"""

JOINS = """
import hashlib, os
import torch, multiworld as mw
from multiworld._net.tls.credentials import current

def certificate():
    with open(os.environ["M8D_TLS_CERT"], "rb") as file:
        return hashlib.sha256(file.read()).hexdigest()

worlds = mw.join_all()
mine = current()
tell("joined", worlds={name: w.generation for name, w in worlds.items()}, certificate=certificate(),
     subject=mine.identity.subject, job=mine.identity.job, until=mine.until, folder=os.path.dirname(os.environ["M8D_TLS_CERT"]))
until, news = mine.until, torch.zeros(1)
hub = os.environ["ROLE_NAME"] == "hub"
stop = os.environ["M8D_RUNKIT_TOLD"] + ".go"
while not news.item():
    last = hub and os.path.exists(stop)
    for name, w in worlds.items():
        try:
            w.broadcast(news.fill_(float(last)) if hub else news, src=0)
        except mw.BrokenWorldException:
            if not hub:
                raise
            w.wait_active(60)
            news.zero_()
            last = False
            break
    if current().until != until:
        until = current().until
        tell("renewed", until=until, certificate=certificate())
    time.sleep(0.02)
tell("over")
hold("bye")
"""


@pytest.fixture
def home():
    """Short, for a socket's path; only this test's launchers are in it."""
    with tempfile.TemporaryDirectory(prefix="m8d-") as folder:
        yield Path(folder)


@pytest.fixture
def shared(tmp_path):
    folder = tmp_path / "authority"
    authority_folder.make(folder, days=1)
    return folder


def environment(home, **more):
    return {"XDG_RUNTIME_DIR": str(home), **more}


def worlds_file(folder, workers=1):
    path = folder / "worlds.toml"
    path.write_text(WORLDS.format(workers=workers))
    return str(path)


def secrets_in(home):
    found = []
    for path in home.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # removed meanwhile
            if path.is_file() and b"PRIVATE KEY" in path.read_bytes():
                found.append(path)
    return found


def ask(home, *words):
    return subprocess.run(
        [sys.executable, "-m", "multiworld.run", *words], capture_output=True, text=True, timeout=PATIENCE,
        env={**os.environ, "PYTHONPATH": str(ROOT), "XDG_RUNTIME_DIR": str(home)}, check=False,
    )  # fmt: skip


def listeners(pid):
    """Addresses at which a process listens for TCP."""
    sockets = set()
    for each in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            sockets |= set(re.findall(r"socket:\[(\d+)\]", str(each.readlink())))
    found = []
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, _, state, *rest = line.split()
        if state == "0A" and rest[5] in sockets:
            host, port = local.split(":")
            found.append((socket.inet_ntoa(bytes.fromhex(host)[::-1]), int(port, 16)))
    return found


def say_bye(run, count):
    run.say()
    run.wait_told("over", count)
    run.say("bye")
    assert run.ended() == 0, run.report()


def test_a_killed_worker_is_back_with_another_certificate_and_no_key_is_left(tmp_path, home):
    options = ["--secure", "--worlds", worlds_file(tmp_path, 2), "--max-restarts", "2"]
    with launched(tmp_path, JOINS, options=options, env=environment(home)) as run:
        (started,) = run.wait_line("event=run-started")
        named = re.search(r" run=(\S+)", started)[1]  # launchers of other tests may run beside it
        first = {each.rank: each for each in run.wait_told("joined", 3)}
        assert [first[rank].subject for rank in range(3)] == [
            "rank 0 hub:0", "rank 1 worker:0", "rank 2 worker:1",
        ]  # fmt: skip
        assert {each.job for each in first.values()} != {""}
        assert len({each.certificate for each in first.values()}) == 3
        folder = Path(first[0].folder)
        assert home in folder.parents
        assert folder.stat().st_mode & 0o777 == 0o700
        assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}
        assert len(secrets_in(home)) == 4  # the launcher has one; the authority's is not on the disk
        os.kill(first[1].pid, signal.SIGKILL)
        (back,) = run.wait_told("joined", rank=1, attempt=1)
        assert back.worlds == {"w0": 2}
        assert back.certificate not in {each.certificate for each in first.values()}
        (seen,) = json.loads(ask(home, "status", "--json", "--run-id", named).stdout)
        assert seen["secure"] is True
        assert " secure " in ask(home, "status", "--run-id", named).stdout.splitlines()[0]
        say_bye(run, 3)
        assert re.search(r"certificate .m8d-run on .* valid until 2\d\d\d-", run.text("err"))
        assert run.leftovers() == []
    assert [path for path in home.rglob("*") if path.name != "m8d-run"] == []


def test_all_that_listens_is_tls(tmp_path, home):
    options = ["--secure", "--worlds", worlds_file(tmp_path)]
    with launched(tmp_path, JOINS, options=options, env=environment(home)) as run:
        workers = {each.pid for each in run.wait_told("joined", 2)}
        found = {pid: listeners(pid) for pid in run.alive()}
        assert {pid for pid, each in found.items() if each} == {run.pid, *workers}
        stranger = Files(tmp_path / "stranger", authority("other")).credentials
        for address in (address for each in found.values() for address in each):
            assert address[0] == "127.0.0.1", found
            with pytest.raises(OSError, match=r".+"):
                TcpClient.connect_as(None, socket.AF_INET, address, deadline=time.monotonic() + 10)
            with pytest.raises(OSError, match=r".+"):
                TcpClient.connect_as(stranger, socket.AF_INET, address, deadline=time.monotonic() + 30)
            # It speaks TLS, and refuses who shows no certificate.
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            with socket.create_connection(address, 30) as plain, context.wrap_socket(plain) as tls:
                assert tls.version() == "TLSv1.3"
                with pytest.raises(OSError, match=r".+"):
                    assert tls.recv(1)
                    pytest.fail("a stranger is told something")
        say_bye(run, 2)


def test_certificates_are_renewed_while_worlds_work(tmp_path, home):
    days = 20 / 86400
    options = [
        "--secure", "--certificate-days", str(days), "--worlds", worlds_file(tmp_path), "--max-restarts", "2",
    ]  # fmt: skip
    with launched(tmp_path, JOINS, options=options, env=environment(home)) as run:
        first = {each.rank: each for each in run.wait_told("joined", 2)}
        # Two renewals: those that the members joined with have ended.
        for rank in (0, 1):
            renewed = run.wait_told("renewed", 2, rank=rank)
            assert renewed[-1].until > first[rank].until + 5
        run.wait_for(
            lambda: time.time() > max(each.until for each in first.values()), "their certificates end"
        )
        assert run.told("joined", attempt=1) == []  # nothing broke
        os.kill(first[1].pid, signal.SIGKILL)
        (back,) = run.wait_told("joined", rank=1, attempt=1)
        assert back.worlds == {"w0": 2}
        say_bye(run, 2)


def test_keys_go_when_the_launcher_is_killed(tmp_path, home):
    options = ["--secure", "--worlds", worlds_file(tmp_path), "--grace", "5"]
    with launched(tmp_path, JOINS, options=options, env=environment(home)) as run:
        run.wait_told("joined", 2)
        assert secrets_in(home)
        os.kill(run.pid, signal.SIGKILL)
        assert run.leftovers() == []
        run.wait_for(lambda: not secrets_in(home), "the orphan reaper removes the keys")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_keys_go_when_the_launcher_ends_before_it_has_workers(tmp_path, home, shared, number):
    """It waits for the store of the rendezvous, which no node serves."""
    options = [
        "--authority", str(shared), "--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-conf", "is_host=0",
        "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--rdzv-id", "job",
    ]  # fmt: skip
    with launched(tmp_path, "tell('up')", options=options, env=environment(home)) as run:
        run.wait_line("secure: all connections")
        run.wait_for(lambda: any(_is_reaper_of(each, run.pid) for each in _processes()), "the orphan reaper")
        assert secrets_in(home)
        os.kill(run.pid, number)
        run.wait_for(lambda: not secrets_in(home), "the orphan reaper removes the keys")


def test_keys_go_with_the_next_launcher_when_the_reaper_is_killed_too(tmp_path, home):
    with launched(tmp_path, "tell('up'); hold()", options=["--secure"], env=environment(home)) as run:
        run.wait_told("up")
        reapers = [int(pid.name) for pid in _processes() if _is_reaper_of(pid, run.pid)]
        assert all(b"m8d-run" not in Path(f"/proc/{pid}/cmdline").read_bytes() for pid in reapers), "pkill -f"
        for pid in (*reapers, run.pid):
            os.kill(pid, signal.SIGKILL)
        assert len(reapers) == 1
        run.ended()
        assert secrets_in(home)
    with launched(tmp_path, "tell('up')", options=["--standalone"], env=environment(home)) as run:
        assert run.ended() == 0
    assert secrets_in(home) == []


def _processes():
    return [each for each in Path("/proc").iterdir() if each.name.isdigit()]


def _is_reaper_of(pid, launcher):
    with contextlib.suppress(OSError):
        parent = (pid / "stat").read_text().rpartition(")")[2].split()[1]
        return int(parent) == launcher and b"orphan_reaper.py" in (pid / "cmdline").read_bytes()
    return False


def test_another_launcher_leaves_the_keys_of_a_running_one_alone(tmp_path, home):
    with launched(tmp_path, "tell('up'); hold()", options=["--secure"], env=environment(home)) as run:
        run.wait_told("up")
        kept = secrets_in(home)
        for socket_ in home.rglob("control.sock"):
            socket_.unlink()  # as if it were gone
        for folder in home.glob("m8d-run/*"):
            os.utime(folder, (0, 0))
        other = tmp_path / "other"
        other.mkdir()
        with launched(other, "tell('up')", options=["--secure"], env=environment(home)) as second:
            assert second.ended() == 0
        assert secrets_in(home) == kept
        run.say()
        assert run.ended() == 0


GROUP = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
tell("reduced", tls=_os.environ["M8D_TLS_CERT"])
if _rank == 1 and _attempt == 0:
    hold("fail")
    sys.exit(3)
hold()
dist.destroy_process_group()
"""


def test_a_group_of_torchs_own_meets_without_a_store_of_the_launchers(tmp_path, home):
    options = ["--secure", "--restart", "group", "--max-restarts", "1", "--nproc-per-node", "2"]
    with launched(tmp_path, GROUP, options=options, env=environment(home)) as run:
        run.wait_told("reduced", 2, attempt=0)
        assert listeners(run.pid) == []
        before = {path.name: path.read_bytes() for path in secrets_in(home)}
        run.say("fail")
        run.wait_told("reduced", 2, attempt=1)
        after = {path.name: path.read_bytes() for path in secrets_in(home)}
        assert {name for name, key in before.items() if after[name] != key} == {"rank-0.pem", "rank-1.pem"}
        run.say()
        assert run.ended() == 0
    assert secrets_in(home) == []


# -- several nodes ----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def node(tmp_path, home, number, *options, **env):
    folder = tmp_path / f"node{number}"
    folder.mkdir()
    own = home / str(number)
    own.mkdir()
    with launched(
        folder, JOINS, options=["--local-addr", "127.0.0.1", *options], env=environment(own, **env)
    ) as run:
        yield run


@pytest.mark.parametrize("backend", ["c10d", "static"])
def test_two_nodes_share_an_authority_and_strangers_stay_out(tmp_path, home, shared, backend):
    port = free_port()
    common = [
        "--worlds", worlds_file(tmp_path), "--max-restarts", "1", "--rdzv-backend", backend, "--rdzv-id", "job",
        "--rdzv-endpoint", f"127.0.0.1:{port}", "--nproc-per-node", "1",
    ]  # fmt: skip
    mine = [*common, "--nnodes", "2", "--authority", str(shared)]
    with (
        node(tmp_path, home, 0, *mine, "--node-rank", "0") as first,
        node(tmp_path, home, 1, *mine, "--node-rank", "1") as second,
    ):
        runs = {told.rank: run for run in (first, second) for told in run.wait_told("joined")}
        told = {rank: run.told("joined")[0] for rank, run in runs.items()}
        assert {each.job for each in told.values()} == {"job"}
        strange = tmp_path / "strange"
        authority_folder.make(strange, days=1)
        others = [*common, "--nnodes", "2:3", "--node-rank", "1", "--rdzv-conf", "read_timeout=20,timeout=20"]
        with node(tmp_path, home, 2, *others, "--authority", str(strange)) as stranger:
            assert stranger.ended() == 1
            assert "cannot be reached over TLS" in stranger.text("err")
            assert stranger.told() == []
        wrong_job = [*others, "--authority", str(shared), "--rdzv-id", "job2"]
        with node(tmp_path, home, 3, *wrong_job) as stranger:
            assert stranger.ended() == 1
            assert "cannot be reached over TLS" in stranger.text("err")
            assert stranger.told() == []
        with pytest.raises(OSError, match=r".+"):
            TcpClient.connect_as(None, socket.AF_INET, ("127.0.0.1", port), deadline=time.monotonic() + 10)
        os.kill(told[1].pid, signal.SIGKILL)
        (back,) = runs[1].wait_told("joined", attempt=1)
        assert back.worlds == {"w0": 2}
        for run in (first, second):
            run.say()
        for run in (first, second):
            run.wait_told("over")
        for run in (first, second):
            run.say("bye")
        assert [first.ended(), second.ended()] == [0, 0]
    assert secrets_in(home) == []


def test_a_lost_node_is_replaced_in_a_secure_run(tmp_path, home, shared):
    common = [
        "--worlds", worlds_file(tmp_path), "--rdzv-backend", "c10d", "--rdzv-id", "job", "--rdzv-endpoint",
        f"127.0.0.1:{free_port()}", "--nproc-per-node", "1", "--nnodes", "2:3", "--authority", str(shared),
        "--rdzv-conf", "last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=10,is_host=",
    ]  # fmt: skip
    hosts = [f"{common[-1]}{int(number == 0)}" for number in range(3)]
    with (
        node(tmp_path, home, 0, *common[:-1], hosts[0]) as first,
        node(tmp_path, home, 1, *common[:-1], hosts[1]) as second,
    ):
        first.wait_told("joined")
        second.wait_told("joined")
        with node(tmp_path, home, 2, *common[:-1], hosts[2]) as third:
            third.wait_line("event=seat seat=- ")
            (gone,) = second.told("joined")
            os.kill(second.pid, signal.SIGKILL)
            (new,) = third.wait_told("joined")
            assert new.rank == gone.rank
            for run in (first, third):
                run.say()
            for run in (first, third):
                run.wait_told("over")
            for run in (first, third):
                run.say("bye")
            assert [first.ended(), third.ended()] == [0, 0]


def test_files_of_the_users_serve_all_processes(tmp_path, home):
    files = Files(tmp_path / "tls", authority("theirs"))
    options = ["--secure", "--worlds", worlds_file(tmp_path)]
    with launched(tmp_path, JOINS, options=options, env=environment(home, **files.environment)) as run:
        told = run.wait_told("joined", 2)
        assert {each.subject for each in told} == {"member"}
        assert secrets_in(home) == []
        say_bye(run, 2)


def test_wrong_command_lines_say_the_next_step(tmp_path, home, shared):
    files = Files(tmp_path / "tls", authority())
    old = tmp_path / "old"
    authority_folder.make(old, days=1 / 86400)
    broken = tmp_path / "broken"
    shutil.copytree(shared, broken)
    (broken / authority_folder.KEY).write_bytes((old / authority_folder.KEY).read_bytes())
    deadline = time.monotonic() + PATIENCE
    while authority_folder.readable_by_others(old) or time.monotonic() < deadline - PATIENCE + 1.1:
        time.sleep(0.05)
    for options, more, says in (
        (["--secure", "--nnodes", "2"], {}, "make-authority DIR once"),
        (["--authority", str(shared)], files.environment, "with M8D_TLS_CERT set"),
        (["--authority", str(tmp_path / "none")], {}, "No such file"),
        (["--authority", str(old)], {}, "was valid until"),
        (["--authority", str(broken)], {}, "do not belong together"),
        (["--authority", str(shared), "--certificate-days", "0"], {}, "--certificate-days 0"),
        (
            ["--authority", str(shared), "--rdzv-backend", "etcd", "--rdzv-endpoint", "h:1"],
            {},
            "protocol=https",
        ),
    ):
        with launched(tmp_path, "tell('up')", options=options, env=environment(home, **more)) as run:
            assert run.ended() == 2, run.report()
            assert says in run.text("err").replace("\n", " "), run.report()
            assert run.told() == []
    made = ask(home, "make-authority", str(shared))
    assert (made.returncode, "is there already" in made.stderr) == (2, True)
