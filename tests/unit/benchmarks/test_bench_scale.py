"""The simulation of large worlds: its time, its network, and that what it runs is the real protocol."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from benchmarks.scale.assumptions import Costs, Network, StoreCosts
from benchmarks.scale.loop import Loop, Task
from benchmarks.scale.mesh import Mesh
from benchmarks.scale.network import Wires
from benchmarks.scale.reforming import Record, Store, broken_world, reform, request
from benchmarks.scale.watching import Cores
from multiworld._core.liveness.wire import Beat
from multiworld._core.membership.admission import Move
from multiworld._core.membership.ledger import encode
from multiworld._core.membership.roster import Endpoint
from multiworld._net.liveness.sockets import Accepted, Closed, Connected, Received
from multiworld._net.stores.record import WorldRecord
from multiworld.events import Cause

PLAIN = Network(per_host=1, jitter=1e-9)


class Party:
    def __init__(self, loop, wires, host):
        self.loop, self.host, self.endpoint = loop, host, Endpoint(f"10.0.0.{host}", 1)
        self.came = []
        wires.listen(self)

    def arrive(self, event):
        self.came.append((self.loop.now, event))

    def kinds(self):
        return [type(event) for _, event in self.came]


def pair(network):
    loop = Loop(1)
    wires = Wires(loop, network)
    one, other = (Party(loop, wires, host) for host in (1, 2))
    channel = wires.channel()
    wires.dial(one, channel, other.endpoint)
    loop.run(0.1)
    return loop, wires, one, other, channel


def test_events_come_in_the_order_of_their_times():
    loop, seen = Loop(1), []
    for name, when in (("late", 2.0), ("first", 1.0), ("second", 1.0), ("never", math.inf)):
        loop.at(when, lambda name=name: seen.append((name, loop.now)))
    loop.run(until=5.0)
    assert seen == [("first", 1.0), ("second", 1.0), ("late", 2.0)]
    assert loop.now == 5.0


def test_a_task_sleeps_and_waits_in_simulated_time():
    loop, seen = Loop(1), []

    def live(task):
        task.sleep(3.0)
        seen.append(loop.now)
        seen.append(task.wait(lambda go_on: loop.after(1.0, go_on), within=2.0))
        seen.append(task.wait(lambda go_on: loop.after(9.0, go_on), within=2.0))
        seen.append(loop.now)

    task = Task(loop, live, start=1.0)
    loop.run()
    assert task.done
    assert task.error is None
    assert seen == [4.0, True, False, 7.0]


def test_a_connection_keeps_the_order_and_ends_after_what_was_sent():
    loop, wires, one, other, channel = pair(PLAIN)
    for number in range(3):
        wires.send(channel, Beat(number))
    wires.close(channel)
    loop.run(1.0)
    assert one.kinds() == [Connected]
    assert other.kinds() == [Accepted, Received, Received, Received, Closed]
    assert [event.frames[0].number for _, event in other.came[1:4]] == [0, 1, 2]
    assert other.came[1][0] == pytest.approx(0.1 + PLAIN.remote, abs=1e-6)
    assert wires.connections == 0


def test_what_is_lost_is_sent_again_and_holds_what_follows():
    loop, wires, _, other, channel = pair(PLAIN)
    wires.cut(2, until=0.5)
    wires.send(channel, Beat(0))
    loop.run(0.55)
    wires.cut(2, until=0.65)
    wires.send(channel, Beat(1))
    probe = wires.probe(channel)
    assert probe.unacknowledged
    assert probe.last_ack == pytest.approx(0.55, abs=0.01)
    loop.run(3.0)
    # At 0.1, 0.3 and 0.7: what was sent at 0.55 waits for that, and goes with it.
    assert [round(when, 2) for when, _ in other.came[1:]] == [0.7, 0.7]
    assert not wires.probe(channel).unacknowledged


def test_a_port_of_the_dead_refuses():
    loop, wires, one, other, _ = pair(PLAIN)
    wires.kill(other)
    loop.run(0.2)
    wires.dial(one, wires.channel(), other.endpoint)
    loop.run(0.3)
    assert one.kinds() == [Connected, Closed, Closed]
    assert [event.refused for _, event in one.came[1:]] == [False, True]


def test_a_killed_member_is_known_to_all():
    mesh = Mesh(12)
    assert mesh.join() < 0.1
    steady = mesh.steady(3.0)
    assert (steady.connections, steady.sent) == (11, pytest.approx(11, rel=0.1))
    assert mesh.wires.connections == 12 * 11 // 2
    fault = mesh.kill()
    assert set(fault.causes) == {Cause.CRASHED}
    assert len(fault.took) == 11
    assert mesh.network.exit < max(fault.took) < mesh.network.exit + 0.01
    assert fault.told == 10


@pytest.mark.parametrize(("hit", "cause"), [(Mesh.stop, Cause.HUNG), (Mesh.lose_host, Cause.UNREACHABLE)])
def test_silence_is_judged_within_its_bounds(hit, cause):
    mesh = Mesh(12, network=Network(per_host=3), hang_timeout=2.0)
    mesh.join()
    mesh.loop.run(mesh.loop.now + 3.0)
    fault = hit(mesh)
    assert set(fault.causes) == {cause}
    assert 0.8 * 2.0 <= min(fault.took) <= max(fault.took) <= 1.2 * 2.0


def test_early_close_connections_are_two_more_for_each_pair():
    mesh = Mesh(6, early_close=True)
    mesh.join()
    mesh.loop.run(mesh.loop.now + 1.0)
    assert mesh.wires.connections == 3 * 15
    assert {len(each.kept) for each in mesh.processes} == {5}


def test_far_members_load_a_process_as_real_ones_do():
    whole, part = Mesh(24, seed=3), Mesh(24, real=4, seed=3)
    assert part.join() == pytest.approx(whole.join(), rel=0.5)
    one, other = whole.steady(5.0), part.steady(5.0)
    assert (other.connections, other.sent) == (one.connections, pytest.approx(one.sent, rel=0.05))
    assert other.turns == pytest.approx(one.turns, rel=0.35)
    assert max(part.kill().took) == pytest.approx(max(whole.kill().took), rel=0.2)


def test_processes_that_are_never_done_are_not_waited_for():
    mesh = Mesh(6, hang_timeout=60.0)
    mesh.join()
    for process in mesh.processes:
        process._costs = replace(Costs(), turn=1.5)
    assert mesh.kill().settled == math.inf


def test_few_cores_make_members_wait_for_each_other():
    alone, shared = Mesh(16), Mesh(16, network=Network(per_host=16), costs=replace(Costs(), cores=1))
    assert shared.join() > 2 * alone.join()


def test_a_thread_that_does_not_run_says_so():
    """So that it does not take its own absence for the others' silence."""
    mesh = Mesh(3)
    mesh.join()
    mesh.loop.run(5.0)
    process, told = mesh.processes[0], []
    process.peers.stalled = lambda seconds, _now: told.append(seconds)
    process._cores = Cores(1)
    process._cores.take(mesh.loop.now + 3.0)
    mesh.loop.run(9.0)
    assert max(told) == pytest.approx(2.5, abs=0.6)  # 3 s, less the wait that was meant
    assert sorted(told)[-2] < 0.01


