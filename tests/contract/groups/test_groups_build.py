"""Building groups: what is refused, what gives up in time, backends by name, and nothing left after many."""

import contextlib
import datetime as dt
import gc
import inspect
import os
import resource
import signal
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from kits.contract.groupkit import (
    PATIENCE,
    SOON,
    Crew,
    blocked,
    run,
    settles,
    sockets,
    soon,
    threads,
    threads_left,
)

from multiworld._c10d.gloo import backend as gloo
from multiworld._c10d.group_spec import GroupSpec
from multiworld._c10d.nccl import backend as nccl
from multiworld._c10d.nccl import splitting
from multiworld._c10d.nccl.inflight import Traffic
from multiworld._c10d.routing import router
from multiworld._net.stores.store import PollingStore
from multiworld.errors import BackendError, JoinAbandonedError, JoinTimeoutError


def refused(member, backend, device):
    before, alone = sockets(), threads()
    began = time.monotonic()
    try:
        member.build("w", backend=backend, device=None if device is None else torch.device(device))
    except BackendError as error:
        text = error.value, error.rule, error.next_step
    else:
        return "built"
    return text, time.monotonic() - began < SOON, sockets() == before, threads() == alone, len(c10d._pg_map)


@pytest.mark.parametrize("backend", ["nope", "cpu:gloo,cuda:nope", "", "undefined", "mpi"])
def test_an_unknown_backend(backend):
    (((value, rule, step), *fine),) = run(1, refused, backend, None)
    assert value == f"backend={backend!r}"
    assert "gloo" in rule
    assert step
    assert fine == [True, True, True, 0]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl"])
def test_nccl_without_a_gpu(backend):
    (((value, rule, step), *fine),) = run(1, refused, backend, "cuda:0")
    if dist.is_nccl_available():
        assert "sees no CUDA device" in value
    else:
        assert "gloo" in rule
    assert step
    assert fine == [True, True, True, 0]


def alone(member, timeout, cancel_after):
    before, running = sockets(), threads()
    began = time.monotonic()

    def check():
        if cancel_after is not None and time.monotonic() - began > cancel_after:
            raise KeyError("cancelled")

    try:
        member.build("w", timeout=timeout, check_cancelled=check, size=2)
    except Exception as error:  # noqa: BLE001  (reported)
        took, seen = time.monotonic() - began, (type(error).__name__, str(error))
    clean = settles(lambda: sockets() == before and threads_left() == running)
    return seen, took, clean, len(c10d._pg_map), len(c10d._pg_names)


def test_nobody_else_comes():
    (((kind, text), took, clean, *maps),) = run(1, alone, 1.0, None)
    assert kind == "JoinTimeoutError"
    assert issubclass(JoinTimeoutError, TimeoutError)
    assert "within 1 s" in text
    assert took < SOON
    assert clean
    assert maps == [0, 0]


def test_cancelled_while_waiting_for_the_others():
    (((kind, text), took, clean, *maps),) = run(1, alone, 60.0, 0.3)
    assert (kind, text) == ("KeyError", "'cancelled'")
    assert took < SOON
    assert clean
    assert maps == [0, 0]


class Stopping(PollingStore):
    """Stops its process when gloo has published where it listens."""

    def set(self, key, value):
        super().set(key, value)
        if key.rpartition("/")[2].isdigit():
            os.kill(os.getpid(), signal.SIGSTOP)


def half_way(member, victim):
    before, running = sockets(), threads()
    if member.rank == victim:
        store = Stopping(member.handle, prefix="w/1")
        member.build("w", store=store)
    began = time.monotonic()

    def check():
        if time.monotonic() - began > 1.0:
            raise KeyError("cancelled")

    try:
        # Where gloo calls the member that hangs, its kernel answers, and that is enough.
        member.build("w", timeout=60.0, check_cancelled=check).close(soon())
    except KeyError:
        assert time.monotonic() - began > 1.0
    except JoinAbandonedError:
        member.store.set("gave up first", "x")  # the other one did
    took = time.monotonic() - began
    return took, settles(lambda: sockets() == before and threads_left() == running)


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_cancelled_while_a_member_hangs_in_the_middle(victim):
    with Crew(3, half_way, victim) as crew:
        for rank in set(range(3)) - {victim}:
            took, clean = crew.hear(rank)
            assert took < SOON
            assert clean


class Tiny(dist.ProcessGroup):
    def getBackendName(self):  # noqa: N802
        return "tiny"


