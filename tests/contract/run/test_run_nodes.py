"""Several nodes: rank assignment, losses, takeover of slots. Agents without workers, one process for each."""

from __future__ import annotations

import logging
import signal
import time

import pytest
from kits.contract.nodekit import Cluster, free_port
from kits.netkit import Network

log = logging.getLogger("measured")

pytestmark = [pytest.mark.everyday, pytest.mark.timeout(600)]
HANG = 4.0
"""hang_timeout, seconds, where a node's silence decides; elsewhere none is lost by a machine that stalls."""


@pytest.fixture
def cluster():
    with Cluster(
        backend="c10d", endpoint=f"127.0.0.1:{free_port()}", run_id="r", nnodes=[2, 3], total=2,
        local_addr="127.0.0.1", hang=30.0,
    ) as made:  # fmt: skip
        yield made


def host(**more):
    """The node that serves the rendezvous store."""
    return {"conf": {"is_host": True, **more}}


def guest(**more):
    return {"conf": {"is_host": False, **more}}


def start(cluster, count=3, **options):
    """Start nodes; the first serves the rendezvous store. Returns them with their assignments."""
    agents = [cluster.start(**(host() if number == 0 else guest()), **options) for number in range(count)]
    return agents, [agent.wait("settled") for agent in agents]


def by_slot(agents, settled):
    return {each["slot"]: agent for agent, each in zip(agents, settled, strict=True)}


def end(agents, code=0, lost=()):
    for agent in agents:
        agent.say("done")
    for agent in agents:
        assert agent.wait("over")["lost"] == list(lost), agent.seen
        assert agent.finish() == code
        assert agent.wait("closed")["threads"] == ["MainThread"]


def test_nodes_agree_and_a_spare_stands_by(cluster):
    agents, settled = start(cluster)
    assert sorted(str(each["slot"]) for each in settled) == ["0", "1", "None"]
    for each in settled:
        assert (each["world_size"], each["nodes"]) == (2, 2)
        assert each["base_rank"] == (each["slot"] or 0)
    assert len({each["store"] for each in settled}) == 1
    spare = by_slot(agents, settled)[None]
    for agent in agents:
        if agent is not spare:
            agent.say("done")
    for agent in agents:  # the spare too: it has nothing to do, and learns that the others are done
        assert agent.wait("over")["lost"] == []
        assert agent.finish() == 0


@pytest.mark.parametrize("who", ["a guest", "the rendezvous store's host"])
def test_a_spare_takes_the_seat_of_a_node_that_died(cluster, who):
    agents, settled = start(cluster, hang=HANG)
    slots = by_slot(agents, settled)
    victim = (
        agents[0]
        if who != "a guest"
        else next(a for s, a in slots.items() if s is not None and a is not agents[0])
    )
    place = settled[agents.index(victim)]
    if place["slot"] is None:  # the host itself stands by: then there is nothing to move
        pytest.skip("the host of the store got no slot this time")
    spare = slots[None]
    rest = [agent for agent in agents if agent is not victim]
    victim.kill()
    lost = rest[0].wait("lost", slot=place["slot"])
    assert (lost["slot"], lost["ranks"]) == (place["slot"], [place["base_rank"]])
    # Whoever did not run itself just then may hear of the silence first.
    assert lost["cause"] in {"crashed", "unreachable", "hung", "failed"}
    taken = spare.wait("reassigned")
    log.info("%s killed: its slot was taken %.2f s after the loss was seen", who, taken["at"] - lost["at"])
    assert (taken["slot"], taken["base_rank"], taken["world_size"]) == (place["slot"], place["base_rank"], 2)
    other = next(agent for agent in rest if agent is not spare)
    if who != "a guest":
        # The store of planned worlds was on the first slot: it moves, and everyone knows where to.
        moved = other.wait("reassigned")
        assert moved["slot"] == settled[agents.index(other)]["slot"]
        if place["slot"] == 0:
            assert moved["store"] == taken["store"] != place["store"]
        assert "running workers go on" in other.wait("Note")["text"]
    end(rest)
    assert all(each["slot"] == settled[agents.index(other)]["slot"] for each in other.all("reassigned"))


def test_a_node_that_leaves_is_replaced(cluster):
    agents, settled = start(cluster)
    slots = by_slot(agents, settled)
    slots[1].say("leave")
    assert slots[1].finish() == 0
    assert slots[0].wait("lost")["cause"] == "left"
    if slots[1] is agents[0]:  # it closed the rendezvous' store as well; the slot moves all the same
        slots[0].wait("Note")
    assert slots[None].wait("reassigned")["slot"] == 1
    end([slots[0], slots[None]])


