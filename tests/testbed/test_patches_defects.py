"""Each defect D1 to D8 as a pair: what the official build does under CleanUpOnly, and what the patched one does.

D0 (``remote-error``) needs a build older than 2.4; on all others the error has its name.
"""

from __future__ import annotations

import pytest
from pairkit import DUMPING, FOR_EVER, PROMPT, lose, names_remote_error, running, still, until_logged  # noqa: F401 -- a fixture

STALE = 1.0
HEARTBEAT = 4  # seconds: longer than a busy machine keeps a thread from running
BEATS = {"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": str(HEARTBEAT)}


def slow_dump(seconds):
    """The monitor looks for the signal after minutes, and until then the watchdog waits: four times so long."""
    return {
        **DUMPING,
        "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": str(seconds * 1000),
        "TORCH_NCCL_COORD_CHECK_MILSEC": "300000",
    }


SIGNALS = {**DUMPING, **BEATS, "TORCH_NCCL_COORD_CHECK_MILSEC": "200"}


def untold(exception):
    """Whether the work has no exception, or a build cannot show one to Python (2.6: no converter)."""
    return exception.get("error") == "TypeError" or (exception["ok"] and exception["result"] is None)


class TestD1:
    """After an abort, a work looks as if it had succeeded."""

    @pytest.fixture
    def told(self, run):
        with run("broken_work") as ranks:
            lose(ranks)
            ranks.join(ranks=[0])
            return {event.name: event.fields for event in ranks.events(rank=0)}

    @pytest.mark.stock
    def test_stock(self, told):
        assert told["aborted"]["seen"]
        assert untold(told["exception"])
        assert told["wait"]["ok"]
        assert told["synchronize"]["ok"]
        assert told["future"] | {"ms": 0} == {"ok": True, "ms": 0, "result": STALE}
        assert told["value"]["result"] == STALE
        assert not told["later"]["ok"]

    @pytest.mark.patched
    def test_patched(self, told):
        assert told["aborted"]["seen"]
        assert untold(told["exception"]) or names_remote_error(told["exception"]["result"])
        for name in ("wait", "synchronize", "future", "later"):
            assert not told[name]["ok"], name
            assert told[name]["error"] == "DistBackendError", name
            assert names_remote_error(told[name]["text"]), name
        assert told["is_completed"]["result"] is True


class TestBlocked:
    """A caller inside a blocking call is let go, and told why where the call can tell."""

    @pytest.mark.patched
    @pytest.mark.parametrize(
        ("how", "env"), [("barrier", {}), ("timeout", {}), ("wait", {"TORCH_NCCL_BLOCKING_WAIT": "1"})]
    )
    def test_raises(self, run, how, env):
        with run("blocked", how=how, env=env) as ranks:
            killed = lose(ranks)
            (event,) = ranks.wait("let go", ranks=[0])
            assert event.at - killed < PROMPT
            assert event.fields["error"] == "DistBackendError"
            assert names_remote_error(event.fields["text"])

    @pytest.mark.patched
    def test_a_stream_runs_on_and_the_work_tells(self, run):
        with run("blocked", how="stream") as ranks:
            killed = lose(ranks)
            (event,) = ranks.wait("let go", ranks=[0])
            assert event.at - killed < PROMPT
            (again,), (later,) = ranks.wait("again", ranks=[0]), ranks.wait("later", ranks=[0])
            for told in (again, later):
                assert names_remote_error(told.fields["text"])

    @pytest.mark.patched
    @pytest.mark.parametrize("how", ["barrier", "timeout"])
    def test_also_while_the_abort_hangs(self, run, how):
        with run("blocked", how=how, knobs={"ABORT_HANG_MS": round(FOR_EVER * 1000)}) as ranks:
            killed = lose(ranks)
            (event,) = ranks.wait("let go", ranks=[0])
            assert event.at - killed < PROMPT
            assert names_remote_error(event.fields["text"])


class TestD2:
    """The watchdog waits for the flight recorder's dump before it aborts."""

    def delay(self, run, dump):
        with run("idle", env=slow_dump(dump)) as ranks:
            killed = lose(ranks)
            (event,) = ranks.wait("aborted", ranks=[0])
            assert event.fields["seen"]
            return event.at - killed

    @pytest.mark.stock
    def test_stock(self, run):
        assert self.delay(run, 1) > 3.5

    @pytest.mark.patched
    def test_patched(self, run):
        assert self.delay(run, 20) < PROMPT