def registered(member):
    seen = []

    def make(store, rank, size, timeout):
        store.set(f"hello{rank}", "x")
        store.wait([f"hello{other}" for other in range(size)])
        seen.append((rank, size, timeout))
        return Tiny(rank, size)

    dist.Backend.register_backend("tiny", make, devices=["cpu"])
    group = member.build("w", backend="tiny")
    with router.selected(group.state):
        rank, backend = dist.get_rank(), dist.get_backend()
    group.abort()
    return (
        seen == [(member.rank, 2, dt.timedelta(seconds=PATIENCE))],
        rank == member.rank,
        backend,
        group.close(soon()),
    )


def test_a_backend_registered_with_torch():
    assert run(2, registered) == [(True, True, "tiny", True)] * 2


def cycles(member, count):
    """Build, use, leave operations pending or just finished, close; again and again."""

    def once(number):
        group = member.build("w", generation=number + 1)
        member.meet(f"built{number}")  # as a join's commit: nobody leaves before all are there
        pg = group.pg
        big = torch.ones(100_000)
        if number % 3 == 0:
            work = pg.allreduce([big])
            del big
            work.wait()
            del work  # the worker may have the last reference to the tensor now
        elif number % 3 == 1:
            wait = blocked(lambda: pg.recv([torch.ones(1)], 1 - member.rank, 7).wait())
        else:
            router.enter(group.state)
            work = dist.all_reduce(big, async_op=True) if member.rank == 0 else None
            router.leave()
            del work
        pg = None
        closed = group.close(soon())
        if number % 3 == 1:
            assert wait()[0][0] != "returned"
        return closed

    closed = [once(number) for number in range(20)]
    settles(lambda: len(threads_left()) == 1)
    before, alone = len(sockets()), len(threads())
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    closed += [once(20 + number) for number in range(count)]
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory
    maps = [
        len(each) for each in (c10d._pg_map, c10d._pg_names, c10d._pg_group_ranks, c10d._pg_backend_config)
    ]
    fine = settles(lambda: (len(sockets()), len(threads_left())) == (before, alone))
    return closed.count(False), fine, grown, maps


def test_many_generations_leave_nothing_and_never_hang():
    for failed, fine, grown, maps in run(2, cycles, 300, timeout=240.0):
        assert failed == 0
        assert fine
        assert grown < 20_000, "KiB"
        assert maps == [0, 0, 0, 0]


def held(member):
    before = sockets()
    group = member.build("w")
    member.meet("built")
    pg = group.pg
    keeping = [pg, pg._get_backend(torch.device("cpu"))]
    first = group.close(soon(0.3))
    after = blocked(lambda: pg.allreduce([torch.ones(1)]).wait())()[0][0]
    pg = None
    keeping.clear()
    return first, after, group.close(soon()), settles(lambda: sockets() == before)


def test_a_group_that_user_code_still_holds_is_dead_and_goes_with_it():
    for first, after, second, clean in run(2, held):
        assert not first
        assert after != "returned"
        assert second
        assert clean


def ipv6(member):
    before = sockets()
    group = member.build("w", local_host="::1")
    member.meet("built")
    (made,) = gloo.of(group.state).groups()
    pairs = {link.local[0] for link in made.links}
    tensor = torch.ones(1)
    group.pg.allreduce([tensor]).wait()
    waiting = blocked(lambda: group.pg.recv([torch.ones(1)], 1 - member.rank, 5).wait())
    time.sleep(0.1)
    group.abort()
    return pairs, tensor.item(), waiting()[0][0], group.close(soon()), settles(lambda: sockets() == before)


@pytest.mark.skipif(not Path("/proc/net/if_inet6").exists(), reason="no IPv6 here")
def test_ipv6():
    assert run(2, ipv6) == [({"::1"}, 2.0, "RuntimeError", True, True)] * 2


def named_interface(member):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    group = member.build("w", local_host="192.0.2.1")
    member.meet("built")
    (made,) = gloo.of(group.state).groups()
    return {link.local[0] for link in made.links}, len(made.links), group.close(soon())


def test_the_interface_can_be_named():
    for hosts, links, closed in run(2, named_interface):
        assert hosts <= {"127.0.0.1", "::1"}
        assert links == 1
        assert closed


