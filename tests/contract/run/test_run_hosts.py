"""Launchers with workers in worlds on hosts of their own; one host is lost."""

from __future__ import annotations

import logging
import signal
import time

import pytest
from kits.contract import nodekit
from kits.contract.hubkit import Hub, kill_host
from kits.netkit import Network

log = logging.getLogger("measured")

pytestmark = [pytest.mark.everyday, pytest.mark.timeout(900)]


@pytest.fixture
def network():
    with Network(3) as made:
        yield made


def conf(*, serves):
    # Torch finds out by the host's name whether it is the endpoint's; all hosts here have the same name.
    patience = ",".join(f"{name}={nodekit.CONF[name]}" for name in nodekit.CONF if name != "join_timeout")
    return f"is_host={int(serves)},{patience}"


def hub(folder, network, *options, **more):
    endpoint = f"{network.address(1)}:29400"
    shared = ["--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", "hosts", *options]
    return Hub(folder, shared, **more)


def start(made, network, number):
    begun = made.start(
        "--local-addr", network.address(number), "--rdzv-conf", conf(serves=number == 1),
        netns=network.hosts[number - 1],
    )  # fmt: skip
    if number == 1:
        begun.wait_line("event=run-started")  # torch gives seats in the order of coming, and the first is its
    return begun


def spare(made, before):
    """Wait until the launcher without a seat knows that it stands by; returns it."""
    found = next(run for run in made.runs if all(run is not each for each, _ in before.values()))
    found.wait_line(r"event=seat seat=-")
    before[0][0].wait_line(r"event=node-joined .*seat=-")
    return found


def moved(made, before, gone, cut):
    """Everything that must hold after the node with ranks 2 and 3 was lost and a spare came in."""
    made.wait(4, "active", generation=2)  # w1 and w2, on both sides
    for rank in (2, 3):
        new = max(made.told("born", rank=rank), key=lambda each: each["at"])  # of any launcher
        assert new["pid"] != before[rank][1]
        assert new not in gone.told("born")
    assert [each["pid"] for each in made.told("born", rank=0)] == [before[0][1]], "the hub was restarted"
    assert [each["pid"] for each in made.told("born", rank=1)] == [before[1][1]]
    assert made.told("broke", world="w0") == []
    at = max(each["at"] for each in made.told("active", rank=0, generation=2))
    log.info("the hub's worlds are whole again %.2f s after the loss", at - cut)


@pytest.mark.parametrize("how", ["killed", "cut off"])
def test_a_lost_nodes_roles_move_to_the_spare(tmp_path, network, how):
    with hub(tmp_path, network, "--nnodes", "2:3") as made:
        for number in (1, 2, 3):
            start(made, network, number)
        before = made.running()
        gone = before[2][0]
        number = made.runs.index(gone) + 1
        assert before[3][0] is gone
        assert number != 1
        spare(made, before)
        cut = time.monotonic()
        if how == "killed":
            kill_host(gone)
        else:
            network.pull(number)
        moved(made, before, gone, cut)
        made.ticks_on("w0")
        rest = [run for run in made.runs if run is not gone]
        if how == "cut off":
            # It has ended its workers by itself, before anybody else had their ranks.
            stopped = gone.wait_line("event=stopped", count=2)
            assert all("SIGKILL" in line for line in stopped)
            network.plug(number)
            rest[0].wait_line(
                r"event=node-joined .*seat=-", count=2
            )  # the spare at first, then who came back
            rest.append(gone)
        made.end(rest)


STUBBORN = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
tell("born")
hold()
"""


def test_a_node_that_is_cut_off_while_its_workers_end_kills_them(tmp_path, network):
    with hub(tmp_path, network, "--nnodes", "2:3", "--grace", "300", text=STUBBORN) as made:
        for number in (1, 2, 3):
            start(made, network, number)
        made.wait(4, "born")
        number, gone = next((at, run) for at, run in enumerate(made.runs, 1) if at > 1 and run.told("born"))
        gone.signal(signal.SIGTERM)
        network.pull(number)
        gone.wait_line("event=stopped", count=2)
        stopped = time.monotonic()
        assert gone.ended() == 128 + signal.SIGTERM
        ranks = {each.rank for each in gone.told("born")}
        again = [
            each for each in made.wait(6, "born") if each.rank in ranks and each not in gone.told("born")
        ]
        assert {each.rank for each in again} == ranks
        assert all(each.at > stopped for each in again), "for a while two nodes had the same ranks"
        made.end([run for run in made.runs if run is not gone])


def test_without_a_spare_the_rest_goes_on_until_the_node_comes_back(tmp_path, network):
    with hub(tmp_path, network, "--nnodes", "1:2") as made:
        for number in (1, 2):
            start(made, network, number)
        before = made.running()
        first, gone = before[0][0], before[2][0]
        cut = time.monotonic()
        kill_host(gone)
        line = first.wait_line("cannot be whole")[0]
        assert "ranks 2, 3" in line
        assert "w1, w2" in line
        made.ticks_on("w0")
        start(made, network, 2)
        moved(made, before, gone, cut)
        made.end([first, made.runs[-1]])


def test_stop_ends_the_run_with_an_error(tmp_path, network):
    with hub(tmp_path, network, "--nnodes", "1:2", "--on-node-loss", "stop") as made:
        for number in (1, 2):
            start(made, network, number)
        before = made.running()
        first, gone = before[0][0], before[2][0]
        kill_host(gone)
        assert first.ended(120) == 1
        assert "no node for ranks 2, 3: worlds w1, w2 cannot be whole" in first.text()
        assert first.leftovers() == []


def test_the_first_host_is_cut_off_with_the_hub_and_every_store(tmp_path, network):
    """The rendezvous store and the planned worlds' store are gone with it: the others need neither."""
    with hub(tmp_path, network, "--nnodes", "2:3") as made:
        start(made, network, 1)
        start(made, network, 2)
        start(made, network, 3)
        before = made.running()
        gone, other = before[0][0], before[2][0]
        assert gone is made.runs[0]
        follows = spare(made, before)  # one node of two would be no minority
        network.pull(1)
        gone.wait_line("event=stopped", count=2)  # by itself
        made.wait(2, "active", world="w1")
        follows.wait_told("born", count=2)
        follows.wait_told("active", count=4)  # the new hub in all three worlds, the new worker 0 in w0
        assert {each["rank"] for each in follows.told("born")} == {0, 1}
        for rank in (2, 3):
            assert [each["pid"] for each in made.told("born", rank=rank)] == [before[rank][1]]
        stopped = max(each["at"] for each in gone.told("tick"))
        assert stopped < min(each["at"] for each in follows.told("born"))
        for run in (other, follows):
            run.say()
        for run in (other, follows):
            assert run.ended(120) == 0, run.report()
