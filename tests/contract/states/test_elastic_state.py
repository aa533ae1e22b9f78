"""Members are lost while a world's state is sent: an old state never counts as the latest, survivors stay members."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from kits.contract.elastickit import LONG, claimed, enter, two_ports
from kits.contract.worldkit import PATIENCE, SOON, outcome
from kits.meetkit import until

import multiworld as mw
from multiworld._c10d.lane import state_transfer
from multiworld._c10d.lane.state_line import Line
from multiworld._core import state_pieces
from multiworld._core.membership.roster import Roster
from multiworld._core.state_notes import Kind
from multiworld._join import state as state_module
from multiworld._join.kept_state import KeptState
from multiworld._join.state import _receive, _send
from multiworld._net.lane import door
from multiworld._net.stores.store import open_store
from multiworld.events import WorldStateReceived


class Model:
    """The number of its last step; it kills its process where it is sent, or is on its way, if it is told to."""

    def __init__(self):
        self.done, self.dies, self.more = torch.zeros(1), "", torch.zeros(8 << 20)
        mw.subscribe(lambda event: self._perhaps_dies("gets") if type(event) is WorldStateReceived else None)

    def state_dict(self):
        self._perhaps_dies("sends")
        return {"done": self.done, "more": self.more}

    def load_state_dict(self, state):
        self.done.copy_(state["done"])

    def _perhaps_dies(self, where):
        if self.dies == where:
            os.kill(os.getpid(), signal.SIGKILL)


def works(w):
    """Reform until an operation succeeds."""
    while outcome(lambda: w.all_reduce(torch.ones(1)))["kinds"]:
        w.reform(LONG)


def stepping(me, **options):
    """Makes one step; the world breaks then. Makes another step that counts if it is told to, and reforms."""
    model = Model()
    w = enter(me, "1:4", state=model, **options)
    model.done += 1
    w.advance()
    me.emit("in", seats=w.seats)
    until(lambda: w.breakage is not None)
    me.emit("broken")
    ahead, model.dies = me.hear()
    if ahead:
        model.done += 1
        outcome(w.advance)  # the world is broken; the step counts
    w.reform(LONG)
    works(w)
    me.emit("told", step=w.step, done=int(model.done), size=w.world_size)
    me.hear()


@pytest.mark.parametrize(
    ("ahead", "where", "step"),
    [
        ([0], "sends", 1),  # the one member that had made the second step dies
        ([0], "gets", 2),
        ([0, 3], "gets", 2),
        ([0, 3], "sends", 2),
    ],
)
def test_a_second_loss_leaves_nobody_a_step_behind(cast, ahead, where, step):
    """Those `ahead` send their state to the others of the survivors 0, 2 and 3; one dies in it."""
    members = [cast.start(stepping, number) for number in range(4)]
    seats = next(iter([each.expect("in").seats for each in members]))
    by_rank = [number for number in (int(seat[1:]) for seat in seats) if number != 1]
    dies = next(number for number in by_rank if (number in ahead) is (where == "sends"))
    members[1].kill()
    for number in by_rank:
        members[number].expect("broken")
        members[number].say((number in ahead, where if number == dies else ""))
    told = [members[number].expect("told", SOON) for number in by_rank if number != dies]
    assert [(each.step, each.done, each.size) for each in told] == [(step, step, 2)] * 2


def beginning(me, dies="", **options):
    model = Model()
    model.done += me.rank
    model.dies = dies
    w = enter(me, state=model, **options)
    works(w)
    me.emit("told", step=w.step, done=int(model.done), size=w.world_size, rank=w.rank)
    me.hear()


@pytest.mark.parametrize("dies", ["gets", "sends"])
@pytest.mark.parametrize("kind", ["one", "list"])
def test_a_world_begins_without_a_member_that_is_lost_while_its_first_state_is_brought(cast, kind, dies):
    """No member has the state yet, and all are members: none waits for one that is lost."""
    store = cast.store if kind == "one" else two_ports()
    options = {"size": "2:4", "store": store}
    first = cast.start(beginning, 0, dies="sends" if dies == "sends" else "", **options)
    with contextlib.closing(
        open_store(store, world="w", serve=False, deadline=time.monotonic() + SOON)
    ) as opened:
        claimed(opened.store, "s0")  # so it is rank 0, whose state the others get
        second = cast.start(beginning, 1, dies="gets" if dies == "gets" else "", **options)
        claimed(opened.store, "s0", "s1")  # so it gets it first
    rest = [cast.start(beginning, number, **options) for number in (2, 3)]
    alive = [second, *rest] if dies == "sends" else [first, *rest]
    told = [each.expect("told", SOON) for each in alive]
    assert {(each.step, each.size) for each in told} == {(0, 3)}
    assert {each.done for each in told} == {1 if dies == "sends" else 0}


def named(me, names):
    states = {name: Parts(me.rank) for name in names}
    me.emit("told", **outcome(lambda: enter(me, "2:2", state=states)))
    me.emit("has", values={float(part[0]) for each in states.values() for part in each.tensors.values()})


@pytest.mark.parametrize("names", [["net", "optimizer"], ["model"]])
def test_states_of_other_names_are_refused_before_anything_is_loaded(cast, names):
    cast.start(named, 0, names=["model", "optimizer"])
    claimed(cast.server, "s0")
    second = cast.start(named, 1, names=names)
    told = second.expect("told")
    assert told.kinds[:2] == ["MismatchError", "JoinError"]
    assert "{'model', 'optimizer'}" in told.text
    assert second.expect("has").values == {1.0}


class Parts:
    """A state of eight parts."""

    def __init__(self, number):
        self.tensors = {f"w{at}": torch.full((1 << 18,), float(number)) for at in range(8)}

    def state_dict(self):
        return dict(self.tensors)

    def load_state_dict(self, state):
        for name, tensor in self.tensors.items():
            tensor.copy_(state[name])


def has_parts(me, number, dies=False):
    """Has a state of that number; it `dies` when a part of it has come to another, and others are under way."""
    state_pieces.CHUNK = 1 << 20
    if dies:
        tell = Line.tell

        def perhaps(line, kind, *numbers, **more):
            if kind is Kind.PART and numbers[0] == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            tell(line, kind, *numbers, **more)

        Line.tell = perhaps
    state = Parts(number)
    w = enter(me, "1:2", state=state, last_call=0)
    values = {value for tensor in state.tensors.values() for value in tensor.tolist()}
    me.emit("told", values=values, size=w.world_size, ready=w.ready)
    while dies:
        w.advance()
        time.sleep(0.01)
    me.hear()


def test_a_state_that_came_in_part_is_no_state_of_the_world(cast):
    """Its member waits for one that has a state: alone it would go on with tensors of two states."""
    gives = cast.start(has_parts, 0, number=7, dies=True)
    gives.expect("told")
    gets = cast.start(has_parts, 1, number=-1)
    assert gives.finish() == -signal.SIGKILL
    comes = cast.start(has_parts, 0, number=9)
    for each in (gets, comes):
        told = each.expect("told", PATIENCE)
        assert (told.values, told.size, told.ready) == ({9.0}, 2, True)
    for each in (gets, comes):  # one that ends sooner breaks the world of the other one
        each.say("end")


HELD = 7
"""The number of the state that counts."""


def gives_up(me, number, at=None):
    """Has a state of that number; gives up once, as it says `at` for the third part. Joins and reforms again then.

    Where `at` is no kind of a note, its state cannot be asked for.
    """
    state_pieces.CHUNK = 1 << 20
    tell = Line.tell

    def perhaps(line, kind, *numbers, **more):
        if kind is at and numbers[0] == 3:
            Line.tell = tell
            raise KeyboardInterrupt
        tell(line, kind, *numbers, **more)

    def refuses():
        del state.state_dict
        raise KeyboardInterrupt

    Line.tell = perhaps
    state = Parts(number)
    if at == "asked":
        state.state_dict = refuses
    # Whose state does not count begins no world alone: where that has begun, what it has is the world's state.
    options = {"state": state, "last_call": 0 if number == HELD else LONG}
    try:
        w = enter(me, "1:2", **options)
    except KeyboardInterrupt:
        me.emit("interrupted")
        me.hear()
        w = enter(me, "1:2", **options)
    while True:
        values = {value for tensor in state.tensors.values() for value in tensor.tolist()}
        me.emit("told", values=values, size=w.world_size, ready=w.ready)
        try:
            while not w.advance():
                time.sleep(0.01)
        except KeyboardInterrupt:
            me.emit("interrupted")
            me.hear()
            until(lambda: w.breakage is not None)
            w.reform(LONG)
        except mw.BrokenWorldException as broken:
            me.emit("broken", ranks=broken.ranks)
            w.reform(LONG)


@pytest.mark.parametrize(("which", "at"), [("sends", Kind.PART), ("sends", "asked"), ("gets", Kind.TOOK)])
def test_a_member_goes_on_when_the_other_end_of_a_transfer_is_interrupted(cast, which, at):
    """As when it dies: what it raises is `BrokenWorldException`, or nothing where it only joins."""
    gives = cast.start(gives_up, 0, number=HELD, at=at if which == "sends" else None)
    assert gives.expect("told").size == 1
    gets = cast.start(gives_up, 1, number=-1, at=at if which == "gets" else None)
    interrupted = gives if which == "sends" else gets
    interrupted.expect("interrupted")
    if which == "gets":
        assert gives.expect("broken").ranks == (1,)
        assert gives.expect("told").size == 1
    interrupted.say("go on")
    for each in (gives, gets):
        told = each.expect("told", PATIENCE)
        if told.size == 1:  # it was alone for a moment
            told = each.expect("told", PATIENCE)
        assert (told.values, told.size, told.ready) == ({float(HELD)}, 2, True)


TIMEOUT = 6.0
"""Seconds, of the world whose state takes longer."""


def waits(me):
    """One is behind after a breakage, and gets the state, of eight parts, as slowly as the test says."""
    os.environ["M8D_STUCK_AFTER"] = "6"  # longer than a pause of the transfer, and shorter than all of them
    stuck = []
    mw.subscribe(lambda event: stuck.append(event.operation.kind) if type(event) is mw.WorldStuck else None)
    state_pieces.CHUNK = 1 << 20
    tell = Line.tell

    def slowly(line, kind, *numbers, **more):
        if kind is Kind.PART:
            me.emit("part")
            me.hear()
        tell(line, kind, *numbers, **more)

    state = Parts(1)
    w = enter(me, "3:4", state=state)
    Line.tell = slowly
    me.emit("in", rank=w.rank)
    until(lambda: w.breakage is not None)
    if me.hear() == "ahead":
        outcome(w.advance)  # the world is broken; the step counts
    w.reform(TIMEOUT)
    told = {"counted": dict(w._gen.operations.totals.collectives), "stuck": tuple(stuck)}
    me.emit("told", failed=outcome(lambda: w.all_reduce(torch.ones(1)))["kinds"], **told)
    me.hear()


def test_a_state_may_take_longer_than_the_timeout_of_operations(cast):
    """All wait until it is there: a member that neither sends nor receives it does not begin its next operation."""
    members = {each.expect("in").rank: each for each in [cast.start(waits, number) for number in range(4)]}
    members.pop(3).kill()
    for rank, each in members.items():
        each.say("behind" if rank == 1 else "ahead")
    for _ in range(8):
        members[0].expect("part", SOON)
        assert not members[2].conn.poll(TIMEOUT / 5), "it ended before the state was there"
        members[0].say("go on")
    told = [each.expect("told", SOON) for each in members.values()]
    assert [each.failed for each in told] == [[], [], []]
    assert [(each.counted, each.stuck) for each in told] == [({}, ())] * 3, "to wait for it is no operation"


def test_a_state_that_has_come_is_loaded_though_another_transfer_has_failed(monkeypatch):
    """Or its member, which has it, would be left with half of it where it was received in place."""
    monkeypatch.setattr(state_transfer, "receive_state", lambda *_, **__: {"": "the others'"})
    loaded, whole = [], []
    world = SimpleNamespace(
        _plan=SimpleNamespace(state=SimpleNamespace(load_state_dict=loaded.append), timeout=1.0),
        _state_is_torn=whole.clear,
        _state_is_whole=whole.append,
    )
    gen = SimpleNamespace(lane=object())

    def broken():
        raise ConnectionResetError("another member is lost")

    with pytest.raises(ConnectionResetError):
        _receive(world, gen, 0, KeptState(), broken, new=False)
    assert (loaded, whole) == (["the others'"], [gen])


def of_a_version(me, *, older):
    """`older`: of one that knows no option of a lane but M8D_CHECK, which it sets, and takes each for that."""
    if older:
        os.environ["M8D_CHECK"] = "1"
        door.MEETS = 0
        Roster.checks = property(lambda roster: all(each.lane.options for each in roster.members))
        state_module._meeting = lambda *_: lambda _: None
    state = Parts(me.rank)
    w = enter(me, "3:3", state=state)
    failed = outcome(lambda: w.all_reduce(torch.ones(1)))["kinds"]
    me.emit("told", failed=failed, ready=w.ready, value=float(state.tensors["w7"][0]))
    me.hear()


def test_members_of_two_versions_bring_a_state_and_call_alike(cast):
    """All do as the older one does."""
    members = [cast.start(of_a_version, number, older=number == 1) for number in range(3)]
    told = [each.expect("told", SOON) for each in members]
    assert [(each.failed, each.ready) for each in told] == [([], True)] * 3
    assert len({each.value for each in told}) == 1


def test_a_state_goes_to_several_members_at_once(monkeypatch):
    """One after the other, the last would wait for all the others, and for no longer than the world's timeout."""
    together, sent = threading.Barrier(3, timeout=SOON), []

    def send(_lane, rank, state, **_):
        together.wait()
        sent.append((rank, state[""]["done"].item()))

    monkeypatch.setattr(state_transfer, "send_state", send)
    plan = SimpleNamespace(state=Model(), timeout=1.0)
    _send(SimpleNamespace(lane=object()), plan, [1, 2, 4])
    assert sorted(sent) == [(1, 0.0), (2, 0.0), (4, 0.0)]