def test_the_same_seed_gives_the_same_figures():
    def run(seed):
        mesh = Mesh(12, real=6, seed=seed)
        return mesh.join(), mesh.steady(2.0), mesh.kill(), reform(12, seed=seed)

    assert run(5) == run(5)
    assert run(5) != run(6)


@pytest.mark.parametrize("size", [3, 9])
def test_survivors_reform_without_the_lost(size):
    done = reform(size, building=0.5)
    assert done.together
    assert done.agreed + 0.5 < done.active < done.agreed + 1.0
    assert done.tries < 3 * size * size / 2
    assert reform(size, building=0.5, letters=False).tries >= 2 * (size - 1), "each writes twice for itself"


class RealStore:
    """A store for the real `WorldRecord`: each call is a request to the simulated server."""

    def __init__(self, task, store, keys):
        self._task, self._store, self._keys = task, store, keys

    def _ask(self, handle):
        found = []

        def begin(go_on):
            self._store.ask(handle, lambda answer: (found.append(answer), go_on()))

        self._task.wait(begin)
        return found[0]

    def compare_set(self, key, expected, desired):
        def handle():
            there = self._keys.get(key)
            if there == (expected or None):
                self._keys[key] = there = desired
            found = expected if there is None else there
            return found.encode(), 100 + len(expected) + len(desired) + len(found)

        return self._ask(handle)

    appends = True

    def append(self, key, text):
        def handle():
            self._keys[key] = self._keys.get(key, "") + text
            return None, 100 + len(text)

        self._store.ask(handle, lambda _: None)  # which is not answered

    def add(self, key, amount):
        return self._ask(lambda: (1, 100))

    def delete_key(self, key):
        return self._ask(lambda: (True, 100))


def test_the_modelled_record_takes_as_long_as_the_real_one(monkeypatch):
    """With members that compute in no time: what they compute is modelled."""
    costs = replace(StoreCosts(), decode=0.0, step=0.0)
    modelled = reform(16, costs=costs)
    keys = {}

    def real(task, store, _cores):
        keys.setdefault("m8d/w/record", encode(store.ledger))
        return WorldRecord(RealStore(task, store, keys), "w", task.sleep)

    monkeypatch.setattr("benchmarks.scale.reforming.Record", real)
    done = reform(16, costs=costs)
    assert done.together
    assert done.active == pytest.approx(modelled.active, rel=0.5)
    assert done.bytes == pytest.approx(modelled.bytes, rel=0.5)


def test_a_write_that_comes_too_late_is_made_again_on_what_is_there():
    loop = Loop(1)
    store = Store(loop, Network(), StoreCosts(), broken_world(4))
    seen = []

    def live(task):
        record = Record(task, store, Cores(0))
        record.read()

        def step(ledger):
            seen.append(ledger.number)
            return Move(replace(ledger, number=ledger.number + 1))

        assert record.apply(step).ledger.number == record.ledger.number

    tasks = [Task(loop, live) for _ in range(3)]
    loop.run()
    assert [task.error for task in tasks] == [None] * 3
    assert seen == [1, 2, 3]
    assert store.tries > 3
    assert store.ledger.number == 4


def test_a_survivor_asks_for_its_seat():
    asked = request(broken_world(4), 2, (3,))
    assert (asked.seat, asked.past_rank, asked.lost, len(asked.past)) == ("seat2", 2, (3,), 4)
    assert asked.assigned
