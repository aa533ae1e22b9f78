"""Steps that are taken in the background when they are due, and whose turn a step that hangs does not take."""

from __future__ import annotations

import os
import threading
import time

import pytest

from multiworld._generation.background_release import Releaser
from multiworld._net.stores import connected_processes as callers_module
from multiworld._net.stores.connected_processes import callers, others

PATIENCE = 120.0


def until(what):
    deadline = time.monotonic() + PATIENCE
    while not (found := what()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return found


class TestReleaser:
    def test_a_step_is_taken_when_it_is_due_and_again_as_often_as_it_says(self):
        releaser, times = Releaser(), []
        start = time.monotonic()

        def step():
            times.append(time.monotonic() - start)
            return 0.05 if len(times) < 3 else None

        releaser.add(0.1, step)
        assert releaser.threads == 1
        assert until(lambda: len(times) == 3 and releaser.threads == 0)
        assert times[0] >= 0.1
        assert times[1] >= times[0] + 0.05

    def test_the_earlier_one_comes_first_whenever_it_was_added(self):
        # The clock stands still while they are added, as this thread may.
        taken, adding, start = [], [True], time.monotonic()
        releaser = Releaser(threads=1, clock=lambda: start if adding else time.monotonic())
        for delay in (0.3, 0.1, 0.2):
            releaser.add(delay, lambda delay=delay: taken.append(delay))
        adding.clear()
        assert until(lambda: len(taken) == 3)
        assert taken == [0.1, 0.2, 0.3]

    def test_steps_that_hang_hold_up_a_thread_each_and_one_that_fails_none(self, caplog):
        releaser, done, bell = Releaser(threads=2), [], threading.Event()
        releaser.add(0.0, lambda: bell.wait(PATIENCE) and None)
        releaser.add(0.0, lambda: 1 / 0)
        releaser.add(0.0, lambda: done.append(1))
        assert until(lambda: done)
        assert "could not be freed" in caplog.text
        assert releaser.threads == 1
        bell.set()
        assert until(lambda: releaser.threads == 0)

    def test_a_step_that_hangs_does_not_hold_up_one_that_comes_later(self):
        releaser, began, done, bell = Releaser(threads=2), threading.Event(), [], threading.Event()

        def hangs():
            began.set()
            bell.wait(2 * PATIENCE)

        releaser.add(0.0, hangs)
        assert began.wait(PATIENCE)
        releaser.add(0.0, lambda: done.append(1))
        assert until(lambda: done)
        assert until(lambda: releaser.threads == 1)
        bell.set()
        assert until(lambda: releaser.threads == 0)

    def test_there_are_never_more_threads_than_the_limit(self):
        releaser, bell, taken = Releaser(threads=2), threading.Event(), []
        for _ in range(5):
            releaser.add(0.0, lambda: taken.append(bell.wait(PATIENCE)))
        assert releaser.threads == 2
        bell.set()
        assert until(lambda: len(taken) == 5 and releaser.threads == 0)

    def test_without_a_thread_to_be_had_the_next_step_brings_one(self, monkeypatch):
        releaser, taken = Releaser(), []

        def refuse(_):
            raise RuntimeError("can't start new thread")

        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            releaser.add(0.0, lambda: taken.append("first"))
        assert (releaser.threads, taken) == (0, [])
        releaser.add(0.0, lambda: taken.append("second"))
        assert until(lambda: len(taken) == 2)

    def test_it_stops_when_the_step_that_is_being_taken_has_ended(self):
        releaser, began, bell, taken = Releaser(threads=1), threading.Event(), threading.Event(), []

        def step():
            began.set()
            bell.wait(PATIENCE)
            taken.append("first")
            return 0.0  # once more

        releaser.add(0.0, step)
        releaser.add(0.0, lambda: taken.append("second"))
        assert began.wait(PATIENCE)
        assert not releaser.stop(time.monotonic() + 0.05)
        assert releaser.threads == 1
        bell.set()
        assert releaser.stop(time.monotonic() + PATIENCE)
        assert (releaser.threads, taken) == (0, ["first"])
        releaser.add(0.0, lambda: taken.append("later"))
        assert until(lambda: taken == ["first", "later"])

    def test_it_stops_at_once_while_nothing_is_due(self):
        releaser, taken = Releaser(), []
        releaser.add(PATIENCE * 10, lambda: taken.append("never"))
        assert releaser.stop(time.monotonic() + PATIENCE)
        assert (releaser.threads, taken) == (0, [])

    def test_a_forked_child_starts_with_nothing(self):
        releaser, bell = Releaser(), threading.Event()
        releaser.add(0.0, lambda: bell.wait(PATIENCE) and None)
        pid = os.fork()
        if not pid:
            os._exit(releaser.threads)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        bell.set()
        assert until(lambda: releaser.threads == 0)


HEAD = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode"
SERVER, OURS, THEIRS = "0100007F:73AA", "0100007F:9000", "0100007F:9001"
MAPPED = "0000000000000000FFFF0000"


def row(local, remote, inode, state="01"):
    return (
        f"   0: {local} {remote} {state} 00000000:00000000 00:00000000 00000000     0        0 {inode} 1 0\n"
    )


class TestCallers:
    def count(self, *rows, own=(1, 2, 3)):
        return callers([HEAD, *rows], 0x73AA, set(own))

    def test_a_connection_from_elsewhere_counts_and_the_listener_does_not(self):
        assert self.count(row(SERVER, "00000000:0000", 1, state="0A")) == 0
        assert self.count(row(SERVER, THEIRS, 2), row(THEIRS, SERVER, 9)) == 1

    def test_a_connection_of_this_process_to_itself_does_not(self):
        assert self.count(row(SERVER, OURS, 2), row(OURS, SERVER, 3)) == 0

    @pytest.mark.parametrize("prefix", [MAPPED, "00000000000000000000FFFF"])
    def test_nor_one_that_it_made_from_an_ipv6_socket(self, prefix):
        assert self.count(row(SERVER, OURS, 2), row(prefix + OURS, prefix + SERVER, 3)) == 0

    def test_nor_one_whose_other_end_has_gone(self):
        assert self.count(row(SERVER, THEIRS, 2, state="08")) == 0

    def test_nor_one_of_another_process_that_has_the_port_at_another_address(self):
        assert self.count(row("0200007F:73AA", THEIRS, 9)) == 0

    def test_the_system_is_asked_about_a_real_server(self):
        import socket

        with socket.socket() as server:
            server.bind(("127.0.0.1", 0))
            server.listen()
            port = server.getsockname()[1]
            assert others(port) is False
            with socket.create_connection(("127.0.0.1", port)), server.accept()[0]:
                assert others(port) is False  # from here

    def test_where_the_system_does_not_say_nothing_is_known(self, monkeypatch):
        monkeypatch.setattr(callers_module, "_TABLES", ("none",))
        assert others(1) is None
        monkeypatch.setattr(callers_module, "_sockets", lambda table: int("x"))
        assert others(1) is None
