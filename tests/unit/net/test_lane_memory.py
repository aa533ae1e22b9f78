"""Reading other processes' memory: real ones, which are killed, and kernels that refuse."""

from __future__ import annotations

import ctypes
import errno
import gc
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import types

import pytest
from kits.memorykit import (
    ANSWERER,
    BUFFER,
    OFFERER,
    OTHER_USER,
    PAGES,
    PATIENCE,
    REUSED,
    buffer_of,
    content,
    refusal,
    running,
)

from multiworld._net import procfs
from multiworld._net.lane import memory
from multiworld._net.lane.memory import ANSWER_SIZE, OFFER_SIZE, Copied, MemoryReader, Proof, reader_of

MB = 1 << 20
NAMESPACE = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
NOBODY = 65534


@pytest.fixture(scope="module", autouse=True)
def allowed():
    if reason := refusal():
        pytest.skip(reason)


@pytest.fixture
def buffer():
    """A process with 40 MB, its pid, and where they lie."""
    with running(BUFFER, 40 * MB) as process:
        yield process, *buffer_of(process)


@pytest.fixture(params=["with pidfds", "without pidfds", "refused pidfds"])
def pidfds(request, monkeypatch):
    if request.param == "without pidfds":
        monkeypatch.delattr(os, "pidfd_open")
    elif request.param == "refused pidfds":
        monkeypatch.setattr(os, "pidfd_open", lambda pid: fail(OSError(errno.ENOSYS, "no such call")))


def fail(error):
    raise error


def refuse(number):
    """What the system call does where it is refused."""

    def call(*_args):
        ctypes.set_errno(number)
        return -1

    return call


def address_of(array):
    return ctypes.addressof(ctypes.c_char.from_buffer(array))


def end(process):
    process.kill()
    process.wait(PATIENCE)


class TestReading:
    @pytest.mark.parametrize("size", [0, 1, 4096, 3 * MB, 40 * MB])
    def test_any_size(self, size, pidfds):
        with running(BUFFER, size) as process:
            pid, address = buffer_of(process)
            into = bytearray(size + 2)
            assert MemoryReader(pid).read(address, memoryview(into)[1:-1])
            whole = into == b"\0" + content(size) + b"\0"  # pytest compares long ones for minutes
            assert whole

    def test_nothing_is_read_without_a_call(self, monkeypatch):
        monkeypatch.setattr(memory, "_readv", lambda *_: fail(AssertionError("called")))
        assert MemoryReader(os.getpid()).read(0, memoryview(bytearray()))

    def test_items_of_several_bytes(self, buffer):
        _, pid, address = buffer
        into = bytearray(4096)
        assert MemoryReader(pid).read(address, memoryview(into).cast("d"))
        assert into == content(4096)

    def test_pieces_that_the_kernel_cuts_short(self, buffer, monkeypatch):
        _, pid, address = buffer
        real = memory._readv

        def half(pid, here, local, there, remote, flags):
            for each in (here[0], there[0]):
                each.length = each.length // 2 + 1
            return real(pid, here, local, there, remote, flags)

        monkeypatch.setattr(memory, "_readv", half)
        into = bytearray(40 * MB)
        assert MemoryReader(pid).read(address, memoryview(into))
        whole = into == content(40 * MB)
        assert whole

    def test_one_call_reads_a_piece_at_most(self, buffer, monkeypatch):
        _, pid, address = buffer
        real, pieces = memory._readv, []

        def record(pid, here, local, there, remote, flags):
            pieces.append(here[0].length)
            return real(pid, here, local, there, remote, flags)

        monkeypatch.setattr(memory, "_readv", record)
        assert MemoryReader(pid).read(address, memoryview(bytearray(40 * MB)))
        assert pieces == [16 * MB, 16 * MB, 8 * MB]

    def test_an_address_that_is_not_mapped(self, buffer, pidfds, caplog):
        _, pid, address = buffer
        reader, into = MemoryReader(pid), memoryview(bytearray(4096))
        for nowhere in (0, 4096, 1 << 63, (1 << 64) - 1):
            caplog.clear()
            with caplog.at_level(logging.DEBUG, memory.__name__):
                assert not reader.read(nowhere, into)
            assert caplog.messages == [f"the memory of process {pid} cannot be read: Bad address"]
        assert reader.read(address, into)

    def test_a_half_that_is_not_mapped(self, pidfds):
        with running(PAGES) as process:
            pid, address = buffer_of(process)
            reader, into = MemoryReader(pid), bytearray(8192)
            assert not reader.read(address, memoryview(into))
            assert reader.read(address, memoryview(into)[:4096])
            assert into[:4096] == b"x" * 4096

    def test_a_call_that_reads_nothing_is_not_repeated(self, buffer, monkeypatch):
        _, pid, address = buffer
        counts = [0]
        monkeypatch.setattr(memory, "_readv", lambda *_: counts.pop())
        assert not MemoryReader(pid).read(address, memoryview(bytearray(8)))

    def test_stop_is_asked_before_each_piece(self, buffer):
        _, pid, address = buffer
        into, answers = bytearray(40 * MB), [True, False, False]
        assert not MemoryReader(pid).read(address, memoryview(into), answers.pop)
        assert answers == []
        whole = into == content(32 * MB) + bytes(8 * MB)
        assert whole

    def test_ctrl_c_is_heard_between_pieces(self, buffer):
        _, pid, address = buffer

        def interrupt():
            signal.raise_signal(signal.SIGINT)
            return False

        into = bytearray(40 * MB)
        with pytest.raises(KeyboardInterrupt):
            MemoryReader(pid).read(address, memoryview(into), interrupt)
        assert not any(into)


