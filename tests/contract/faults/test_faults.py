"""What the texts of gloo and TCPStore mean, provoked on the installed torch; NCCL's as they are in its sources."""

import datetime as dt
import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from kits.contract.groupkit import Crew, run, soon

import multiworld as mw
from multiworld._c10d.fault_classification import classify
from multiworld._c10d.routing import router
from multiworld._net.stores.store import open_store


def provoke(call):
    try:
        call()
    except Exception as error:  # noqa: BLE001  (reported)
        fault = classify(error)
        said = None if fault is None else (fault.detail, fault.timeout, fault.peer, fault.rank)
        return type(error).__name__, str(error), said
    return "returned", "", None


def transport(member):
    member.meet("here")
    group = member.build("w", timeout=4.0)
    member.meet("built")
    pg, seen = group.pg, {}
    if member.rank == 1:
        member.say("up")
        member.ask()
        return {}
    seen["timeout"] = provoke(lambda: pg.recv([torch.ones(1)], 1, 5).wait())
    group.close(soon())
    group = member.build("alone", size=1)
    group.close(soon())
    return seen


def crashed(member, how):
    group = member.build("w", timeout=20.0)
    member.meet("built")
    pg = group.pg
    member.say("up")
    if member.rank == 1:
        member.ask()
        return None
    member.ask()
    calls = {
        "recv": lambda: pg.recv([torch.ones(1)], 1, 5).wait(),
        "send": lambda: [pg.send([torch.ones(500_000)], 1, 5).wait() for _ in range(50)],
        "all_reduce": lambda: pg.allreduce([torch.ones(1)]).wait(),
        "barrier": lambda: pg.barrier().wait(),
    }
    if how == "abort":
        group.abort()
    seen = {name: provoke(call) for name, call in calls.items()}
    group.abort()
    seen["aborted"] = provoke(lambda: pg.allreduce([torch.ones(1)]).wait())
    pg = None
    group.close(soon())
    return seen


def test_timeouts():
    with Crew(2, transport) as crew:
        kind, text, said = crew.hear(0)["timeout"]
    assert kind == "RuntimeError"
    assert said is not None, text
    assert said[1], text
    assert not said[0].startswith("[")


@pytest.mark.parametrize("how", ["kill", "abort"])
def test_connections_that_end(how):
    with Crew(2, crashed, how) as crew:
        for rank in range(2):
            crew.hear(rank)
        if how == "kill":
            os.kill(crew.pid(1), signal.SIGKILL)
            crew.members[1][0].join(30)  # its connections are closed when it is gone
        crew.tell(0, "go")
        for name, (kind, text, said) in crew.hear(0).items():
            assert kind != "returned", name
            assert said is not None, (name, text)
            assert not said[1], (name, text)


def mistakes(member):
    group = member.build("w", timeout=20.0)
    member.meet("built")
    router.enter(group.state)
    one = torch.ones(2)
    seen = {
        "rank": provoke(lambda: group.pg.broadcast(one, 7).wait()),
        "strided": provoke(lambda: group.pg.allreduce([torch.ones(4, 4).t()[::2]]).wait()),
        "sparse_op": provoke(lambda: group.pg.allreduce([torch.ones(2, dtype=torch.complex64), one]).wait()),
        "meta": provoke(lambda: dist.all_reduce(torch.ones(2, device="meta"))),
        "shape": provoke(lambda: group.pg.allgather([[torch.ones(3)] * 2], [one]).wait()),
        "two": provoke(lambda: group.pg.send([one, one], 0, 0).wait()),
        "type": provoke(lambda: dist.all_reduce("x")),
        "value": provoke(lambda: dist.send(one, dist.get_rank())),
    }
    router.leave()
    group.close(soon())
    return seen


def test_mistakes_are_no_faults():
    for seen in run(2, mistakes):
        raised = 0
        for name, (kind, text, said) in seen.items():
            assert said is None, (name, kind, text)
            raised += kind != "returned"
        assert raised >= 5, seen


def barrier(member):
    group = member.build("w", timeout=20.0)
    member.meet("built")
    seen = None
    if member.rank == 0:
        with router.selected(group.state):
            seen = provoke(lambda: dist.monitored_barrier(timeout=dt.timedelta(seconds=0.5)))
    member.meet("over")
    group.close(soon())
    return seen


def test_a_monitored_barrier_names_the_rank():
    kind, text, said = run(2, barrier)[0]
    assert kind == "RuntimeError"
    assert said is not None, text
    assert said[1], text
    assert said[3] == 1, text