def test_without_a_spare_the_rest_goes_on_and_a_newcomer_has_the_seat(cluster):
    agents, settled = start(cluster, count=2, nnodes=[1, 3], hang=HANG)
    keeps = settled[0]["slot"]
    agents[0].all("Note")  # it may have begun alone, and said the same then
    agents[0].seen.clear()
    agents[1].kill()
    assert agents[0].wait("lost")["ranks"] == [1 - keeps]
    assert f"no node for rank {1 - keeps}" in agents[0].wait("Note")["text"]
    new = cluster.start(**guest(), nnodes=[1, 3])
    place = new.wait("settled")
    log.info("a node that came after a loss had its place %.2f s after its process was up",
             place["at"] - new.wait("up")["at"])  # fmt: skip
    assert (place["slot"], place["base_rank"]) == (1 - keeps, 1 - keeps)
    assert agents[0].wait("NodeJoined", slot=1 - keeps)
    end([agents[0], new])
    assert {each["slot"] for each in agents[0].all("reassigned")} <= {keeps}


def test_a_node_that_is_done_before_its_links_are_made_says_so(cluster):
    agents, _ = start(cluster, count=2, nnodes=[2, 2], late=2.5)
    end(agents)


def test_stop_ends_the_run_when_nobody_can_take_the_seat(cluster):
    agents, settled = start(cluster, count=2, nnodes=[1, 2], on_loss="stop")
    agents[1].kill()
    assert f"no node for rank {settled[1]['base_rank']}" in agents[0].wait("stop")["reason"]
    assert agents[0].finish() == 1


def test_stop_goes_on_when_a_spare_takes_the_seat(cluster):
    agents, settled = start(cluster, on_loss="stop")
    slots = by_slot(agents, settled)
    victim = slots[1] if slots[1] is not agents[0] else slots[0]
    victim.kill()
    slots[None].wait("reassigned")
    end([agent for agent in agents if agent is not victim])


def test_a_run_that_ends_without_some_ranks_is_no_success(cluster):
    agents, settled = start(cluster, count=2, nnodes=[1, 2])
    agents[1].kill()
    agents[0].wait("lost")
    agents[0].say("done")
    assert agents[0].wait("over")["lost"] == [settled[1]["base_rank"]]
    assert agents[0].finish() == 1


def test_a_node_that_dies_when_it_is_done_is_not_missed(cluster):
    agents, settled = start(cluster)
    slots = by_slot(agents, settled)
    victim, other = (slots[0], slots[1]) if slots[0] is not agents[0] else (slots[1], slots[0])
    victim.say("done")
    other.wait("finished")
    slots[None].wait("finished")
    victim.kill()
    other.say("done")
    for agent in (other, slots[None]):
        assert agent.wait("over")["lost"] == []
        assert agent.finish() == 0
        assert agent.all("lost") == []
        assert agent.all("reassigned") == []


def test_a_node_that_comes_later_does_not_run_the_ranks_of_one_that_was_done_and_died(cluster):
    (keeps, done), _ = start(cluster, count=2, total=None)
    done.say("done")
    keeps.wait("finished", count=1)
    done.kill()
    keeps.wait("linked", count=0)
    new = cluster.start(**guest(), total=None)
    assert new.wait("settled")["slot"] is None
    new.wait("linked", count=1)
    keeps.say("done")
    for agent in (keeps, new):
        assert agent.wait("over")["lost"] == []
        assert agent.finish() == 0
    assert {each["slot"] for each in new.all("SlotTaken")} == {None}


def test_a_node_that_has_a_lost_ones_seat_ends_well_where_a_third_was_done_and_died(cluster):
    agents = [
        cluster.start(**(guest() if number else host(last_call_timeout=8)), total=3) for number in range(3)
    ]
    settled = [agent.wait("settled") for agent in agents]
    keeps, lost, done = agents
    keeps.wait("linked", count=2)
    done.say("done")
    keeps.wait("finished", count=1)
    done.kill()
    lost.kill()
    keeps.wait("linked", count=0)
    new = cluster.start(**guest(), total=3)
    assert new.wait("settled")["slot"] == settled[1]["slot"]
    new.wait("linked", count=1)
    new.say("done")
    keeps.wait("finished", count=2)
    keeps.say("done")
    for agent in (keeps, new):
        assert agent.wait("over")["lost"] == []
        assert agent.finish() == 0