class TestCopied:
    """Whether all bytes are there is seen in memory, before the system call returns."""

    @pytest.mark.parametrize("last", [0, 1, 254, 255])
    def test_it_is_true_at_the_end(self, last):
        kept, into = bytearray(b"x" * 4095 + bytes([last])), bytearray(4096)
        copied = Copied()
        assert not copied
        assert MemoryReader(os.getpid()).read(address_of(kept), memoryview(into), copied=copied)
        assert copied
        assert into == kept

    def test_it_is_false_before_the_last_piece(self, buffer):
        _, pid, address = buffer
        copied, seen = Copied(), []
        assert MemoryReader(pid).read(
            address, memoryview(bytearray(40 * MB)), lambda: seen.append(bool(copied)), copied
        )
        assert seen == [False, False, False]
        assert copied

    def test_it_stays_false_where_a_part_cannot_be_read(self):
        with running(PAGES) as process:
            pid, address = buffer_of(process)
            copied = Copied()
            assert not MemoryReader(pid).read(address, memoryview(bytearray(8192)), copied=copied)
            assert not copied

    @pytest.mark.parametrize("dies", range(5))
    def test_a_process_that_dies_meanwhile(self, dies):
        """Whatever the order in which the kernel ends it: no byte is written once it is true."""
        with running(BUFFER, 100 * MB) as process:
            pid, address = buffer_of(process)
            reader, into, wrong = MemoryReader(pid), memoryview(bytearray(8 * MB)), []

            def watch(copied):
                deadline = time.monotonic() + PATIENCE
                while not copied and not ended.is_set() and time.monotonic() < deadline:
                    continue
                if copied and into[-4096:] != expected[-4096:]:
                    wrong.append(dies)

            expected, ended = content(8 * MB), threading.Event()
            threading.Timer(0.01 * (1 + dies), process.kill).start()
            alive = True
            while alive:
                into[-4096:] = bytes(4096)
                ended.clear()
                watcher = threading.Thread(target=watch, args=(copied := Copied(),))
                watcher.start()
                alive = reader.read(address, into, copied=copied)
                ended.set()
                watcher.join(PATIENCE)
            assert not wrong