class TestD3:
    """The heartbeat monitor ends the process after a successful clean-up."""

    @pytest.mark.stock
    def test_stock(self, run):
        with run("idle", env={**DUMPING, **BEATS}) as ranks:
            lose(ranks)
            assert ranks.join(ranks=[0])[0].signal == "SIGABRT"

    @pytest.mark.patched
    def test_patched(self, run):
        with run("idle", env={**DUMPING, **BEATS}) as ranks:
            lose(ranks)
            (event,) = ranks.wait("aborted", ranks=[0])
            assert event.fields["seen"]
            until_logged(ranks, 0, "Received a dump signal")
            still(ranks, 0, 2 * HEARTBEAT + 1)
            ranks.tell("go on")
            assert ranks.join(ranks=[0])[0].code == 0
            assert names_remote_error(ranks.events(0, "wait")[0].fields["text"])


class TestD4:
    """A hung ncclCommAbort counts as a stuck watchdog, which ends the process."""

    @pytest.mark.stock
    def test_stock(self, run):
        with run("slow_abort", env=BEATS, hangs=FOR_EVER) as ranks:
            lose(ranks)
            assert ranks.join(ranks=[0])[0].signal == "SIGABRT"

    @pytest.mark.patched
    def test_patched(self, run):
        with run("slow_abort", env=BEATS, hangs=FOR_EVER) as ranks:
            killed = lose(ranks)
            (event,) = ranks.wait("wait", ranks=[0])
            assert event.at - killed < PROMPT
            assert names_remote_error(event.fields["text"])
            still(ranks, 0, 2 * HEARTBEAT + 1)
            assert "got stuck" not in ranks.stderr(0)
            ranks.tell("go on")
            assert ranks.join(ranks=[0])[0].code == 0


@pytest.mark.parametrize("call", ["coalesced", "managed"])
class TestD5:
    """A failing call inside a coalesced operation ends in std::terminate."""

    @pytest.mark.stock
    def test_stock(self, run, call):
        if call == "managed":
            pytest.skip("the open group is D6's matter: nothing terminates")
        with run("coalesced_error", call=call) as ranks:
            assert {each.signal for each in ranks.join().values()} == {"SIGABRT"}

    @pytest.mark.patched
    def test_patched(self, run, call):
        with run("coalesced_error", call=call) as ranks:
            for event in ranks.wait("call"):
                assert event.fields["error"] == "DistBackendError"
                assert names_remote_error(event.fields["text"])
            assert {event.fields["depth"] for event in ranks.wait("depth")} == {0}
            assert {each.code for each in ranks.join().values()} == {0}


CALLS = [
    "send",
    "recv",
    "batch",
    "gather",
    "scatter",
    "all_to_all",
    "all_to_all_single",
    "type",
    "argument",
    "user",
]


@pytest.mark.parametrize("call", CALLS)
class TestD6:
    """A call that fails leaves the thread's NCCL group open: a healthy group's operation does not run."""

    @pytest.mark.stock
    def test_stock(self, run, build, call):
        if call == "all_to_all_single" and tuple(map(int, build.nccl.split("."))) >= (2, 28):
            pytest.skip("from 2.28 on NCCL has a call for it, and torch opens no group")
        with run("open_group", call=call) as ranks:
            ranks.wait("done")
            failed = {event.rank for event in ranks.events(name="call") if not event.fields["ok"]}
            assert failed
            for rank in failed:
                assert ranks.events(rank, "depth")[0].fields["depth"] > 0
                assert ranks.events(rank, "healthy")[0].fields["result"] == STALE
            ranks.tell("end")
            ranks.join()

    @pytest.mark.patched
    def test_patched(self, run, call):
        with run("open_group", call=call) as ranks:
            ranks.wait("done")
            failed = {event.rank for event in ranks.events(name="call") if not event.fields["ok"]}
            assert failed
            for event in ranks.events(name="healthy"):
                assert event.fields["result"] == 2 * STALE
            if call not in ("argument", "user"):  # the group never hears of those; the next operation heals
                assert {event.fields["depth"] for event in ranks.events(name="depth")} == {0}
            ranks.tell("end")
            ranks.join()


