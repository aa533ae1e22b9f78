"""The page's data, from real processes: ``m8d-run --web``, ``m8d-run web``, and `multiworld.serve_page`."""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
from kits.contract.launcherskit import nodes
from kits.contract.runkit import PATIENCE, ROOT, launched, script

for package in ("starlette", "uvicorn"):
    pytest.importorskip(package, reason=f"the page needs {package}")

pytestmark = pytest.mark.everyday

log = logging.getLogger("measured")

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
# Worlds heal by themselves; worker 2 waits in a collective that the hub never calls.
SCRIPT = """
import torch, multiworld as mw
print("hello from", _rank, flush=True)
worlds = mw.join_all()
tell("joined", pid=_os.getpid())
if _os.environ["ROLE_NAME"] == "hub":
    hold()
else:
    for world in worlds.values():
        if _rank == 2:
            world.all_reduce(torch.ones(4))
    hold()
"""


def processor(pid: int) -> float:
    """Seconds of processor time that a process has taken."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Link:
    """Requests to a page."""

    def __init__(self, link: str) -> None:
        parts = urlsplit(link)
        self.host, self.port = parts.hostname, parts.port
        self.headers = {"Authorization": f"Bearer {parse_qs(parts.query)['token'][0]}"}

    def get(self, path: str) -> tuple[int, bytes]:
        link = http.client.HTTPConnection(self.host, self.port, timeout=PATIENCE)
        try:
            link.request("GET", path, headers=self.headers)
            answer = link.getresponse()
            return answer.status, answer.read()
        finally:
            link.close()

    def view(self) -> dict:
        status, body = self.get("/api/v1/view")
        assert status == 200, body
        return json.loads(body)

    def until(self, holds, what: str) -> dict:
        """Look again and again until `holds(view)`."""
        deadline = time.monotonic() + PATIENCE
        while not holds(found := self.view()):
            assert time.monotonic() < deadline, (what, found)
            time.sleep(0.05)
        return found


def only(rows: list[dict]) -> dict:
    """The one row that there is."""
    assert len(rows) == 1, rows
    return rows[0]


def states(view: dict) -> dict[str, str]:
    return {each["name"]: each["state"] for each in view["worlds"]}


def world(view: dict, name: str) -> dict:
    return next(each for each in view["worlds"] if each["name"] == name)


def pending(view: dict, name: str) -> list:
    return world(view, name)["pending"] if view["worlds"] else []


def in_no_operation(view: dict, name: str) -> list:
    """Ranks that are in none, as they said themselves: one that did not answer in time may be in any."""
    return [
        rank
        for each in pending(view, name)
        for rank, said in each["missing"].items()
        if "in no operation of this world" in said
    ]


@pytest.fixture
def runtime():
    """Variables for launchers whose sockets are their own, in a folder with a short name."""
    folder = tempfile.mkdtemp(prefix="m8dw")
    yield {"XDG_RUNTIME_DIR": folder, "PYTHONPATH": str(ROOT)}
    shutil.rmtree(folder)


@pytest.fixture
def run(tmp_path, runtime):
    (tmp_path / "worlds.toml").write_text(FILE)
    options = ["--worlds", str(tmp_path / "worlds.toml"), "--max-restarts", "3"]
    options += ["--web", "--log-dir", str(tmp_path / "logs"), "--redirects", "3"]
    with launched(tmp_path, SCRIPT, options=options, env=runtime) as run:
        run.wait_told("joined", 3)
        yield run


@pytest.mark.timeout(300)
def test_a_page_that_is_killed_is_served_anew(run):
    """Kubernetes' probes ask it: without it they would end the launcher."""
    run.wait_line("page: http")
    (victim,) = [pid for pid in run.alive() if b"\0web\0" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    os.kill(victim, signal.SIGKILL)
    run.wait_line("the page has ended: exit code -9. It is served anew")
    line = run.wait_line("page: http", count=2)[-1]
    page = Link(re.search(r"http://[^\s\"]+", line)[0])
    page.until(lambda view: set(states(view).values()) == {"active"}, "the worlds")
    assert page.get("/live")[0] == 200
    assert len(run.told("joined")) == 3, "no worker was started again"


@pytest.mark.timeout(300)
def test_a_launcher_that_waits_for_the_rendezvous_answers_probes(tmp_path, runtime):
    """Kubernetes ends a pod whose page does not answer, and pod 0, which serves the rendezvous, may be late."""
    with socket.socket() as unserved:
        unserved.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{unserved.getsockname()[1]}"
        options = ["--web", "--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint]
        options += ["--rdzv-id", "late", "--rdzv-conf", "is_host=false,read_timeout=600"]
        with launched(tmp_path, "tell('up')", options=options, env=runtime) as run:
            (line,) = run.wait_line("page: http")
            page = Link(re.search(r"http://[^\s\"]+", line)[0])
            assert page.get("/live")[0] == 200
            status, text = page.get("/ready")
            assert (status, text.strip()) == (503, b"it waits for the other nodes")
            asked = subprocess.run(
                [sys.executable, "-m", "multiworld.run", "status", "--run-id", "late"],
                env={**os.environ, **runtime}, capture_output=True, text=True, timeout=PATIENCE, check=False,
            )  # fmt: skip
            assert asked.returncode == 0, asked
            assert "late" in asked.stdout
            run.signal(signal.SIGTERM)
            assert run.ended() == -signal.SIGTERM
            assert run.leftovers() == []


@pytest.mark.timeout(300)
def test_a_run_is_shown_a_kill_is_told_and_its_healing_too(run, runtime):
    (line,) = run.wait_line("page: http")
    page = Link(re.search(r"http://[^\s\"]+", line)[0])
    view = page.until(lambda view: "0" in in_no_operation(view, "w1"), "what waits")
    assert states(view) == {"w0": "active", "w1": "active"}
    assert [each["rank"] for each in world(view, "w0")["members"]] == [0, 1]
    (waits,) = world(view, "w1")["pending"]
    assert (waits["kind"], waits["number"], waits["waiting"], waits["idle"]) == ("all_reduce", 1, [1], False)
    assert json.loads(page.get("/api/v1/worlds/w1/pending")[1])["pending"][0]["kind"] == "all_reduce"

    worker = next(each for each in view["processes"] if each["rank"] == 1)
    assert worker["logs"] == ["stderr", "stdout"]
    status, text = page.get(f"/api/v1/processes/{worker['id'].replace('/', '%2F')}/log?stream=stdout")
    assert (status, text) == (200, b"hello from 1\n")

    asked = subprocess.run(
        [sys.executable, "-m", "multiworld.run", "status"], env={**os.environ, **runtime}, capture_output=True,
        text=True, timeout=PATIENCE, check=False,
    )  # fmt: skip
    assert re.search(
        r"^w1: all_reduce #1: rank 1 waits since [\d.]+ s; rank 0 ", asked.stdout, re.MULTILINE
    ), asked

    killed = time.time()
    os.kill(worker["pid"], signal.SIGKILL)
    view = page.until(lambda view: view["faults"], "the fault")
    fault = only(view["faults"])
    assert (fault["world"], fault["cause"], fault["ranks"], fault["generation"]) == ("w0", "crashed", [1], 1)
    assert killed <= fault["at"] < killed + 60
    assert states(view)["w1"] == "active"
    assert page.get("/ready?world=w1")[0] == 200
    run.wait_told("joined", rank=1, attempt=1)
    view = page.until(lambda view: view["faults"][0]["healed"], "the healing")
    fault = only(view["faults"])
    log.info(
        "cause and ranks known %.0f ms after the kill, healed after %.0f",
        1e3 * (fault["at"] - killed),
        fault["ms"],
    )
    whole = world(view, "w0")
    assert (whole["state"], whole["generation"]) == ("active", 2)
    assert [(each["rank"], each["state"]) for each in whole["members"]] == [(0, "active"), (1, "active")]
    assert (view["totals"]["failures"], view["totals"]["broken"]) == (1, {"crashed": 1})
    assert page.get("/ready")[0] == 200
    assert page.get("/ready?world=none")[0] == 503
    numbers = page.get("/metrics")[1].decode()
    assert 'multiworld_run_worlds_broken_total{cause="crashed"} 1.0' in numbers
    assert 'multiworld_run_world_active{world="w1"} 1.0' in numbers
    assert json.loads(page.get("/openapi.json")[1])["openapi"].startswith("3.1")


@pytest.mark.timeout(300)
def test_the_page_ends_with_its_launcher_however_that_ends(run):
    (line,) = run.wait_line("page: http")
    page = Link(re.search(r"http://[^\s\"]+", line)[0])
    page.view()
    run.signal(signal.SIGKILL)
    run.process.wait(PATIENCE)
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        try:
            page.view()
        except OSError:
            break
        time.sleep(0.05)
    assert run.leftovers() == []


@pytest.mark.timeout(300)
def test_a_page_of_a_run_that_was_started_without(run, runtime):
    env = {**os.environ, **runtime, "M8D_WEB_TOKEN": "known"}
    (started,) = run.wait_line("event=run-started")
    name = re.search(r" run=(\S+)", started)[1]  # launchers of other tests may run beside it
    with subprocess.Popen(
        [sys.executable, "-m", "multiworld.run", "web", name], env=env, stdout=subprocess.PIPE, text=True
    ) as served:
        try:
            page = Link(served.stdout.readline().split()[1])
            assert page.headers == {"Authorization": "Bearer known"}
            assert states(page.view()) == {"w0": "active", "w1": "active"}
            status = Path(f"/proc/{served.pid}/status").read_text()
            resident = int(re.search(r"VmRSS:\s+(\d+)", status)[1]) / 1024
            assert resident < 80, "MB of the page's process (issue 17)"
            assert "libtorch" not in Path(f"/proc/{served.pid}/maps").read_text()
            before, began = processor(served.pid), time.monotonic()
            time.sleep(10)
            share = (processor(served.pid) - before) / (time.monotonic() - began)
            log.info("the page's process: %.0f MB, %.2f %% of a core without a viewer", resident, 100 * share)
            assert share < 0.01, "of a core while nothing asks the page (issue 17)"
        finally:
            served.send_signal(signal.SIGINT)
        assert served.wait(PATIENCE) == 0


def serving(me):
    """Rank 0: serves the page of its world, which it joins again when it breaks."""
    import torch

    import multiworld as mw

    page = mw.serve_page()
    me.emit("page", link=page.link)
    world = mw.join("w", 0, 2, store=me.store, hang_timeout=30)
    me.emit("joined")
    with contextlib.suppress(mw.BrokenWorldException):
        world.recv(torch.ones(1), src=1)
    me.emit("broken")
    me.hear()
    world.rejoin(timeout=PATIENCE)
    me.emit("rejoined")
    me.hear()
    page.close()


def joining(me):
    import multiworld as mw

    mw.join("w", 1, 2, store=me.store, hang_timeout=30)
    me.emit("joined")
    me.hear()


@pytest.mark.timeout(300)
def test_a_process_serves_its_own_page(cast):
    zero, one = cast.start(serving, 0), cast.start(joining, 1)
    page = Link(zero.expect("page").link)
    zero.expect("joined")
    # A member that did not answer in time may have something to do.
    view = page.until(lambda view: any(each["idle"] for each in pending(view, "w")), "what waits")
    assert view["kind"] == "process"
    assert [each["pid"] for each in view["processes"]] == [zero.process.pid]
    (waits,) = world(view, "w")["pending"]
    assert (waits["kind"], waits["peer"], waits["idle"]) == ("recv", 1, True)
    one.kill()
    zero.expect("broken")
    view = page.until(lambda view: view["faults"], "the fault")
    told = [(each["state"], each["cause"]) for each in world(view, "w")["members"]]
    assert told == [("broken", ""), ("lost", "crashed")]
    assert page.get("/ready")[0] == 503
    zero.say("rejoin")
    again = cast.start(joining, 1)
    zero.expect("rejoined")
    view = page.until(lambda view: states(view) == {"w": "active"}, "the healing")
    view = page.until(lambda view: len(view["faults"][0]["steps"]) == 4, "the blocked receive, told late")
    assert [each["what"] for each in view["faults"][0]["steps"]] == ["seen", "unblocked", "joining", "active"]
    log.info("the blocked receive raised %.1f ms after the verdict", view["faults"][0]["steps"][1]["ms"])
    assert view["faults"][0]["healed"]
    assert page.get("/ready")[0] == page.get("/live")[0] == 200
    again.say("over")
    zero.say("over")
    assert zero.finish() == 0


@pytest.mark.timeout(300)
def test_each_node_shows_the_whole_run_and_one_that_is_lost(tmp_path, runtime):
    (tmp_path / "worlds.toml").write_text(FILE)
    path = script(tmp_path, "import multiworld as mw\nmw.join_all()\nhold()\n")
    options = ["--worlds", str(tmp_path / "worlds.toml"), "--web", "--node-hang-timeout", "30"]
    with nodes(tmp_path, 2, str(path), options=options) as runs:
        pages = [Link(re.search(r"http://[^\s\"]+", run.wait_line("page: http")[0])[0]) for run in runs]

        def everyone(view):
            sizes = [len(each["members"]) for each in view["worlds"]]
            return (
                len(view["processes"]) == 3 and sizes == [2, 2] and set(states(view).values()) == {"active"}
            )

        views = [page.until(everyone, "the whole run") for page in pages]
        assert [each["run"]["nodes"] for each in views] == [2, 2]
        for view in views:
            assert sorted(each["rank"] for each in view["processes"]) == [0, 1, 2]
            for name, worker in (("w0", 1), ("w1", 2)):
                told = [
                    (each["rank"], each["worker"], each["state"]) for each in world(view, name)["members"]
                ]
                assert told == [(0, 0, "active"), (1, worker, "active")]
        assert {each["id"] for each in views[0]["processes"]} == {
            each["id"] for each in views[1]["processes"]
        }
        # The host of the rendezvous goes; the other one's page goes on.
        runs[0].signal(signal.SIGKILL)
        pages[1].until(lambda view: [each["state"] for each in view["run"]["peers"]] == ["lost"], "the loss")
        view = pages[1].until(lambda view: len(view["processes"]) < 3, "who remains")
        assert any("is lost" in each["text"] for each in view["events"])
