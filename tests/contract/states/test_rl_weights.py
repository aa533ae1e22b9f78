"""`multiworld.weights`: engines and trainers that are killed, at any moment."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist
from kits.contract.stopkit import die, die_in_the_next_join
from kits.contract.worldkit import HANG, PATIENCE, SOON, outcome, threads_ended

import multiworld as mw
from multiworld import weights
from multiworld.weights import publisher as publishing
from multiworld.weights import wire

LONG = 10 * PATIENCE
"""Seconds, of each operation and join: what ends before was ended by the verdict."""
BUCKET = 1 << 20
TORCH = tuple(int(each) for each in torch.__version__.split(".")[:2])
LARGE = 64 << 20
"""Bytes of a large model."""


def large(value, size=LARGE):
    """Some tensors of `size` bytes, whose values are those of one version."""
    return {
        "wide": torch.full((size // 8,), value),
        "rest": torch.full((size // 8, 2), value).bfloat16(),
        "scale": torch.tensor(value),
        "none": torch.zeros(0, 3),
        "mask": torch.ones(5, dtype=torch.bool),
    }


def values_of(model):
    floats = [tensor for tensor in model.values() if tensor.is_floating_point() and tensor.numel()]
    return {float(find(tensor)) for tensor in floats for find in (torch.min, torch.max)}


def trains(me, size=LARGE, **options):
    """Publishes what the test says; tells how long that took, and the digest."""
    publisher = weights.Publisher(
        "w", model := large(0.0, size), me.store, bucket_bytes=BUCKET, timeout=PATIENCE, **options
    )
    me.emit("in")
    for version, engines in iter(me.hear, "end"):
        for tensor in model.values():
            if tensor.is_floating_point():
                tensor.fill_(version)
        began = time.monotonic()
        publisher.publish(version)
        took = time.monotonic() - began
        got = publisher.wait(engines, PATIENCE) if engines else 0
        me.emit(
            "published",
            took=took,
            got=got,
            digest=weights.digest(model, BUCKET),
            worlds=sorted(mw.worlds()),
            engines=publisher.engines,
        )
    me.emit("closed", all=publisher.close())


def follows(me, size=LARGE, seat=None, dies_after=None, dies_joining=False):
    """Has the versions that come; `dies_after` so many buckets of the first one."""
    if dies_joining:
        die_in_the_next_join()
    if dies_after is not None:
        receive, got = wire.receive_number, []

        def counted(world):
            got.append(receive(world))
            if len(got) > dies_after + 1:  # the first is the size of the head
                die()
            return got[-1]

        wire.receive_number = counted
    model = large(-1.0, size)
    engine = weights.Subscriber("w", model, me.store, seat=seat, timeout=PATIENCE)
    me.emit("in")
    for what in iter(me.hear, "end"):
        if what == "update":
            version = engine.update(PATIENCE)
            same = engine.digest == weights.digest(model, BUCKET)
            values = values_of(model)
            me.emit("has", version=version, same=same, values=values, ready=engine.ready)
        elif what == "tell":
            me.emit(
                "is",
                version=engine.version,
                told=engine.told,
                ready=engine.ready,
                connected=engine.connected,
                error=type(engine.error).__name__,
                values=values_of(model),
            )
    me.emit("closed", all=engine.close())


def has(engine, version):
    engine.say("update")
    told = engine.expect("has")
    assert (told.version, told.same, told.values) == (version, True, {float(version)})


def until_it_is(engine, **wanted):
    deadline = time.monotonic() + PATIENCE
    while True:
        engine.say("tell")
        seen = engine.expect("is")
        if all(seen.data[name] == value for name, value in wanted.items()):
            return seen
        assert time.monotonic() < deadline, (seen, wanted)
        time.sleep(0.01)


def publish(trainer, version, engines):
    trainer.say((version, engines))
    told = trainer.expect("published")
    assert told.got >= engines
    return told


def test_engines_are_killed_in_transfers_and_in_joins_and_the_others_have_each_version(cast):
    trainer = cast.start(trains)
    trainer.expect("in")
    stays = cast.start(follows, seat="stays")
    publish(trainer, 1, 1)
    has(stays, 1)
    for version, how in ((2, {"dies_after": 20}), (3, {"dies_joining": True}), (4, {"dies_after": 0})):
        dies = cast.start(follows, seat="dies", **how)
        assert dies.finish() == -signal.SIGKILL
        told = publish(trainer, version, 1)
        assert told.took < SOON / 5
        has(stays, version)
    comes = cast.start(follows, seat="dies")
    has(comes, 4)
    told = publish(trainer, 5, 2)
    assert told.engines == {"stays": 5, "dies": 5}
    comes.kill()
    version, deadline = 6, time.monotonic() + PATIENCE
    while publish(trainer, version, 1).worlds != ["w/stays"]:
        assert time.monotonic() < deadline, "worlds of the dead are kept"
        version += 1
    has(stays, version)
    for each in (trainer, stays):
        each.say("end")
        assert each.expect("closed").all


def dies_sending(me, after, **options):
    send, sent = wire.send_number, []

    def counted(world, number):
        sent.append(number)
        send(world, number)
        if sent[-1] == after:  # the number of a bucket
            die()

    wire.send_number = counted
    trains(me, **options)


def test_a_transfer_that_breaks_off_changes_nothing_and_goes_on_with_the_next_trainer(cast):
    trainer = cast.start(trains)
    trainer.expect("in")
    engine = cast.start(counts)
    publish(trainer, 1, 1)
    has(engine, 1)
    trainer.kill()
    trainer = cast.start(dies_sending, after=40)
    trainer.expect("in")
    trainer.say((2, 1))
    assert trainer.finish() == -signal.SIGKILL
    seen = until_it_is(engine, connected=False, told=2)
    assert (seen.version, seen.ready, seen.values) == (1, False, {1.0})
    engine.say("count")
    before = engine.expect("count").buckets
    trainer = cast.start(trains)
    trainer.expect("in")
    publish(trainer, 2, 1)
    has(engine, 2)
    engine.say("count")
    buckets = LARGE // BUCKET + 1
    assert engine.expect("count").buckets - before <= buckets - 40, "those that had come were sent again"


def counts(me):
    """`follows`, and tells how many buckets have come."""
    came, receive, hear = [], wire.receive_number, me.hear

    def counted(world):
        came.append(receive(world))
        return came[-1]

    def answered():
        while (what := hear()) == "count":
            me.emit("count", buckets=sum(number < 100 for number in came))  # others are sizes of messages
        return what

    wire.receive_number = counted
    me.hear = answered
    follows(me)


def test_an_engine_is_not_ready_with_an_old_version_and_skips_to_the_newest(cast):
    trainer = cast.start(trains, size=1 << 20)
    trainer.expect("in")
    engine = cast.start(follows, size=1 << 20)
    publish(trainer, 1, 1)
    has(engine, 1)
    assert until_it_is(engine, ready=True).version == 1
    for version in range(2, 7):
        publish(trainer, version, 1)  # has come whole, and is not loaded
    seen = until_it_is(engine, told=6)
    assert (seen.version, seen.ready, seen.values) == (1, False, {1.0})
    has(engine, 6)
    assert until_it_is(engine, ready=True).version == 6


def test_a_stopped_engine_holds_nobody_up(cast):
    size = 8 * BUCKET
    trainer = cast.start(trains, size=size, hang_timeout=HANG)
    trainer.expect("in")
    stays, stops = (cast.start(follows, size=size, seat=seat) for seat in ("stays", "stops"))
    publish(trainer, 1, 2)
    stops.stop()
    for version in range(2, 12):  # more than are kept in memory
        assert publish(trainer, version, 1).took < SOON / 5
        has(stays, version)
    stops.go_on()
    publish(trainer, 12, 2)
    has(stops, 12)


def damages(me):
    head = publishing.Version.head

    def once(self, within):
        found = head(self, within)
        if found is None:
            return None
        publishing.Version.head = head
        return found._replace(digests=("0" * 64, *found.digests[1:]))

    publishing.Version.head = once
    trains(me, size=1 << 20)


def test_a_damaged_bucket_is_never_loaded(cast):
    trainer = cast.start(damages)
    trainer.expect("in")
    engine = cast.start(follows, size=1 << 20)
    publish(trainer, 1, 1)
    has(engine, 1)
    assert until_it_is(engine, ready=True).error == "StateTransferError"


def loads_others(me):
    engine = weights.Subscriber("w", {"other": torch.zeros(3)}, me.store, timeout=PATIENCE)
    told = outcome(lambda: engine.update(PATIENCE))
    by_function, got = {}, []
    plain = weights.Subscriber("w", lambda pairs: got.append(dict(pairs)), me.store, timeout=PATIENCE)
    plain.update(PATIENCE)
    expected = large(1.0, 1 << 20)
    same = {name for name, t in got[0].items() if torch.equal(t, expected[name])}
    late = outcome(lambda: weights.Subscriber("nobody", {}, me.store, timeout=PATIENCE).update(0.2))
    me.emit(
        "told", told=told, version=engine.version, same=same == set(expected), late=late, more=by_function
    )


def test_weights_that_do_not_fit_and_functions_that_load(cast):
    trainer = cast.start(trains, size=1 << 20)
    trainer.expect("in")
    publish(trainer, 1, 0)
    told = cast.start(loads_others).expect("told")
    assert (told.told["kinds"][0], told.version) == ("StateError", None)
    assert "'wide' is" in told.told["text"]
    assert told.late["kinds"][0] == "TimeoutError"
    assert told.same


def has_no_memory(me):
    """Its thread has no memory for the first version, once."""
    fit, short = weights.Subscriber._fit, [RuntimeError("can't allocate memory")]

    def fits(engine, sizes):
        if short:
            raise short.pop()
        fit(engine, sizes)

    weights.Subscriber._fit = fits
    engine = weights.Subscriber("w", large(-1.0, 1 << 20), me.store, timeout=PATIENCE)
    version = engine.update(LONG)
    me.emit("told", version=version, error=str(engine.error), kind=type(engine.error).__name__)


def test_an_engine_goes_on_after_an_error_of_any_kind(cast):
    trainer = cast.start(trains, size=1 << 20)
    trainer.expect("in")
    publish(trainer, 1, 0)
    told = cast.start(has_no_memory).expect("told", LONG)
    assert (told.version, told.kind) == (1, "StateTransferError")
    assert "can't allocate memory" in told.error


def loads_again(me):
    """Its function raises in the middle of the first version, once."""
    got = []

    def load(pairs):
        for name, _ in pairs:
            got.append(name)
            if len(got) == 2:
                raise RuntimeError("out of memory")

    engine = weights.Subscriber("w", load, me.store, timeout=PATIENCE)
    first = outcome(lambda: engine.update(PATIENCE))
    between = (engine.version, engine.ready)
    me.emit("told", first=first, between=between, version=engine.update(SOON), got=got, ready=engine.ready)


def test_a_version_is_loaded_again_when_a_function_has_raised(cast):
    """The trainer does not send it again: the engine would have no weights until the next one."""
    trainer = cast.start(trains, size=1 << 20)
    trainer.expect("in")
    publish(trainer, 1, 0)
    told = cast.start(loads_again).expect("told")
    assert (told.first["kinds"][0], told.between) == ("RuntimeError", (None, False))
    assert (told.version, told.ready) == (1, True)
    assert sorted(told.got[2:]) == sorted(large(1.0, 1 << 20))


def shards(me, size):
    from torch.distributed.fsdp import fully_shard

    world = mw.join("trainers", me.rank, size, store=me.store, timeout=LONG)
    torch.manual_seed(1)
    whole = torch.nn.Sequential(torch.nn.Linear(33, 17), torch.nn.Linear(17, 5))
    digest = weights.digest(whole)
    with world:
        net = fully_shard(whole, mesh=dist.init_device_mesh("cpu", (size,)))
        publisher = weights.Publisher("w", net, me.store, rank=me.rank, timeout=PATIENCE)
        publisher.publish(0)
    me.emit("digest", digest=digest, sharded=hasattr(next(net.parameters()), "full_tensor"))
    me.hear()
    publisher.close()


def gets_shards(me):
    net = torch.nn.Sequential(torch.nn.Linear(33, 17), torch.nn.Linear(17, 5))
    engine = weights.Subscriber("w", net, me.store, timeout=PATIENCE)
    engine.update(PATIENCE)
    me.emit("digest", digest=weights.digest(net), told=engine.digest)


@pytest.mark.skipif(TORCH < (2, 6), reason="FSDP2 of this torch needs a GPU")
def test_sharded_weights_come_whole(cast):
    trainers = cast.all(shards, 2)
    told = [each.expect("digest") for each in trainers]
    engine = cast.start(gets_shards).expect("digest")
    assert all(each.sharded for each in told)
    assert {each.digest for each in told} == {engine.digest} == {engine.told}
    for each in trainers:
        each.say("end")


ENDS = """
import sys, torch
from multiworld.weights import Publisher, Subscriber
role, store = sys.argv[1:]
model = torch.nn.Linear(100, 100)
if role == "trainer":
    end = Publisher("w", model, store, timeout=60)
    end.publish(1)
    assert end.wait(1, 60) == 1
    print("had", flush=True)
