"""Rendezvous through a real etcd server: runs, and the server's own absence during one."""

from __future__ import annotations

import signal
import time

import pytest
from kits.contract.etcdkit import Etcd
from kits.contract.hubkit import Hub, kill_host

pytestmark = [pytest.mark.everyday, pytest.mark.timeout(900)]


@pytest.fixture
def etcd(tmp_path):
    folder = tmp_path / "etcd"
    folder.mkdir()
    with Etcd(folder) as made:
        yield made


def hub(folder, etcd, backend, *options, **more):
    conf = {
        "etcd-v2": "keep_alive_interval=1,keep_alive_max_attempt=5,last_call_timeout=7",
        "etcd": "last_call_timeout=3",
    }
    return Hub(
        folder,
        [
            "--rdzv-backend", backend, "--rdzv-endpoint", etcd.endpoint, "--rdzv-id", f"run-{backend}",
            "--rdzv-conf", conf[backend], "--local-addr", "127.0.0.1", *options,
        ],
        **more,
    )  # fmt: skip


@pytest.mark.parametrize(("backend", "way"), [("etcd-v2", "kill"), ("etcd", "stop")])
def test_etcd_stopped_and_started_during_a_run_disturbs_nobody(tmp_path, etcd, backend, way):
    with hub(tmp_path, etcd, backend, "--nnodes", "2:3") as made:
        for _ in range(2):
            made.start()
        before = made.running()
        getattr(etcd, way)()
        for run in made.runs:
            run.wait_line("rendezvous store lost")
        for world in ("w0", "w1", "w2"):
            made.ticks_on(world)
        etcd.start()
        for run in made.runs:
            run.wait_line("rendezvous store answers again")
        for world in ("w0", "w1", "w2"):
            made.ticks_on(world)
        assert {each["generation"] for each in made.told("active")} == {1}
        assert made.told("broke") == []
        assert sorted(each["pid"] for each in made.told("born")) == sorted(pid for _, pid in before.values())
        # The next rendezvous: a third node comes in as a spare, a node is lost, and the spare has its place.
        new = made.start()
        new.wait_line(r"event=seat seat=-", timeout=180)
        gone = before[2][0]
        kill_host(gone)
        made.wait(4, "active", generation=2)
        assert {each["rank"] for each in new.told("born")} == {2, 3}
        assert made.told("broke", world="w0") == []
        assert [each["pid"] for each in made.told("born", rank=0)] == [before[0][1]]
        made.end([run for run in made.runs if run is not gone])


@pytest.mark.parametrize("backend", ["etcd-v2", "etcd"])
def test_an_etcd_that_starts_later_than_the_launchers_is_waited_for(tmp_path, etcd, backend):
    etcd.kill()
    with hub(tmp_path, etcd, backend, "--nnodes", "2") as made:
        for _ in range(2):
            made.start()
        for run in made.runs:
            run.wait_line(r"etcd at 127\.77\.\S+ does not answer: .*It is asked again for 60 s")
        etcd.start()
        made.running()
        made.end(made.runs)


def test_a_run_ends_and_leaves_a_closed_rendezvous(tmp_path, etcd):
    """A second run of the same id is refused by torch's rendezvous; one of another id works."""
    with hub(tmp_path, etcd, "etcd-v2", "--nnodes", "2") as made:
        for _ in range(2):
            made.start()
        made.running()
        made.end(made.runs)
        late = made.start()
        deadline = time.monotonic() + 120
        assert late.ended(120) != 0
        assert time.monotonic() < deadline
        assert "run 'run-etcd-v2' is over" in late.text("err")
        assert late.told("born") == []


def test_a_run_begins_anew_when_the_state_of_an_earlier_one_has_expired(tmp_path, etcd):
    """torch's state of a run id lives for two hours in etcd; what the nodes wrote to the store stays."""
    script = "tell('born')\nhold()\n"
    with hub(tmp_path, etcd, "etcd-v2", "--nnodes", "2", text=script) as made:
        for workers in (4, 8):
            runs = [made.start(), made.start()]
            born = made.wait(workers, "born")[-4:]
            assert sorted(each["rank"] for each in born) == [0, 1, 2, 3]
            if workers == 4:
                for run in runs:
                    run.signal(signal.SIGTERM)
                assert [run.ended() for run in runs] == [143, 143]
                etcd.delete("/torch/elastic/rendezvous/run-etcd-v2")
        made.end(runs)