class TestD7:
    """The flight recorder's dump signal reaches worlds behind other prefixes of the same store server."""

    HEARD = "Observed flight recorder dump signal"

    @pytest.mark.stock
    def test_stock(self, run):
        with run("dump_signal", 4, env=SIGNALS) as ranks:
            lose(ranks, survivors=(0, 2, 3))
            exits = ranks.join(ranks=[2, 3])
            assert {each.signal for each in exits.values()} == {"SIGABRT"}
            assert self.HEARD in ranks.stderr(2)

    @pytest.mark.patched
    def test_patched(self, run):
        with run("dump_signal", 4, env=SIGNALS) as ranks:
            lose(ranks, survivors=(0, 2, 3))
            ranks.wait("aborted", ranks=[0])
            until_logged(ranks, 0, self.HEARD)  # in its own world, through the store
            still(ranks, 2, 2)
            ranks.tell("go on")
            exits = ranks.join(ranks=[0, 2, 3])
            assert {each.code for each in exits.values()} == {0}, exits
            for rank in (2, 3):
                assert self.HEARD not in ranks.stderr(rank)
                assert ranks.events(rank, "works")[0].fields["ok"]

    @pytest.mark.patched
    @pytest.mark.parametrize("split", [False, True], ids=["new", "split"])
    def test_a_subgroups_failure_is_heard_in_its_world(self, run, split):
        with run("dump_signal", 4, env=SIGNALS, subgroup=True, split=split) as ranks:
            lose(ranks, survivors=(0, 2, 3))
            until_logged(ranks, 2, self.HEARD)
            ranks.tell("go on")
            exits = ranks.join(ranks=[0, 2, 3])
            assert {each.code for each in exits.values()} == {0}, exits
            assert self.HEARD not in ranks.stderr(3)


class TestD8:
    """While ncclCommAbort hangs, others block."""

    HANGS = 6  # seconds
    NOT_LONG = 30.0  # seconds: an abort is waited for five when a group ends

    @pytest.mark.stock
    def test_stock(self, run):
        # It blocks with the GIL held: nobody in that process could end the hang.
        with run("hung_abort", 3, hangs=self.HANGS) as ranks:
            killed = lose(ranks, survivors=(0, 2))
            ranks.wait("aborted", ranks=[0])
            ranks.tell("look", ranks=[0])
            ranks.tell("sum", ranks=[2])
            (event,) = ranks.wait("is_completed", ranks=[0])
            assert event.at - killed > self.HANGS - 1

    @pytest.mark.patched
    @pytest.mark.parametrize("phase", ["before", "after"])
    def test_patched(self, run, phase):
        env = {"M8D_BED_ABORT_HANG_PHASE": phase}
        with run("hung_abort", 3, hangs=FOR_EVER, env=env, until_free=True) as ranks:
            lose(ranks, survivors=(0, 2))
            ranks.wait("aborted", ranks=[0])
            ranks.tell("look", ranks=[0])
            ranks.tell("sum", ranks=[2])
            ranks.wait("later", ranks=[0])  # the abort still hangs
            for name in ("wait", "later"):
                assert names_remote_error(ranks.events(0, name)[0].fields["text"]), name
            (other,) = ranks.wait("other thread", ranks=[0])
            assert other.fields["ok"]
            (ended,) = ranks.wait("destroy", ranks=[0])
            assert ended.fields["ok"]
            assert ended.fields["ms"] < self.NOT_LONG * 1000
            ranks.tell("release", ranks=[0])
            (free,) = ranks.wait("free", ranks=[0])
            assert free.fields["seen"], free.fields["names"]
            ranks.tell("end")
            assert ranks.join(ranks=[0])[0].code == 0

    @pytest.mark.patched
    def test_the_process_ends_though_the_abort_hangs(self, run):
        with run("hung_abort", 3, hangs=FOR_EVER, exit="python") as ranks:
            killed = lose(ranks, survivors=(0, 2))
            ranks.wait("aborted", ranks=[0])
            ranks.tell("look", ranks=[0])
            ranks.tell("sum", ranks=[2])
            ended = ranks.join(ranks=[0], timeout=60)[0]
            assert ended.code == 0
            assert ended.at - killed < 2 * self.NOT_LONG