class Backend:
    """Stands for a backend of NCCL: torch's class, as far as it is used."""

    def __init__(self, gate=None, error=None, name="abort"):
        self.ended, self.gate, self.error = threading.Event(), gate, error
        setattr(self, name, self._end)

    def _end(self):
        if self.gate is not None:
            self.gate.wait(PATIENCE)
        self.ended.set()
        if self.error is not None:
            raise self.error


@pytest.mark.parametrize("name", ["abort", "_shutdown"])
def test_nccls_abort_is_never_waited_for(name):
    gate = threading.Event()
    slow, failing, good = (
        Backend(gate, name=name),
        Backend(error=RuntimeError("x"), name=name),
        Backend(name=name),
    )
    traffic = Traffic(timeout=1.0, device=torch.device("cpu"))
    traffic.abort([end for end in map(nccl.aborter, (slow, failing, good, object())) if end is not None])
    assert failing.ended.wait(PATIENCE / 2)
    assert good.ended.wait(PATIENCE / 2)
    assert not slow.ended.is_set(), "it was waited for"
    gate.set()
    assert slow.ended.wait(PATIENCE)


def test_nccls_names_and_devices():
    for name in ("nccl", "NCCL", "nccl2", "nccl-legacy", "cpu:gloo,cuda:nccl", "cpu:gloo, cuda:nccl2"):
        assert nccl.is_nccl(name)
    for name in ("gloo", "cpu:gloo", "ucc", "mynccl"):
        assert not nccl.is_nccl(name)
    values = dict.fromkeys(("world", "generation", "rank", "size", "timeout", "store", "local_host"))
    for text, bound in (("cuda:1", "cuda:1"), ("cuda", "cuda:2"), ("cpu", "cuda:2"), (None, "cuda:2")):
        spec = GroupSpec(
            **values,
            backend="nccl",
            check_cancelled=None,
            device=None if text is None else torch.device(text),
            gpu=2,
        )
        assert nccl.bound_device(spec) == torch.device(bound)


@pytest.mark.parametrize(
    ("device", "count", "text"),
    [("cpu", 1, "no CUDA device"), ("cuda:3", 2, "there are 2"), ("cuda:0", 0, "sees no")],
)
def test_nccls_devices_are_checked(monkeypatch, device, count, text):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    with pytest.raises(BackendError, match=text) as caught:
        nccl.check_gpu("w7", "nccl", torch.device(device))
    assert caught.value.world == "w7"
    assert caught.value.next_step


def test_connecting_can_be_left_behind():
    began, gate, made = time.monotonic(), threading.Event(), []

    class Group:
        _device_types = (torch.device("cpu"),)

        def __init__(self):
            self.backend = Backend()
            made.append(self)

        def _get_backend(self, _device):
            return self.backend

    def make():
        gate.wait(PATIENCE)
        return Group(), None

    def check():
        if time.monotonic() > began + 0.2:
            raise KeyError("cancelled")

    with pytest.raises(KeyError, match="cancelled"):
        nccl.cancellable(make, check)
    assert time.monotonic() - began < SOON
    gate.set()
    assert settles(lambda: made and made[0].backend.ended.is_set()), "what came too late was not aborted"
    assert nccl.cancellable(lambda: 7, lambda: None) == 7
    with pytest.raises(ZeroDivisionError):
        nccl.cancellable(lambda: 1 / 0, lambda: None)


@pytest.mark.parametrize("late", [False, True])
def test_what_a_group_that_could_not_connect_had_made_does_not_wait_for_the_garbage_collector(late):
    made, gate = [], threading.Event()

    class Group:
        pass

    def make():
        group = Group()
        made.append(weakref.ref(group))
        assert not late or gate.wait(PATIENCE)
        raise KeyError("not connected")

    def check():
        if late and made:
            raise KeyError("given up")

    gc.disable()
    try:
        with contextlib.suppress(KeyError):
            nccl.cancellable(make, check)
        gate.set()
        assert settles(lambda: made[0]() is None)
    finally:
        gc.enable()


def test_what_torch_asks_for_a_group_to_split_is_taken():
    """Its arguments are torch's, in each version; a group of no world is torch's to answer for."""
    name = "_get_split_source"
    count = len(inspect.signature(vars(c10d)[name]).parameters)
    asked = []
    source = splitting._not_split(lambda *args: asked.append(args))
    group = threading.Event()  # of no world
    source(group, *["nccl"] * (count - 1))
    assert asked == [(group, *["nccl"] * (count - 1))]
