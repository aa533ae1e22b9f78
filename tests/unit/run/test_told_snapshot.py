"""Snapshots between launchers: they fit, and what is none is none."""

from __future__ import annotations

import random
import zlib

from hypothesis import given
from hypothesis import strategies as st
from kits.runstatekit import begun, killed, run_of

from multiworld._core.operations.report import MAX_REPORT
from multiworld.run.nodes.told_snapshot import decode, encode


def test_a_snapshot_comes_through():
    snapshot = run_of(*begun(), *killed(3)).snapshot()
    assert decode(encode(snapshot)) == snapshot


def test_a_run_of_many_workers_fits_whole():
    snapshot = run_of(*begun(256)).snapshot()
    assert len(encode(snapshot)) < MAX_REPORT
    assert decode(encode(snapshot)) == snapshot


def test_one_that_is_too_large_is_told_without_its_lists():
    noise = random.Random(1)  # noqa: S311  (a test's)
    texts = [{"text": f"{noise.getrandbits(40960):x}"} for _ in range(100)]
    snapshot = run_of(*begun(2)).snapshot()
    found = decode(encode({**snapshot, "last": texts}))
    assert (found["last"], found["workers"]) == ([], snapshot["workers"])
    found = decode(encode({**snapshot, "last": texts, "workers": texts}))
    assert (found["workers"], found["run_id"]) == ([], "job7")
    assert encode({**snapshot, "entrypoint": str(texts)}) == b""


@given(st.binary(max_size=200))
def test_what_is_none(data):
    assert decode(data) is None or isinstance(decode(data), dict)
    assert decode(zlib.compress(data)) is None or isinstance(decode(zlib.compress(data)), dict)


def test_what_would_fill_the_memory_is_none():
    assert decode(zlib.compress(b" " * (17 << 20) + b"{}")) is None
    assert decode(encode({"a": 1})[:-3]) is None
    assert decode(b"") is None
