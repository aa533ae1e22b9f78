"""The numbers of real processes: a member is killed, the world breaks and is joined again, and no counter goes back."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import os
import time

import pytest

pytest.importorskip("prometheus_client", reason="the numbers are of the extra m8d[metrics]")
pytest.importorskip("opentelemetry.sdk", reason="spans are of the extra m8d[otel]")

import torch
import torch.distributed as dist
from kits.contract.worldkit import PATIENCE
from prometheus_client.parser import text_string_to_metric_families

import multiworld as mw

ROUNDS = 5


def works(world, other):
    """Each way that messages and collectives go: 5 sends and receives of 16 bytes, 3 + 1 collectives."""
    t = torch.ones(4)
    if world.rank:
        world.send(t, other)
        world.recv(t, None)
        world.isend(t, other).wait()
        world.irecv(t, other).wait()
    else:
        world.recv(t, None)
        world.send(t, other)
        world.irecv(t, other).wait()
        world.isend(t, other).wait()

    async def awaited():
        if world.rank:
            await world.aio.send(t, other)
            await world.aio.recv(t, other)
        else:
            await world.aio.recv(t, other)
            await world.aio.send(t, other)
        await world.aio.all_reduce(t)

    asyncio.run(awaited())
    with world:
        for ends in (dist.send, dist.recv) if world.rank else (dist.recv, dist.send):
            ends(t, other)
        works = dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, t, other), dist.P2POp(dist.irecv, t.clone(), other)]
        )
        for work in works:
            work.wait()
        dist.all_reduce(t)
    world.all_reduce(t)
    world.barrier()


def traces():
    """Begin to trace; return what returns the spans that are over: name, id of the generation, links."""
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    mw.trace_worlds(provider)
    return lambda: [
        (
            span.name,
            span.attributes["multiworld.generation.id"],
            [(link.context.trace_id, link.context.span_id) for link in span.links],
        )
        for span in exporter.get_finished_spans()
    ]


def serves(me, size, lane=True):
    torch.set_num_threads(1)
    spans = traces()
    if not lane:
        os.environ["M8D_LANE"] = "0"
    with mw.serve_metrics() as server:
        world = mw.join("w", me.rank, size, store=me.store, timeout=PATIENCE)
        me.emit("serves", url=server.url)
        works(world, 1 - me.rank)
        me.emit("worked", spans=spans())
        while (what := me.hear()) != "end":
            if what == "rejoin":
                world.rejoin()
            works(world, 1 - me.rank)
            me.emit("worked", spans=spans())
        world.close()
        me.emit("closed")
        me.hear()


def get(url):
    address, path = url.removeprefix("http://").split("/", 1)
    with contextlib.closing(http.client.HTTPConnection(address, timeout=PATIENCE)) as connection:
        connection.request("GET", f"/{path}")
        answer = connection.getresponse()
        return answer.status, answer.read().decode()


def scrape(url):
    status, body = get(f"{url}metrics")
    assert status == 200, body
    return {
        (s.name.removeprefix("multiworld_"), *(value for _, value in sorted(s.labels.items()))): s.value
        for f in text_string_to_metric_families(body)
        for s in f.samples
    }


def until(url, done):
    end = time.monotonic() + PATIENCE
    while not done(found := scrape(url)):
        assert time.monotonic() < end, found
        time.sleep(0.02)
    return found


def went_back(before, after):
    rising = ("_total", "_count", "_sum", "_bucket")
    return {key: (value, after.get(key)) for key, value in before.items() if key[0].endswith(rising) and after.get(key, -1) < value}  # fmt: skip


def counted(whole):
    """What `works` has done, and the world."""
    assert whole["operations_total", "send", "w"] == whole["operations_total", "recv", "w"] == ROUNDS
    assert (
        whole["message_bytes_total", "sent", "w"]
        == whole["message_bytes_total", "received", "w"]
        == 16 * ROUNDS
    )
    assert whole["operations_total", "all_reduce", "w"] == 3
    assert whole["collective_bytes_total", "all_reduce", "w"] == 48
    assert whole["operations_total", "barrier", "w"] == 1
    assert whole["joins_total", "active", "w"] == whole["join_duration_seconds_count",] == 1
    assert whole["worlds", "active"] == whole["world_active", "w"] == whole["world_ready", "w"] == 1
    assert (whole["world_generation", "w"], whole["world_members", "w"]) == (1, 2)


@pytest.mark.parametrize("lane", [True, False])
def test_a_kill_and_the_rejoin(cast, lane):
    first, second = cast.all(serves, 2, lane=lane)
    url = first.expect("serves").url
    for each in (first, second):
        each.expect("worked")
    whole = scrape(url)
    counted(whole)
    assert get(f"{url}ready") == (200, "ok\n")
    assert get(f"{url}ready?world=w") == (200, "ok\n")
    assert get(f"{url}live") == (200, "ok\n")

    second.kill()
    broken = until(url, lambda found: found["breakages_total", "crashed", "w"])
    assert broken["worlds", "broken"] == 1
    assert broken["world_active", "w"] == broken["recovery_duration_seconds_count",] == 0
    time.sleep(0.1)
    assert scrape(url)["world_broken_seconds", "w"] > 0.1
    status, text = get(f"{url}ready?world=w")
    assert status == 503
    assert text.startswith("world 'w': broken, generation 1: crashed ")
    assert get(f"{url}ready")[0] == 503
    assert get(f"{url}live") == (200, "ok\n")
    assert went_back(whole, broken) == {}

    second = cast.start(serves, 1, size=2, lane=lane)
    first.say("rejoin")
    mine, theirs = (each.expect("worked").spans for each in (first, second))
    healed = scrape(url)
    assert went_back(broken, healed) == {}
    assert healed["world_generation", "w"] == 2
    assert (healed["world_active", "w"], healed["world_broken_seconds", "w"]) == (1, 0)
    assert healed["recovery_duration_seconds_count",] == 1
    assert healed["recovery_duration_seconds_sum",] == pytest.approx(healed["broken_seconds_total", "w"])
    assert healed["joins_total", "active", "w"] == 2
    assert healed["operations_total", "send", "w"] == 2 * ROUNDS
    assert healed["operations_total", "all_reduce", "w"] == 6
    assert get(f"{url}ready") == (200, "ok\n")
    assert scrape(second.heard[0].url)["operations_total", "send", "w"] == ROUNDS, (
        "a new process begins at nothing"
    )

    names = [name for name, *_ in mine]
    assert names == ["multiworld.join", "multiworld.join", "multiworld.recovery"]
    (_, before, (broken_link,)), joined, (_, _, links) = mine
    assert theirs == [joined], "the same id and context in another process"
    assert before != joined[1]
    assert links == [broken_link, *joined[2]]

    for each in (first, second):
        each.say("end")
        each.expect("closed")
    closed = scrape(url)
    assert ("world_active", "w") not in closed
    assert went_back(healed, closed) == {}, "what was counted stays"
    assert get(f"{url}ready")[0] == 200
    assert get(f"{url}ready?world=w") == (503, "world 'w': not joined\n")
    for each in (first, second):
        each.say("end")
        assert each.finish() == 0


# -- a state, an advance, and the spans of both members --------------------------------------------------------

ELEMENTS = 100_000


class Numbers:
    def __init__(self, value):
        self.tensor = torch.full((ELEMENTS,), value)

    def state_dict(self):
        return {"tensor": self.tensor}

    def load_state_dict(self, state):
        self.tensor = state["tensor"]


def grows(me, size):
    torch.set_num_threads(1)
    spans = traces()
    with mw.serve_metrics() as server:
        me.emit("serves", url=server.url)
        numbers = Numbers(float(me.rank))
        world = mw.join(
            "w", None, "1:2", store=me.store, seat=str(me.rank), last_call=0, timeout=PATIENCE, state=numbers
        )
        me.emit("joined")
        while world.world_size < 2:
            world.advance()
            time.sleep(0.01)
        world.barrier()
        me.emit(
            "grown",
            rank=world.rank,
            generation=world.generation,
            spans=spans(),
            value=float(numbers.tensor[0]),
        )
        me.hear()
        world.close()


def test_a_newcomer_gets_the_state_and_spans_meet(cast):
    first = cast.start(grows, 0, size=2)
    first.expect("joined")
    second = cast.start(grows, 1, size=2)
    one, two = first.expect("grown"), second.expect("grown")
    assert (one.rank, two.rank, two.value, one.generation) == (0, 1, 0.0, two.generation)
    there, came = scrape(first.heard[0].url), scrape(second.heard[0].url)
    assert there["joins_total", "active", "w"] == there["joins_total", "advanced", "w"] == 1
    assert there["joins_total", "failed", "w"] == 0
    assert came["joins_total", "active", "w"] == 1
    assert came["state_received_bytes_total", "w"] == 4 * ELEMENTS
    assert came["state_transfer_duration_seconds_count",] == 1
    assert there["state_transfer_duration_seconds_count",] == 0
    assert (there["world_members", "w"], came["world_ready", "w"]) == (2, 1)
    assert ("operations_total", "send", "w") not in there, "parts of a state are no messages of the program"
    assert ("operations_total", "recv", "w") not in came
    assert there["operations_total", "barrier", "w"] == 1
    assert [name for name, *_ in one.spans] == ["multiworld.join"], "its own generation of one member"
    (_, shared, links), transfer = two.spans
    assert transfer == ("multiworld.state_transfer", shared, links)
    assert shared != one.spans[0][1]
    second.kill()
    first.say("end")
    assert first.finish() == 0
