"""What an engine hears while the digests of a version are computed."""

from __future__ import annotations

import functools
import gc
import threading
import weakref
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

import multiworld as mw  # noqa: E402  (torch may be missing)
from multiworld.weights import publisher, shelf  # noqa: E402

PATIENCE = 300.0  # seconds: a collection of all objects takes many where the processor is shared by ten


@pytest.fixture
def slow(monkeypatch):
    """Digests that take until they are let."""
    began, let, calls = threading.Event(), threading.Event(), []

    def summed(room):
        calls.append(room)
        began.set()
        assert let.wait(PATIENCE)
        return f"digest of {room}"

    monkeypatch.setattr(shelf, "summed", summed)
    return SimpleNamespace(began=began, let=let, calls=calls)


def listed(take=list):
    """The list of engines, of a publisher that stays the newest."""
    return SimpleNamespace(take=take, holder=lambda mine: mine, claim=lambda _: None, close=lambda: None)


def version():
    return shelf.Version("session", 3, 100, [], ["a", "b"])


def test_the_digests_are_computed_once_and_not_waited_for_longer_than_said(slow):
    it = version()
    assert it.head(0.01) is None
    assert it.head(0.01) is None
    slow.let.set()
    head = it.head(PATIENCE)
    assert (head.version, head.digests) == (3, ("digest of a", "digest of b"))
    assert it.head(0.0) == head
    assert slow.calls == ["a", "b"]


def test_an_error_of_the_digests_is_raised_to_all_that_wait(monkeypatch):
    def summed(_room):
        raise MemoryError("no room")

    monkeypatch.setattr(shelf, "summed", summed)
    it = version()
    for _ in range(2):
        with pytest.raises(MemoryError, match="no room"):
            it.head(PATIENCE)


def test_digests_are_computed_when_a_thread_can_be_had_again(monkeypatch):
    monkeypatch.setattr(shelf, "summed", "digest of {}".format)
    thread = shelf.threading.Thread

    def none(*_, **__):
        raise RuntimeError("can't start new thread")

    it = version()
    monkeypatch.setattr(shelf.threading, "Thread", none)
    with pytest.raises(RuntimeError, match="new thread"):
        it.head(PATIENCE)
    monkeypatch.setattr(shelf.threading, "Thread", thread)
    assert it.head(PATIENCE).digests == ("digest of a", "digest of b")


def test_the_trainer_has_one_version_more_than_it_keeps_only_while_it_copies():
    most = 3
    kept = shelf.Shelf(most, lambda: False)
    made, alive = {}, weakref.WeakSet()
    for number in range(8):
        rooms = list(kept.rooms()) or [Bytes()]
        alive.update(rooms)
        assert len(alive) <= most + 1
        made[number] = shelf.Version("session", number, 100, [], rooms)
        del rooms
        kept.put(made[number])
        assert kept.take(number - 1, 1.0, lambda: False) is made[number], "each is sent, to one engine"
        for cut in [number for number, each in made.items() if each.cut.is_set()]:
            kept.done(made.pop(cut))
        assert len(alive) <= most
    assert list(made) == [0, 1, 7]


def test_a_publisher_that_is_closed_keeps_what_is_being_sent_alone():
    closed = threading.Event()
    kept, alive = shelf.Shelf(3, closed.is_set), weakref.WeakSet()

    def publish(number):
        rooms = [Bytes()]
        alive.update(rooms)
        kept.put(shelf.Version("session", number, 100, [], rooms))

    publish(0)
    publish(1)  # the first one is spare now
    sent = kept.take(0, 1.0, lambda: False)
    publish(2)
    assert len(alive) == 3
    closed.set()
    kept.clear()
    assert list(alive) == sent.rooms
    kept.done(sent)
    publish(3)
    del sent
    assert not alive


