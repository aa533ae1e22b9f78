"""Snapshots between launchers: they fit, and what is none is none."""

from __future__ import annotations

import random
import threading
import time
import zlib

from hypothesis import given
from hypothesis import strategies as st
from kits.runstatekit import begun, killed, run_of

from multiworld._core.operations.report import MAX_REPORT
from multiworld.run.nodes.told_snapshot import ToldSnapshot, decode, encode
from multiworld.run.view.state import LAST


def test_a_snapshot_comes_through():
    snapshot = run_of(*begun(), *killed(3)).snapshot()
    assert decode(encode(snapshot)) == snapshot


def test_a_run_of_many_workers_fits_whole():
    snapshot = run_of(*begun(256)).snapshot()
    assert len(encode(snapshot)) < MAX_REPORT
    assert decode(encode(snapshot)) == snapshot


def test_one_that_is_too_large_is_told_without_some_of_its_lists():
    noise = random.Random(1)  # noqa: S311  (a test's)
    texts = [{"text": f"{noise.getrandbits(40960):x}"} for _ in range(100)]
    snapshot = run_of(*begun(2)).snapshot()
    faults = [
        {"id": number, "steps": [{"text": f"{noise.getrandbits(400):x}"} for _ in range(200)]}
        for number in range(50)
    ]
    found = decode(encode({**snapshot, "faults": faults}))
    assert ([len(each["steps"]) for each in found["faults"]], found["last"]) == ([10] * 50, snapshot["last"])
    few = [{"text": f"{noise.getrandbits(8192):x}"} for _ in range(100)]
    found = decode(encode({**snapshot, "last": few}))
    assert found == {**snapshot, "last": few[-LAST:]}
    found = decode(encode({**snapshot, "last": texts, "faults": faults}))
    assert (found["faults"], found["last"], found["workers"]) == ([], [], snapshot["workers"])
    found = decode(encode({**snapshot, "last": texts, "workers": texts}))
    assert (found["workers"], found["run_id"]) == ([], "job7")
    assert encode({**snapshot, "entrypoint": str(texts)}) == b""


def test_who_asks_does_not_wait_for_it():
    made, asked = threading.Event(), []

    def snapshot():
        asked.append(threading.current_thread().name)
        made.wait(60)
        return {"number": len(asked)}

    told = ToldSnapshot(snapshot)
    assert [told() for _ in range(5)] == [b""] * 5
    made.set()
    deadline = time.monotonic() + 60
    while not told() and time.monotonic() < deadline:
        time.sleep(0.001)
    assert decode(told()) == {"number": 1}
    assert set(asked) == {"m8d-nodes-told"}
    while decode(told()) == {"number": 1} and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(asked) == 2


@given(st.binary(max_size=200))
def test_what_is_none(data):
    assert decode(data) is None or isinstance(decode(data), dict)
    assert decode(zlib.compress(data)) is None or isinstance(decode(zlib.compress(data)), dict)


def test_what_would_fill_the_memory_is_none():
    assert decode(zlib.compress(b" " * (17 << 20) + b"{}")) is None
    assert decode(encode({"a": 1})[:-3]) is None
    assert decode(b"") is None