class TestRefusals:
    @pytest.mark.parametrize("name", ["EPERM", "ESRCH", "EFAULT", "EINVAL", "ENOMEM", "ENOSYS"])
    def test_the_kernel_refuses(self, buffer, monkeypatch, caplog, name):
        """As seccomp and Yama do."""
        _, pid, address = buffer
        monkeypatch.setattr(memory, "_readv", refuse(getattr(errno, name)))
        with caplog.at_level(logging.DEBUG, memory.__name__):
            assert not MemoryReader(pid).read(address, memoryview(bytearray(8)))
        assert os.strerror(getattr(errno, name)) in caplog.text
        offerer, answerer = Proof(os.getpid()), Proof(os.getpid())
        assert not offerer.accepts(answerer.answer(offerer.offer()))
        assert answerer.reader is None

    def test_the_c_library_has_no_such_call(self, buffer, monkeypatch):
        _, pid, address = buffer
        monkeypatch.setattr(ctypes, "CDLL", lambda *_args, **_kwargs: types.SimpleNamespace())
        monkeypatch.setattr(memory, "_readv", memory._system_call())
        assert not MemoryReader(pid).read(address, memoryview(bytearray(8)))
        offerer = Proof(os.getpid())
        assert Proof(os.getpid()).answer(offerer.offer()) == bytes(ANSWER_SIZE)

    def test_no_process_has_the_pid(self, pidfds):
        done = subprocess.Popen([sys.executable, "-c", ""])
        done.wait(PATIENCE)
        for pid in (done.pid, 0, -1, (1 << 31) - 1):
            assert not MemoryReader(pid).read(4096, memoryview(bytearray(8)))

    def test_a_process_that_cannot_be_identified(self, buffer, monkeypatch):
        """Without pidfds, where /proc shows no processes of others."""
        _, pid, address = buffer
        monkeypatch.delattr(os, "pidfd_open")
        monkeypatch.setattr(procfs, "start_time", lambda pid: None)
        assert not MemoryReader(pid).read(address, memoryview(bytearray(8)))

    @pytest.mark.parametrize("user", [0, NOBODY])
    def test_another_user(self, user):
        with running(OTHER_USER, user) as process:
            said, _ = process.communicate(timeout=PATIENCE)
        if said.strip() == "not allowed":
            pytest.skip("only root can become another user")
        assert said.strip() == str(user == 0)


class TestEnds:
    """The process whose memory is read is killed, or its pid is another's."""

    def test_before(self, buffer, pidfds):
        process, pid, address = buffer
        reader = MemoryReader(pid)
        end(process)
        assert not reader.read(address, memoryview(bytearray(8)))

    def test_between_two_pieces(self, buffer, pidfds):
        process, pid, address = buffer
        process.send_signal(signal.SIGSTOP)
        reader, calls = MemoryReader(pid), []

        def stop():
            calls.append(None)
            if len(calls) == 2:
                end(process)
            return False

        assert not reader.read(address, memoryview(bytearray(40 * MB)), stop)
        assert len(calls) == 2

    def test_after_the_last_piece(self, buffer, monkeypatch, pidfds):
        process, pid, address = buffer
        real, counts = memory._readv, []

        def read_and_end(*args):
            counts.append(real(*args))
            end(process)
            return counts[-1]

        monkeypatch.setattr(memory, "_readv", read_and_end)
        assert not MemoryReader(pid).read(address, memoryview(bytearray(8)))
        assert counts == [8]

    def test_a_reused_pid_is_not_read(self, buffer, monkeypatch):
        """Not a byte: it is a process that has nothing to do with this one."""
        _, pid, address = buffer

        class Ended:
            def register(self, descriptor, events):
                assert descriptor == reader._pidfd

            def poll(self, timeout):
                assert timeout == 0
                return [(reader._pidfd, memory.select.POLLIN)]

        reader, into = MemoryReader(pid), bytearray(8)
        assert reader.read(address, memoryview(into))
        into[:] = bytes(8)
        monkeypatch.setattr(memory.select, "poll", Ended)
        assert not reader.read(address, memoryview(into))
        assert into == bytes(8)

    @pytest.mark.parametrize("pidfds", ["with", "without"])
    def test_a_pid_that_is_really_reused(self, pidfds):
        with running(REUSED, pidfds, before=namespace()) as process:
            said, _ = process.communicate(timeout=PATIENCE)
        # The pid is reused; the reader of the first process does not read it; a new reader does.
        assert said.split() == ["True", "False", "True"]

    def test_readers_that_are_not_used_any_more_leave_no_descriptor(self, buffer, pidfds):
        _, pid, address = buffer
        gc.collect()
        before = procfs.names("/proc/self/fd")
        reader = MemoryReader(pid)
        assert reader.read(address, memoryview(bytearray(8)))
        del reader
        assert procfs.names("/proc/self/fd") == before


