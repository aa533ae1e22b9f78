"""Blocking calls on threads of their own: results, errors, and calls that never return."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest

from multiworld._net.blocking import BlockingCall


def test_the_result_is_the_functions():
    call = BlockingCall(lambda: 42, name="m8d-test")
    assert call.wait(30.0)
    assert call.result() == 42


def test_the_error_is_the_functions_and_keeps_nothing_alive():
    class Error(Exception):
        pass

    def fail():
        raise Error("told")

    call = BlockingCall(fail, name="m8d-test")
    assert call.wait(30.0)
    with pytest.raises(Error, match="told"):
        call.result()
    gc.collect()
    gc.disable()
    try:
        kept = weakref.ref(call)
        del call
        assert kept() is None
    finally:
        gc.enable()


def test_a_call_that_does_not_return_is_left_behind():
    go_on = threading.Event()
    call = BlockingCall(lambda: go_on.wait(30.0), name="m8d-test")
    assert not call.wait(0.01)
    assert not call.wait(-1.0)
    go_on.set()
    assert call.wait(30.0)
    assert call.result()