def test_engines_that_load_for_long_hold_no_more_versions_than_are_kept(monkeypatch):
    """Each was told of another version, and is busy; later it asks for that one, or has it already."""
    most, needs = 3, [[0], [0], [0], [], [0]]
    kept, alive, sent = shelf.Shelf(most, lambda: False), weakref.WeakSet(), []
    monkeypatch.setattr(shelf, "summed", lambda _room: "digest")
    monkeypatch.setattr(publisher.wire, "send", lambda _world, _what: None)
    monkeypatch.setattr(publisher.wire, "send_number", lambda world, number: sent.append((world.at, number)))
    monkeypatch.setattr(publisher.wire, "receive", lambda world: next(world.answers))
    mine = SimpleNamespace(_plan=SimpleNamespace(timeout=PATIENCE), _shelf=kept)

    def answers(world, need):
        world.told.set()
        yield {"busy": True}
        assert world.loaded.wait(PATIENCE)
        yield {"busy": True}
        yield {"need": need}
        yield {"got": world.at}

    def serve(world):
        held = kept.take(world.at - 1, PATIENCE, lambda: False)
        try:
            world.whole = publisher.Publisher._send(mine, world, held)
        finally:
            kept.done(held)

    worlds, threads = [], []
    try:
        for number, need in enumerate(needs):
            rooms = list(kept.rooms()) or [Bytes()]
            alive.update(rooms)
            kept.put(shelf.Version("session", number, 100, [], rooms))
            del rooms
            gc.collect()
            assert len(alive) <= most
            world = SimpleNamespace(at=number, told=threading.Event(), loaded=threading.Event(), whole=None)
            world.answers, world.send = answers(world, need), lambda _room, _rank: None
            worlds.append(world)
            threads.append(threading.Thread(target=serve, args=(world,)))
            threads[-1].start()
            assert world.told.wait(PATIENCE)
    finally:
        for world in worlds:
            world.loaded.set()
        for thread in threads:
            thread.join(PATIENCE)
    # The two oldest are sent whole, and the newest; of those in between one is gone, and the other was not needed.
    assert [world.whole for world in worlds] == [True, True, False, True, True]
    assert sorted(sent) == [(0, 0), (1, 0), (2, -1), (4, 0)]
    assert len(alive) <= most


def test_versions_whose_digests_take_long_are_let_go_when_they_are_cut(slow, monkeypatch):
    """Each has one bucket whose digest is being computed, and another one, which is looked at here."""
    most = 3
    kept, alive, threads, made = shelf.Shelf(most, lambda: False), weakref.WeakSet(), [], []
    monkeypatch.setattr(publisher.wire, "send", lambda _world, _what: None)
    monkeypatch.setattr(publisher.wire, "receive", lambda _world: {"need": []})
    mine = SimpleNamespace(_plan=SimpleNamespace(timeout=4 * 0.01), _shelf=kept)

    def serve(number, held):
        try:
            publisher.Publisher._send(mine, number, held)
        finally:
            kept.done(held)

    try:
        for number in range(6):
            rooms = [*kept.rooms()][1:] or [Bytes()]
            alive.update(rooms)
            made.append(shelf.Version("session", number, 100, [], [f"first of {number}", *rooms]))
            del rooms
            kept.put(made[-1])
            held = kept.take(number - 1, PATIENCE, lambda: False)
            threads.append(threading.Thread(target=serve, args=(number, held)))
            threads[-1].start()
            for each, thread in zip(made, threads, strict=True):
                if each.cut.is_set():
                    thread.join(10)
                    assert not thread.is_alive(), "it goes on with the newest version"
            gc.collect()
            assert len(alive) <= most
    finally:
        slow.let.set()
        for thread in threads:
            thread.join(PATIENCE)
    assert [each.number for each in made if each.cut.is_set()] == [2, 3, 4]


@pytest.mark.parametrize("why", ["cut", "its engine is lost"])
def test_no_more_digests_are_computed_of_a_version_that_no_engine_gets(slow, why):
    kept, it, ended = shelf.Shelf(3, lambda: False), version(), threading.Event()
    kept.put(it)
    assert kept.take(-1, PATIENCE, lambda: False) is it
    assert it.head(0.01) is None
    it._summed.add_done_callback(lambda _: ended.set())
    assert slow.began.wait(PATIENCE)
    if why == "cut":
        it.cut.set()
    else:
        kept.done(it)
        kept.put(shelf.Version("session", 4, 100, [], ["c"]))
    slow.let.set()
    assert ended.wait(PATIENCE)
    assert it.head(0.0) is None
    assert slow.calls == ["a"]