else:
    end = Subscriber("w", model, store, timeout=60)
    assert end.update(60) == 1
    sys.stdin.read()  # an engine that has ended has no weights
"""


def test_programs_that_close_nothing_end_well(cast):
    """Their threads are ended with the program, in Python and not in C++."""
    with contextlib.ExitStack() as stack:
        trainer, engine = (
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", ENDS, role, cast.store],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
            for role in ("trainer", "engine")
        )
        stack.callback(trainer.kill)
        stack.callback(engine.kill)
        assert trainer.stdout.readline() == "had\n"
        engine.stdin.close()
        assert [each.wait(PATIENCE) for each in (trainer, engine)] == [0, 0]


def test_calls_that_no_publisher_takes(tmp_path):
    store = f"file://{tmp_path}/store"
    with pytest.raises(mw.InvalidJoinError, match="versions=1"):
        weights.Publisher("w", {}, store, versions=1)
    publisher = weights.Publisher("w", {"a": 3}, store)
    with pytest.raises(mw.StateError, match="'a' is of type int"):
        publisher.publish(0)
    assert publisher.version is None
    assert publisher.wait(1, 0.1) == 0
    assert publisher.close()
    with weights_of({"a": torch.ones(2)}, store) as publisher:
        publisher.publish(3)
        with pytest.raises(ValueError, match="version 3 after 3"):
            publisher.publish(3)
        publisher.publish(torch.tensor(4))  # or numpy's; engines are told an integer
        assert (
            publisher._shelf.newest.head(PATIENCE).told()["version"].__class__
            is publisher.version.__class__
            is int
        )
        with pytest.raises(TypeError, match="float"):
            publisher.publish(5.5)
    with pytest.raises(ValueError, match="is closed"):
        publisher.publish(6)
    with pytest.raises(TypeError, match="float"):
        weights.Publisher("w", {}, store, bucket_bytes=1e6)
    assert threads_ended() == []


class weights_of:  # noqa: N801  (used as a function)
    def __init__(self, model, store):
        self.publisher = weights.Publisher("w", model, store)

    def __enter__(self):
        return self.publisher

    def __exit__(self, *_):
        assert self.publisher.close()