def test_a_node_that_fails_ends_the_run_for_all(cluster):
    agents, _ = start(cluster)
    agents[1].say("fail")
    for agent in (agents[0], agents[2]):
        assert "has ended the run" in agent.wait("stop")["reason"]
        assert agent.finish() == 1
    assert agents[1].finish() == 3


def test_a_stopped_agent_loses_its_seat_and_knows_it_when_it_wakes(cluster):
    agents, settled = start(cluster, hang=HANG)
    slots = by_slot(agents, settled)
    victim = slots[1] if slots[1] is not agents[0] else slots[0]
    place = settled[agents.index(victim)]
    if agents[0] is slots[None]:
        pytest.skip("the host of the store stands by this time")
    victim.process.send_signal(signal.SIGSTOP)
    other = next(agent for agent in agents if agent not in {victim, slots[None]})
    lost = other.wait("lost", slot=place["slot"])
    assert lost["cause"] in {"hung", "unreachable", "failed"}  # "failed": it stood still itself just then
    taken = slots[None].wait("reassigned")
    assert taken["slot"] == place["slot"]
    victim.process.send_signal(signal.SIGCONT)
    mine = victim.wait("reassigned")
    assert mine["slot"] is None
    assert "lost its seat" in mine["reason"]
    for agent in agents:
        if agent is not victim:
            agent.say("done")
    for agent in agents:
        if agent is not victim:
            assert agent.wait("over")["lost"] == []
            assert agent.finish() == 0


def test_nodes_that_the_rendezvous_has_dropped_let_others_in(cluster):
    """torch drops nodes whose heartbeats are late, here by 3 s, and does not take them back."""
    agents, _ = start(cluster, count=2)
    for agent in agents:
        agent.process.send_signal(signal.SIGSTOP)
    time.sleep(5)
    for agent in agents:
        agent.process.send_signal(signal.SIGCONT)
    new = cluster.start(**guest())
    assert new.wait("settled")["slot"] is None
    for agent in agents:
        agent.wait("NodeJoined", slot=None)
        agent.say("done")
    for agent in (*agents, new):
        assert agent.wait("over")["lost"] == []
        assert agent.finish() == 0
        assert agent.all("lost") == []


def test_static_rendezvous_lets_a_node_come_back(cluster):
    """It has one round only: who comes back finds the table of the first, and is let in by who decides."""
    shape = {"backend": "static", "nnodes": [2, 2], "hang": HANG}
    agents = [cluster.start(**shape, conf={"rank": rank}) for rank in range(2)]
    settled = [agent.wait("settled") for agent in agents]
    assert [each["slot"] for each in settled] == [0, 1]
    agents[1].kill()
    assert agents[0].wait("lost")["ranks"] == [1]
    agents[0].wait("Note")
    again = cluster.start(**shape, conf={"rank": 1})
    place = again.wait("settled")
    assert (place["slot"], place["base_rank"], place["store"]) == (1, 1, settled[0]["store"])
    end([agents[0], again])


def test_a_node_that_is_done_and_stands_still_is_done_afterwards(cluster):
    """The others do without it meanwhile; its workers have ended with 0, and do not run once more."""
    agents, settled = start(cluster, count=2, hang=HANG)
    done = agents[1]
    done.say("done")
    agents[0].wait("finished")
    agents[0].all("NodeJoined")
    agents[0].seen.clear()
    done.process.send_signal(signal.SIGSTOP)
    agents[0].wait("members", count=1)
    done.process.send_signal(signal.SIGCONT)
    assert agents[0].wait("NodeJoined")["slot"] == settled[1]["slot"]
    assert done.all("reassigned") == []
    agents[0].say("done")
    for agent in agents:
        assert agent.wait("over")["lost"] == []
        assert agent.finish() == 0
    assert done.all("reassigned") == []


# -- hosts with cables


@pytest.fixture
def network():
    with Network(3) as made:
        yield made


def hosts(cluster, network, guests=None, **options):
    """Start three agents; `guests`: options of those that are not the rendezvous store's host."""
    endpoint = f"{network.address(1)}:29400"
    agents = [
        cluster.start(
            network.hosts[number], endpoint=endpoint, local_addr=network.address(number + 1),
            **(host() if number == 0 else {**guest(), **(guests or {})}), **options,
        )
        for number in range(3)
    ]  # fmt: skip
    return agents, [agent.wait("settled") for agent in agents]


def connected(cluster, network):
    """Start hosts and wait until each has its connections, without which the others would be lost to it at once."""
    agents, settled = hosts(cluster, network, hang=HANG)
    for agent in agents:
        agent.wait("linked", count=2)
    return agents, settled