class Bytes:
    """Stands in for a bucket."""


def test_an_engine_is_served_again_after_an_error_of_any_kind(monkeypatch):
    """In its own thread, in the one that looks for engines, and where there is no thread for it."""
    steps = iter(["no list", "no thread", "no memory", "served"])
    served, step = threading.Event(), [""]

    def take():
        step[0] = next(steps, "")
        if step[0] == "no list":
            raise MemoryError(step[0])
        return ["engine"] if step[0] else []

    def joined(mine, seat):
        if step[0] == "no memory":
            raise MemoryError(step[0])
        served.set()

    def start(mine, function, name, *arguments):
        if step[0] == "no thread":
            raise RuntimeError(step[0])
        function(*arguments)

    announced = listed(take)
    monkeypatch.setattr(publisher, "AGAIN", 0.0)
    monkeypatch.setattr(publisher.Publisher, "_joined", joined)
    monkeypatch.setattr(publisher.Publisher, "_open", lambda _mine: announced)
    with monkeypatch.context() as patch:
        patch.setattr(publisher.Publisher, "_start", lambda *_: None)
        mine = publisher.Publisher("w", {}, "file:///nowhere")
    monkeypatch.setattr(publisher.Publisher, "_start", start)
    thread = threading.Thread(target=mine._look)
    thread.start()
    try:
        assert served.wait(PATIENCE)
    finally:
        mine._closed.set()
        thread.join(PATIENCE)


@pytest.mark.parametrize("seconds", [float("inf"), 1e10])
def test_a_publisher_waits_for_a_time_without_an_end(monkeypatch, seconds):
    announced = listed()
    monkeypatch.setattr(publisher.Publisher, "_open", lambda _mine: announced)
    mine = publisher.Publisher("w", {}, "file:///nowhere")
    wait_for, ended, closes = mine._shelf.changed.wait_for, [], []

    def waits(over, timeout):  # the lock is held: the close comes when this waits
        closes.append(threading.Thread(target=lambda: ended.append(mine.close(seconds))))
        closes[0].start()
        return wait_for(over, timeout)

    monkeypatch.setattr(mine._shelf.changed, "wait_for", waits)
    try:
        assert mine.wait(1, seconds) == 0
    finally:
        mine._closed.set()
        closes[0].join()
    assert ended == [True]


def test_what_failed_on_rank_0_alone_is_published_again(monkeypatch):
    """The others cannot know, and must not leave it alone: not with a version that it refuses, either."""
    lacks, asked = [True], {0: 0, 1: 0}

    def source(rank):
        asked[rank] += 1
        yield "a", torch.ones(2)
        if rank == 0 and lacks.pop():
            raise MemoryError("no memory on rank 0")

    announced = listed()
    monkeypatch.setattr(publisher.Publisher, "_open", lambda _mine: announced)
    monkeypatch.setattr(publisher.Publisher, "_start", lambda *_: None)
    first, second = (
        publisher.Publisher("w", functools.partial(source, rank), "file:///nowhere", rank=rank)
        for rank in range(2)
    )
    try:
        second.publish(3)
        with pytest.raises(MemoryError):
            first.publish(3)
        lacks[:] = [False] * 2
        for each in (second, first):
            each.publish(3)
            assert each.version == 3
        assert first._shelf.newest.number == 3
        second.publish(3)
        with pytest.raises(ValueError, match="version 3 after 3"):
            first.publish(3)
        assert asked == {0: 3, 1: 3}, "rank 0 was there each time"
        for each in (first, second):
            for version in (2, -1):
                with pytest.raises(ValueError, match=f"version {version} after 3"):
                    each.publish(version)
        assert asked == {0: 3, 1: 3}
    finally:
        first.close()
        second.close()