def test_stores():
    server = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    client = dist.TCPStore(
        "127.0.0.1",
        server.port,
        None,
        is_master=False,
        timeout=dt.timedelta(seconds=2),
        wait_for_workers=False,
    )
    handle = open_store(f"tcp://127.0.0.1:{server.port}", world="w", serve=False, deadline=soon())
    for call in (
        lambda: client.wait(["never"], dt.timedelta(seconds=0.1)),
        lambda: handle.store.wait(["never"], dt.timedelta(seconds=0.1)),
    ):
        _, text, said = provoke(call)
        assert said is not None, text
        assert said[1], text
    del server
    time.sleep(0.1)
    for call in (lambda: client.check(["x"]), lambda: handle.store.check(["x"])):
        _, text, said = provoke(call)
        assert said is not None, text
    handle.close()


GLOO = "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] "


@pytest.mark.parametrize(
    ("text", "timeout", "peer"),
    [
        (GLOO + "Connection closed by peer [127.0.0.1]:24801", False, "127.0.0.1:24801"),
        (GLOO + "Read error [10.0.0.7]:4432: Connection reset by peer", False, "10.0.0.7:4432"),
        (GLOO + "writev [fe80::1]:4432: Broken pipe", False, "[fe80::1]:4432"),
        ("Application timeout caused pair closure", True, None),
        ("[x.cc:78] Timed out waiting 1800000ms for recv operation to complete", True, None),
        ("Gloo connectFullMesh failed with [x.cc:144] no error", False, None),
        (
            ("NCCL error in: ../torch/ProcessGroupNCCL.cpp:1970, remote process exited or there was a network error,"
            " NCCL version 2.21.5\nncclRemoteError: A call failed possibly due to a network error or a remote process"
            " exiting prematurely.\nLast error:\nsocketProgress: Connection closed by remote peer 10.0.0.2<43210>"),
            False, None,
        ),
        ("NCCL communicator was aborted on rank 0.", False, None),
        ("NCCL error: unhandled system error (run with NCCL_DEBUG=INFO for details)", False, None),
        ("[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1, OpType=ALLREDUCE)", True, None),
        ("failed to recv, got 0 bytes", False, None),
        ("Connection was likely closed. Did the remote server shutdown or crash?", False, None),
    ],
)  # fmt: skip
def test_texts_of_faults(text, timeout, peer):
    fault = classify(RuntimeError(text))
    assert fault is not None
    assert (fault.timeout, fault.peer) == (timeout, peer)
    assert len(fault.detail) <= 300
    assert "\n" not in fault.detail


@pytest.mark.parametrize(
    "error",
    [
        mw.BrokenWorldException("of a: b", "rank 1: Connection timed out"),
        mw.WorldClosedError("of a: b", "generation 1 of world 'of a: b' was left as planned"),
    ],
)
def test_texts_of_a_worlds_error_are_of_that_one(error):
    text = f"Got the following error when running the callback: {type(error).__name__}: {error}\n\nAt:\n  x.py(1): f"
    fault = classify(RuntimeError(text))
    assert fault is not None
    assert (fault.timeout, fault.may_be_of("of a: b"), fault.may_be_of("b"), fault.may_be_of("of a")) == (
        False, True, False, False,
    )  # fmt: skip


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(
            "[enforce fail at ../third_party/gloo/gloo/pair.cc:446] op.preamble.length <= op.nbytes. 8 vs 4"
        ),
        RuntimeError("ProcessGroupGloo::allreduce: invalid tensor type at index 1 (expected X, got Y)"),
        RuntimeError(
            "NCCL error: invalid usage (run with NCCL_DEBUG=WARN for details)\nncclInvalidUsage: ..."
        ),
        RuntimeError("No backend type associated with device type meta"),
        RuntimeError("The size of tensor a (2) must match the size of tensor b (3)"),
        RuntimeError("expected timeout to be positive"),
        ValueError("Connection closed by peer [127.0.0.1]:1"),
        TypeError("timed out"),
        NotImplementedError("timeout"),
        KeyError("x"),
        KeyboardInterrupt(),
    ],
)
def test_texts_of_mistakes(error):
    assert classify(error) is None


@pytest.mark.parametrize("error", [ConnectionResetError("reset"), TimeoutError("x"), BrokenPipeError()])
def test_the_systems_errors(error):
    assert classify(error) is not None