def a_guest_with_a_seat(cluster, network):
    """Start hosts; return the agents, these by slot, one with a seat beside the store's host, and its settlement."""
    agents, settled = connected(cluster, network)
    slots = by_slot(agents, settled)
    victim = next(agent for slot, agent in slots.items() if slot is not None and agent is not agents[0])
    if agents[0] is slots[None]:
        pytest.skip("the host of the store stands by this time")
    return agents, slots, victim, settled[agents.index(victim)]


def test_a_node_that_is_cut_off_gives_up_before_its_seat_is_given_away(cluster, network):
    agents, slots, victim, place = a_guest_with_a_seat(cluster, network)
    number = agents.index(victim) + 1
    network.pull(number)
    # An assignment is told again, too, where only an address in it has changed.
    gave_up = victim.wait("reassigned", slot=None)
    lost = agents[0].wait("lost", slot=place["slot"])
    assert lost["cause"] == "unreachable"
    taken = slots[None].wait("reassigned", slot=place["slot"])
    log.info("cut off, hang timeout %.1f s: taken %.2f s after it was given up, %.2f s after the others saw the loss",
             HANG, taken["at"] - gave_up["at"], taken["at"] - lost["at"])  # fmt: skip
    assert gave_up["at"] < taken["at"], "for a while two nodes had the same ranks"
    agents[0].all("NodeJoined")
    agents[0].seen.clear()
    victim.all("NodeJoined")
    victim.seen.clear()
    network.plug(number)
    back = victim.wait("NodeJoined")
    assert back["slot"] in {0, 1}
    assert agents[0].wait("NodeJoined", slot=None)
    # It is a spare now, and takes the next slot that is free.
    slots[None].kill()
    again = victim.wait("reassigned", slot=place["slot"])
    assert again["base_rank"] == place["base_rank"]
    end([agents[0], victim])


def test_a_node_that_is_cut_off_while_its_links_are_made_gives_up_before_its_seat_is_given_away(
    cluster, network
):
    """It does not wait for those of them that are not made yet: the others may see the loss before."""
    late = {"late": 4 * HANG, "late_to": [network.address(2), network.address(3)]}  # between the two guests
    agents, settled = hosts(cluster, network, hang=HANG, guests=late)
    slots = by_slot(agents, settled)
    victim = next(agent for slot, agent in slots.items() if slot is not None and agent is not agents[0])
    place = settled[agents.index(victim)]
    agents[0].wait("linked", count=2)
    network.pull(agents.index(victim) + 1)
    gave_up = victim.wait("reassigned", slot=None)
    taken = slots[None].wait("reassigned", slot=place["slot"])
    log.info("taken %.2f s after it was given up", taken["at"] - gave_up["at"])
    assert gave_up["at"] < taken["at"], "for a while two nodes had the same ranks"


def test_a_node_that_is_done_while_it_is_cut_off_works_again_when_it_gets_a_seat(cluster, network):
    """The others do not know that it is done, and give its seat away."""
    agents, slots, victim, place = a_guest_with_a_seat(cluster, network)
    number = agents.index(victim) + 1
    network.pull(number)
    victim.say("done")
    victim.wait("finished", count=1)
    slots[None].wait("reassigned", slot=place["slot"])
    network.plug(number)
    victim.wait("reassigned", slot=None)
    assert agents[0].wait("NodeJoined", slot=None)
    slots[None].kill()
    victim.wait("reassigned", slot=place["slot"])
    agents[0].say("done")
    victim.wait("finished", count=1)  # of the other node
    assert agents[0].all("over") == []
    end([victim, agents[0]])


def test_the_rendezvous_store_goes_with_a_host_that_is_cut_off_and_the_others_go_on(cluster, network):
    agents, settled = connected(cluster, network)
    slots = by_slot(agents, settled)
    place = settled[0]
    if place["slot"] is None:
        pytest.skip("the host of the store stands by this time")
    network.pull(1)
    gave_up = agents[0].wait("reassigned")  # its own store answers, but it sees a minority
    assert gave_up["slot"] is None
    taken = slots[None].wait("reassigned")
    assert taken["slot"] == place["slot"]
    assert gave_up["at"] < taken["at"]
    rest = agents[1:]
    for agent in rest:
        agent.say("done")
    for agent in rest:
        assert agent.wait("over", timeout=180.0)["lost"] == []
        assert agent.finish() == 0  # although the rendezvous store does not answer
