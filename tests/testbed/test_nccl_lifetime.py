"""What NCCL does not survive ends a process of the double: by version (knob NCCL_RULES), as NCCL's sources have it."""

from __future__ import annotations

import contextlib
import signal

import numpy as np
import pytest
import rawnccl
from rawnccl import IN_PROGRESS, INTERNAL, INVALID_ARGUMENT, SUCCESS

ONE = np.ones(4, "float32")
PATIENCE = 45.0  # seconds; each of these waits ends within milliseconds when the machine is free
LONG = 600_000  # ms: longer than any test
OLD, NEW = 22105, 22203  # from NCCL 2.22 on a communicator that is finalized is freed at once
VERSIONS = (21801, OLD, NEW, 22606, 22703, 23007)
FREES = "frees what the other uses"


class Alone:
    """A process with one communicator after the other, of one rank each."""

    def __init__(self, library, folder) -> None:
        self._stack = contextlib.ExitStack()
        self._new = lambda: self._stack.enter_context(rawnccl.crew(library, folder, 1, connected=False))[0]
        self.member = None

    def __call__(self, rules=None, *, blocking=True):
        if self.member is None:
            self.member = self._new()
        for knob in ("INIT_HANG_MS", "LAUNCH_HANG_MS", "ABORT_HANG_MS", "HANG_FROM_OP", "NONBLOCKING_MS"):
            self.member.set(knob)
        self.member.set("NCCL_RULES", rules or "")
        expected = SUCCESS if blocking else IN_PROGRESS
        assert self.member.init(self.member.unique_id(), 1, 0, blocking=blocking) == expected
        assert self.member.error_within(PATIENCE, SUCCESS) is not None
        return self.member

    def close(self) -> None:
        self._stack.close()


@pytest.fixture
def alone(library, tmp_path):
    made = Alone(library, tmp_path)
    yield made
    made.close()


def begin(member):
    return member.begin("AllReduce", ONE, 4, dtype="float32")


def inside(member, use):
    """Let a thread of the process be inside of a call, until an abort or a knob lets it out."""
    if use == "split":
        member.set("INIT_HANG_MS", LONG)
        member.start(use, "split", 0, 0)
    elif use == "group":
        member.set("LAUNCH_HANG_MS", LONG)
        member.start(use, "begin", "AllReduce", ONE, 4, dtype="float32")
    elif use == "Abort":
        member.set("ABORT_HANG_MS", LONG)
        member.start(use, "call", use)
    else:
        member.set("HANG_FROM_OP", 1)
        assert begin(member) == SUCCESS
        member.start(use, "call", use)
    assert member.counts("busy", 1, PATIENCE)


def unharmed(member):
    return member.count("freed_uses") == 0 and "LIFETIME" not in member.stderr()


# -- a blocking call of another thread


@pytest.mark.parametrize(("rules", "call"), [(NEW, "Abort"), (NEW, "Destroy"), (None, "Abort")])
def test_the_end_of_a_communicator_that_is_finalized_ends_the_process(alone, rules, call):
    member = alone(rules)
    inside(member, "Finalize")
    if (rules or member.version()) < NEW:
        pytest.skip("its NCCL survives that, mostly")
    assert member.dies(PATIENCE, "call", call) == signal.SIGABRT
    text = f"ncclComm{call} while another thread is inside ncclCommFinalize: NCCL"
    assert text in member.stderr()


@pytest.mark.parametrize("rules", [VERSIONS[0], VERSIONS[-1]])
def test_the_end_of_a_parent_that_is_split_ends_the_process(alone, rules):
    member = alone(rules)
    inside(member, "split")
    assert member.dies(PATIENCE, "call", "Abort") == signal.SIGABRT
    assert "ncclCommAbort while another thread is inside ncclCommSplit, as the parent" in member.stderr()


@pytest.mark.parametrize("late", [("call", "Finalize"), ("split", 0, 0)])
def test_what_begins_beside_an_abort_ends_the_process(alone, late):
    member = alone(NEW)
    inside(member, "Abort")
    assert member.dies(PATIENCE, *late) == signal.SIGABRT
    assert "while another thread is inside ncclCommAbort" in member.stderr()


def test_up_to_2_21_an_abort_beside_a_finalize_is_only_said_as_it_mostly_goes_well(alone):
    for number, rules in enumerate(VERSIONS[:2]):
        member = alone(rules)
        inside(member, "Finalize")
        assert member.call("Abort")[0] == SUCCESS
        assert member.finish("Finalize", PATIENCE)[0] == SUCCESS
        assert member.count("freed_uses") == number + 1
    assert f"NCCL {OLD} {FREES}" in member.stderr()


def test_an_abort_lets_a_thread_go_that_ends_a_group(alone):
    for rules in VERSIONS:
        member = alone(rules)
        inside(member, "group")
        assert member.call("Abort")[0] == SUCCESS
        member.set("LAUNCH_HANG_MS", 0)
        assert member.finish("group", PATIENCE) == SUCCESS
    assert unharmed(member)


def test_of_two_that_end_a_communicator_one_frees_it(alone):
    """A destroy that is aborted is let go: up to 2.21 by luck."""
    for rules in reversed(VERSIONS):
        member = alone(rules)
        inside(member, "Abort")
        member.start("second", "call", "Abort")
        assert member.counts("busy", 2, PATIENCE)
        member.set("ABORT_HANG_MS", 0)
        assert [member.finish(label, PATIENCE)[0] for label in ("Abort", "second")] == [SUCCESS] * 2
        member = alone(rules)
        inside(member, "Destroy")
        assert member.call("Abort")[0] == SUCCESS
        assert member.finish("Destroy", PATIENCE)[0] == SUCCESS
        assert member.count("comms") == 0
        assert unharmed(member) is (rules >= NEW)


