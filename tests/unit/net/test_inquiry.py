"""One question to all other members: what has come when the asker wants to know."""

from __future__ import annotations

import threading
import time

from multiworld._core.operations.report import MAX_REPORT
from multiworld._net.liveness.inquiry import Inquiry

LONG = 60.0


def test_the_asker_goes_on_as_soon_as_all_have_answered():
    inquiry = Inquiry([1, 2])
    inquiry.heard(1, b"one", last=True)
    threading.Timer(0.05, lambda: inquiry.heard(2, b"two", last=True)).start()
    start = time.monotonic()
    assert inquiry.wait(LONG) == {1: b"one", 2: b"two"}
    assert time.monotonic() - start < LONG / 2


def test_pieces_are_put_together_and_an_answer_that_is_not_whole_is_none():
    inquiry = Inquiry([1, 2])
    for piece in (b"a", b"b"):
        inquiry.heard(1, piece, last=False)
        inquiry.heard(2, piece, last=False)
    inquiry.heard(1, b"c", last=True)
    assert inquiry.wait(0.0) == {1: b"abc"}
    inquiry.heard(1, b"d", last=True)
    assert inquiry.wait(0.0) == {1: b"abc"}, "it has answered"


def test_members_that_were_not_asked_are_not_heard():
    inquiry = Inquiry([1])
    inquiry.heard(2, b"x", last=True)
    assert inquiry.wait(0.0) == {}


def test_no_member_is_waited_for_where_there_is_none_or_the_world_is_over():
    start = time.monotonic()
    assert Inquiry([]).wait(LONG) == {}
    inquiry = Inquiry([1])
    inquiry.give_up()
    assert inquiry.wait(LONG) == {}
    assert time.monotonic() - start < LONG / 2


def test_an_answer_that_is_too_long_is_cut():
    inquiry = Inquiry([1])
    for _ in range(70):
        inquiry.heard(1, b"x" * 1024, last=False)
    inquiry.heard(1, b"x", last=True)
    assert len(inquiry.wait(0.0)[1]) == MAX_REPORT


def test_members_that_are_lost_meanwhile_are_not_waited_for():
    start = time.monotonic()
    inquiry = Inquiry([1, 2, 3])
    inquiry.lost([2, 7])
    inquiry.heard(1, b"one", last=True)
    inquiry.heard(2, b"two", last=True)
    threading.Timer(0.05, lambda: inquiry.lost([1, 3])).start()
    assert inquiry.wait(LONG) == {1: b"one"}
    assert time.monotonic() - start < LONG / 2