class TestShared:
    """One reader for all that read the same process."""

    def test_one_reader_and_one_descriptor(self, buffer):
        _, pid, address = buffer
        gc.collect()
        before = set(procfs.names("/proc/self/fd"))
        readers = [reader_of(pid) for _ in range(100)]
        assert len(set(map(id, readers))) == 1
        assert len(set(procfs.names("/proc/self/fd")) - before) <= 1
        assert readers[0].read(address, memoryview(bytearray(8)))
        del readers
        assert set(procfs.names("/proc/self/fd")) == before

    def test_another_process_has_another_reader(self, buffer):
        _, pid, _ = buffer
        assert reader_of(pid) is not reader_of(os.getpid())

    def test_a_process_that_has_ended_is_not_read_through_its_old_reader(self, buffer, pidfds):
        """A pid that is reused has a reader of its own; the old one still reads nothing."""
        process, pid, address = buffer
        old = reader_of(pid)
        assert old.read(address, memoryview(bytearray(8)))
        end(process)
        assert reader_of(pid) is not old

    def test_proofs_share_it(self):
        offerer, proofs = Proof(os.getpid()), [Proof(os.getpid()), Proof(os.getpid())]
        for each in proofs:
            assert offerer.accepts(each.answer(offerer.offer()))
        assert proofs[0].reader is proofs[1].reader is reader_of(os.getpid())

    def test_it_lives_while_one_world_uses_it(self, buffer):
        _, pid, address = buffer
        one, other = reader_of(pid), reader_of(pid)
        del one
        gc.collect()
        assert other.read(address, memoryview(bytearray(8)))
        assert reader_of(pid) is other