def test_an_abort_waits_for_a_non_blocking_call(alone):
    for rules in VERSIONS:
        member = alone(rules, blocking=False)
        member.set("INIT_HANG_MS", LONG)
        assert member.split(0, 0)[0] == IN_PROGRESS
        assert member.call("Abort")[0] == SUCCESS
        member = alone(rules, blocking=False)
        member.set("HANG_FROM_OP", 1)
        assert begin(member) == SUCCESS
        assert member.call("Finalize")[0] == IN_PROGRESS
        assert member.call("Abort")[0] == SUCCESS
    assert member.count("comms") == 0
    assert unharmed(member)


def test_an_abort_lets_go_who_makes_a_communicator(alone):
    for rules in VERSIONS:
        member = alone(rules)
        member.start("init", "init", member.unique_id(), 2, 0)  # the other one never comes
        assert member.counts("busy", 1, PATIENCE)
        assert member.call("Abort")[0] == SUCCESS
        assert member.finish("init", PATIENCE) == INTERNAL
    assert unharmed(member)
    assert member.error() == -INVALID_ARGUMENT  # it had not met its peers: it is not freed


# -- the thread that makes a non-blocking call


def step(method, *args, **more):
    return method, args, more


BEGUN = {
    "init": step("init", None, 2, 0, blocking=False, name="next"),  # the other one never comes
    "split": step("split", 0, 0),
    "finalize": step("call", "Finalize"),
    "connect": step("begin", "Send", ONE, 4, dtype="float32", root=0, stream="other"),
}


def begun(alone, what, rules):
    """A process with a communicator, and a call that a thread of it is to begin, which does not come to an end."""
    member = alone(rules, blocking=False)
    member.set("HANG_FROM_OP", 1)
    assert begin(member) == SUCCESS
    assert member.error_within(PATIENCE, SUCCESS) is not None
    member.set("INIT_HANG_MS", LONG if what == "split" else "")
    member.set("NONBLOCKING_MS", LONG if what == "connect" else "")
    method, args, more = BEGUN[what]
    return member, (method, (member.unique_id(), *args[1:]) if what == "init" else args, more)


@pytest.mark.parametrize("what", [*BEGUN])
def test_up_to_2_26_a_thread_that_ends_before_its_call_takes_the_job_along(alone, what):
    member, (method, args, more) = begun(alone, what, 22606)
    assert member.dies(PATIENCE, "thread_ends", method, *args, **more) == signal.SIGSEGV
    assert "LIFETIME a thread ended while a non-blocking call" in member.stderr()


def test_from_2_27_on_it_has_memory_of_its_own(alone):
    for what in BEGUN:
        member, (method, args, more) = begun(alone, what, 22703)
        told = member.thread_ends(method, *args, **more)
        assert (told[0] if isinstance(told, tuple) else told) == IN_PROGRESS
        member.set("NONBLOCKING_MS")
    assert unharmed(member)


@pytest.mark.parametrize(
    ("rules", "use"),
    [(OLD, ("about",)), (22606, ("call", "Abort")), (22606, ("split", 0, 0))],
    ids=["about", "abort", "split"],
)
def test_up_to_2_26_the_job_of_a_thread_that_ended_cannot_be_joined(alone, rules, use):
    member = alone(rules)
    made = [step("init", member.unique_id(), 1, 0, blocking=False), step("error_within", PATIENCE, SUCCESS)]
    assert member.thread_ends("steps", *made)[0] == IN_PROGRESS
    assert member.error() == SUCCESS  # this does not join it
    assert member.dies(PATIENCE, *use) == signal.SIGABRT
    assert "in memory of a thread that ended" in member.stderr()


def test_what_the_thread_has_joined_is_safe(alone):
    for rules in VERSIONS:
        member = alone(rules)
        member.set("HANG_FROM_OP", 1)
        made = [
            step("init", member.unique_id(), 1, 0, blocking=False),
            step("error_within", PATIENCE, SUCCESS),
        ]
        # No job of the thread's: a collective, which connects in the call up to 2.26, an abort, a destroy.
        member.thread_ends("steps", *made, step("about"), step("begin", "AllReduce", ONE, 4, dtype="float32"))
        assert member.about()[1] == (SUCCESS, 1)
        assert member.thread_ends("call", "Abort")[0] == SUCCESS
        member = alone(rules, blocking=False)
        assert member.thread_ends("call", "Destroy")[0] == SUCCESS
    assert unharmed(member)


# -- after the end


@pytest.mark.parametrize(("end", "use"), [("Destroy", "Abort"), ("Abort", "Finalize")])
def test_a_use_after_the_end_ends_the_process(alone, end, use):
    member = alone()
    assert member.call(end)[0] == SUCCESS
    assert member.dies(PATIENCE, "call", use) == signal.SIGABRT
    assert f"used after ncclComm{end}" in member.stderr()


def test_what_looks_at_freed_memory_is_refused_by_luck_and_counted(alone):
    member = alone()
    assert member.call("Abort")[0] == SUCCESS
    assert member.error() == -INVALID_ARGUMENT
    assert member.call("Destroy")[0] == INVALID_ARGUMENT
    assert begin(member) == INVALID_ARGUMENT
    assert member.count("freed_uses") == 3
    assert "LUCK ncclCommGetAsyncError: communicator" in member.stderr()
    member.set("AFTER_END", "die")
    assert member.dies(PATIENCE, "error") == signal.SIGABRT
