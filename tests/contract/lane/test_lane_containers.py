"""Members that may not read each other's memory for real: other pid namespaces, other users, a filter of system calls."""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import struct

import pytest
import torch
from kits.contract.waykit import RECEIVES, SENDS, readers, world

LIBC = ctypes.CDLL(None, use_errno=True)
NEW_PID, NEW_MOUNTS = 0x20000000, 0x00020000
PRIVATE = (1 << 18) | (1 << 14)  # MS_PRIVATE, MS_REC
SIZES = [8, 100_000, 3 << 20]
"""Bytes of messages that are sent at once, that are read where that is allowed, and that are announced in any case."""


def checked(result):
    if result:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def in_namespace(me):
    """Go on as process 1 of a pid namespace of its own; this process waits for it, and ends as it does."""
    checked(LIBC.unshare(NEW_PID | NEW_MOUNTS))
    if child := os.fork():
        _, status = os.waitpid(child, 0)
        os._exit(os.waitstatus_to_exitcode(status))
    LIBC.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    checked(LIBC.mount(b"none", b"/", None, PRIVATE, None))
    checked(LIBC.mount(b"proc", b"/proc", b"proc", 0, None))
    assert os.getpid() == 1


def as_user(me):
    """Go on as a user without rights, another one for each rank."""
    os.setgroups([])
    os.setgid(65534 - me.rank)
    os.setuid(65534 - me.rank)


def filtered(_):
    """Have the kernel refuse process_vm_readv, as the filters of containers do."""
    load, compare, answer = 0x20, 0x15, 0x06
    refuse, allow = 0x00050000 | 1, 0x7FFF0000  # SECCOMP_RET_ERRNO with EPERM, SECCOMP_RET_ALLOW
    rules = [(load, 0, 0, 0), (compare, 0, 1, 310), (answer, 0, 0, refuse), (answer, 0, 0, allow)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in rules))
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(rules), ctypes.addressof(code)))
    checked(LIBC.prctl(38, 1, 0, 0, 0))  # PR_SET_NO_NEW_PRIVS
    checked(LIBC.prctl(22, 2, program, 0, 0))  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER


KINDS = {"pid namespaces": in_namespace, "users": as_user, "filter": filtered}


def member(me, size, kind):
    torch.set_num_threads(1)  # threads of OpenMP do not come along to a fork
    with world(me, size, name="before") as w:  # what is loaded later may not be readable later
        me.emit("before", readers=readers(w))
        talk(w)
        w.barrier()
    refused = ""
    if me.rank:
        try:
            KINDS[kind](me)
        except OSError as error:
            refused = str(error)
    me.emit("changed", refused=refused)
    me.hear()
    with world(me, size) as w:
        me.emit("readers", lane=w._gen.lane is not None, readers=readers(w))
        talk(w)
        w.barrier()


def talk(w):
    """Each to each, in several ways."""
    for nbytes in SIZES:
        for send, receive in (
            ("method", "recv_method"),
            ("awaited", "recv_awaited"),
            ("block", "recv_block"),
        ):
            for src in range(w.world_size):
                for dst in {*range(w.world_size)} - {src}:
                    sent = torch.full((nbytes,), 10 * src + dst, dtype=torch.uint8)
                    if w.rank == src:
                        SENDS[send](w, sent, dst)
                    elif w.rank == dst:
                        RECEIVES[receive](w, room := torch.zeros(nbytes, dtype=torch.uint8), src)
                        assert torch.equal(room, sent)
        total = torch.ones(nbytes // 4)
        w.all_reduce(total)
        assert (total == w.world_size).all()


@pytest.mark.parametrize("kind", KINDS)
def test_members_that_may_not_read_each_other_send(cast, kind):
    if kind == "filter" and platform.machine() != "x86_64":
        pytest.skip("the filter has the numbers of x86-64")
    members = cast.all(member, 3, kind=kind)
    before = [each.expect("before").readers for each in members]
    if refused := [each.expect("changed").refused for each in members][1]:
        pytest.skip(f"{kind}: not permitted here: {refused}")
    for each in members:
        each.say("go")
    seen = [each.expect("readers") for each in members]
    assert [each.lane for each in seen] == [True] * 3
    assert [each.readers for each in seen[1:]] == [[], []]
    # root may read processes of other users, and who is not filtered may read those that are
    assert seen[0].readers == ([] if kind == "pid namespaces" else before[0])
    assert [each.finish() for each in members] == [0] * 3