class TestProof:
    def test_a_process_that_can_be_read(self, pidfds):
        with running(OFFERER) as process:
            offer = bytes.fromhex(process.stdout.readline())
            assert len(offer) == OFFER_SIZE
            mine = Proof(process.pid)
            answer = mine.answer(offer)
            assert len(answer) == ANSWER_SIZE
            _, address, size = memory._OFFER.unpack(offer)
            secret = bytearray(size)
            assert mine.reader.read(address, memoryview(secret))
            assert secret not in offer
            assert secret not in answer
            assert process.communicate(answer.hex() + "\n", PATIENCE)[0] == "True\n"

    def test_each_has_a_secret_of_its_own(self):
        one, other = Proof(os.getpid()), Proof(os.getpid())
        assert one._secret.raw != other._secret.raw
        assert not one.accepts(other.answer(other.offer()))

    def test_other_bytes_where_the_offer_points(self):
        """A process of the same pid, in another namespace or on another host."""
        offerer, answerer = Proof(os.getpid()), Proof(os.getpid())
        secret = offerer._secret.raw
        offerer._secret.raw = Proof(os.getpid())._secret.raw
        answer = answerer.answer(offerer.offer())
        assert answer != bytes(ANSWER_SIZE)
        offerer._secret.raw = secret
        assert not offerer.accepts(answer)
        assert offerer.accepts(answerer.answer(offerer.offer()))

    def test_the_same_bytes_elsewhere(self):
        """A fork's copy, say: what is read there later is not what the offerer has."""
        offerer, answerer = Proof(os.getpid()), Proof(os.getpid())
        copy = bytearray(offerer._secret.raw)
        pid, _, size = memory._OFFER.unpack(offerer.offer())
        answer = answerer.answer(memory._OFFER.pack(pid, address_of(copy), size))
        assert answer != bytes(ANSWER_SIZE)
        assert not offerer.accepts(answer)

    @pytest.mark.parametrize("size", [0, 1, 15, 17, (1 << 32) - 1])
    def test_offers_of_other_lengths(self, size):
        kept, answerer = bytearray(64), Proof(os.getpid())
        offer = memory._OFFER.pack(os.getpid(), address_of(kept), size)
        assert answerer.answer(offer) == bytes(ANSWER_SIZE)
        assert answerer.reader is None

    @pytest.mark.parametrize("offer", [b"", b"x", bytes(OFFER_SIZE - 1), bytes(OFFER_SIZE + 1)])
    def test_bytes_that_are_no_offer(self, offer):
        assert Proof(os.getpid()).answer(offer) == bytes(ANSWER_SIZE)

    @pytest.mark.parametrize("answer", [b"", b"x", bytes(ANSWER_SIZE), bytes(ANSWER_SIZE + 1)])
    def test_bytes_that_are_no_answer(self, answer):
        assert not Proof(os.getpid()).accepts(answer)

    @pytest.mark.parametrize("peer", [None, 0, 1])
    def test_the_memory_of_another_process_than_the_one_at_the_other_end(self, peer):
        """It would give away bytes of any process of this user, also of one on no world of the peer's."""
        offerer, answerer = Proof(None), Proof(peer)
        assert answerer.answer(offerer.offer()) == bytes(ANSWER_SIZE)
        assert answerer.reader is None

    def test_an_offer_that_cannot_be_read_leaves_no_earlier_reader(self):
        offerer, answerer = Proof(os.getpid()), Proof(os.getpid())
        assert offerer.accepts(answerer.answer(offerer.offer()))
        assert answerer.reader is not None
        pid, _, size = memory._OFFER.unpack(offerer.offer())
        assert answerer.answer(memory._OFFER.pack(pid, 4096, size)) == bytes(ANSWER_SIZE)
        assert answerer.reader is None

    def test_a_forked_child_offers_its_own_memory(self, monkeypatch):
        proof = Proof(os.getpid())
        monkeypatch.setattr(os, "getpid", lambda: 7)
        assert memory._OFFER.unpack(proof.offer())[0] == 7

    def test_an_offerer_in_another_pid_namespace(self):
        """Its pid, 1, is another process's here."""
        with running(OFFERER, before=namespace()) as offerer:
            offer = bytes.fromhex(offerer.stdout.readline())
            answer = Proof(1).answer(offer).hex()
            assert offerer.communicate(answer + "\n", PATIENCE)[0] == "False\n"

    def test_a_reader_in_another_pid_namespace(self):
        """The pid that is offered is no process's there."""
        with running(OFFERER) as offerer, running(ANSWERER, before=namespace()) as reader:
            answer, _ = reader.communicate(offerer.stdout.readline(), PATIENCE)
            assert bytes.fromhex(answer) == bytes(ANSWER_SIZE)
            assert offerer.communicate(answer, PATIENCE)[0] == "False\n"


def namespace():
    """Return the command that runs another one in a pid namespace of its own."""
    if shutil.which(NAMESPACE[0]) is None:
        pytest.skip("pid namespaces need unshare(1)")
    done = subprocess.run(
        [*NAMESPACE, "test", "-w", "/proc/sys/kernel/ns_last_pid"],
        capture_output=True, text=True, timeout=PATIENCE, check=False,
    )  # fmt: skip
    if done.returncode:
        pytest.skip(f"pid namespaces cannot be used here: {done.stderr.strip()}")
    return NAMESPACE


class TestStartTime:
    def test_it_stays_and_differs(self):
        mine = procfs.start_time(os.getpid())
        assert mine == procfs.start_time(os.getpid())
        with running(BUFFER, 8) as process:
            pid, _ = buffer_of(process)
            assert procfs.start_time(pid) > mine

    def test_names_of_any_characters(self):
        program = f"from pathlib import Path; Path('/proc/self/comm').write_text(') Z 1 2 ('){BUFFER}"
        before = procfs.start_time(os.getpid())
        with running(program, 8) as process:
            pid, _ = buffer_of(process)
            assert procfs.start_time(pid) > before

    def test_a_process_that_was_not_waited_for(self):
        with running("") as process:
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
            assert procfs.start_time(process.pid) is None
        assert procfs.start_time(process.pid) is None