def test_rank_0_takes_part_where_a_newer_publisher_has_closed_it(monkeypatch):
    """The others cannot know: they would wait for its shards until the timeout, and their world would break."""
    asked = []

    def source():
        asked.append(first.version)
        yield "a", torch.ones(2)

    monkeypatch.setattr(publisher.Publisher, "_open", lambda _mine: listed())
    monkeypatch.setattr(publisher.Publisher, "_start", lambda *_: None)
    first = publisher.Publisher("w", source, "file:///nowhere")
    first.publish(1)
    assert first.close()
    for version in (2, 2):
        with pytest.raises(ValueError, match="'w' is closed"):
            first.publish(version)
    assert asked == [None, 1, 1]


@pytest.mark.parametrize("other", [2, 3])
def test_of_two_publishes_at_once_the_one_with_the_smaller_number_is_refused(monkeypatch, other):
    """An engine would go back, and two engines have other weights of one number."""

    def source():
        value = float(mine._shelf.last)
        if value == 1.0:
            mine._shelf.put(shelf.Version("session", other, 100, [], ["of another thread"]))
        yield "a", torch.full((2,), value)

    monkeypatch.setattr(publisher.Publisher, "_open", lambda _mine: listed())
    monkeypatch.setattr(publisher.Publisher, "_start", lambda *_: None)
    mine = publisher.Publisher("w", source, "file:///nowhere")
    try:
        mine.publish(1)
        with pytest.raises(ValueError, match=f"version 2 after {other}"):
            mine.publish(2)
        assert mine._shelf.newest.rooms == ["of another thread"]
        mine.publish(4)
    finally:
        mine.close()


def test_a_number_whose_publish_was_interrupted_is_not_given_to_other_weights(monkeypatch):
    """Engines that have the first would stay ready with it."""
    monkeypatch.setattr(publisher.Publisher, "_open", lambda _mine: listed())
    mine = publisher.Publisher("w", {"a": torch.ones(2)}, "file:///nowhere")
    notify = mine._shelf.changed.notify_all

    def interrupted():
        raise KeyboardInterrupt

    try:
        mine._shelf.changed.notify_all = interrupted
        with pytest.raises(KeyboardInterrupt):
            mine.publish(1)
        mine._shelf.changed.notify_all = notify
        assert mine.version == 1
        with pytest.raises(ValueError, match="version 1 after 1"):
            mine.publish(1)
        mine.publish(2)
        assert mine._shelf.newest.number == 2
    finally:
        mine._shelf.changed.notify_all = notify
        assert mine.close()
    assert mine.version == 2


def test_an_engine_hears_that_its_trainer_works_while_the_digests_are_computed(slow, monkeypatch):
    """It would take the trainer for lost after the world's timeout, and never get weights whose digests take longer."""
    sent = []

    def send(_world, what):
        sent.append(what["kind"])
        if len(sent) == 3:
            slow.let.set()

    answers = iter([{"need": []}, {"got": 3}])
    monkeypatch.setattr(publisher.wire, "send", send)
    monkeypatch.setattr(publisher.wire, "receive", lambda _world: next(answers))
    mine = SimpleNamespace(_plan=SimpleNamespace(timeout=4 * 0.01), _shelf=shelf.Shelf(3, lambda: False))
    assert publisher.Publisher._send(mine, object(), version())
    assert sent[:3] == ["idle"] * 3
    assert sent[-1] == "version"


def test_what_failed_on_another_rank_alone_is_published_with_a_larger_version(monkeypatch):
    """Rank 0 has published it, and cannot know."""
    lost = [True]

    def source():
        yield "a", torch.ones(2)
        if lost.pop():
            raise mw.BrokenWorldException("trainers", "a rank was lost")

    monkeypatch.setattr(publisher.Publisher, "_open", lambda _mine: listed())
    monkeypatch.setattr(publisher.Publisher, "_start", lambda *_: None)
    first = publisher.Publisher("w", {"a": torch.ones(2)}, "file:///nowhere")
    second = publisher.Publisher("w", source, "file:///nowhere", rank=1)
    try:
        first.publish(3)
        with pytest.raises(mw.BrokenWorldException):
            second.publish(3)
        assert (first.version, second.version) == (3, None)
        lost[:] = [False] * 2
        second.publish(3)
        with pytest.raises(ValueError, match="version 3 after 3"):
            first.publish(3)
        for each in (first, second):
            each.publish(4)
            assert each.version == 4
    finally:
        first.close()
        second.close()
