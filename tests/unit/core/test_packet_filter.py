"""The packet filters of gloo's listeners, by an interpreter of classic BPF, and on a real socket."""

from __future__ import annotations

import socket
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multiworld._core.packet_filter import DROP_ALL, encode, pair_numbers

SYN, RST, ACK, PUSH, FIN = 0x02, 0x04, 0x10, 0x08, 0x01


def packet(flags, payload=b"", options=0):
    header = struct.pack("!HHIIBBHHH", 1, 2, 3, 4, (5 + options) << 4, flags, 5, 6, 0)
    return header + b"\x01" * 4 * options + payload


def run(program, data):
    """Return whether the program lets `data` through; a load outside of it drops it, as in the kernel."""
    a, x, at, memory = 0, 0, 0, [0] * 16
    while True:
        code, jump_true, jump_false, k = program[at]
        at += 1
        if code in {0x30, 0x50, 0x40}:
            size, start = (4 if code == 0x40 else 1), k + (0 if code == 0x30 else x)
            if start + size > len(data):
                return False
            a = int.from_bytes(data[start : start + size], "big")
        elif code in {0x15, 0x25, 0x35, 0x45}:
            holds = {0x15: a == k, 0x25: a > k, 0x35: a >= k, 0x45: bool(a & k)}[code]
            at += jump_true if holds else jump_false
        elif code == 0x06:
            return k > 0
        elif code in {0x60, 0x61}:
            a, x = (memory[k], x) if code == 0x60 else (a, memory[k])
        elif code == 0x02:
            memory[k] = a
        else:
            results = {
                0x07: (a, a), 0x80: (len(data), x), 0x54: (a & k, x), 0x64: (a << (k & 31) & 0xFFFFFFFF, x),
                0x74: (a >> (k & 31), x), 0x4C: (a | x, x), 0x1C: (a - x & 0xFFFFFFFF, x),
            }  # fmt: skip
            a, x = results[code]


@given(
    st.sampled_from(["little", "big"]), st.integers(0, 2**32 - 1), st.integers(0, 300),
    st.integers(-(2**63), 2**63 - 1) | st.integers(0, 700), st.integers(0, 10), st.binary(max_size=9),
)  # fmt: skip
def test_those_come_in_who_say_an_expected_number_first(order, lowest, count, said, options, more):
    highest = min(lowest + count, 2**32 - 1)
    program = pair_numbers(lowest, highest, order)
    for number in (said, lowest, highest, lowest - 1, highest + 1):
        payload = number.to_bytes(8, order, signed=True) + more
        for flags in (ACK, ACK | PUSH, ACK | FIN):
            assert run(program, packet(flags, payload, options)) == (lowest <= number <= highest)


@given(st.binary(max_size=7), st.integers(0, 10))
def test_whoever_says_less_does_not_come_in(said, options):
    assert not run(pair_numbers(0, 2**32 - 1, "little"), packet(ACK, said, options))


def test_a_connection_may_be_asked_for_and_reset():
    program = pair_numbers(3, 4, "little")
    assert run(program, packet(SYN, options=5))
    assert run(program, packet(RST))
    assert not run(program, packet(ACK))
    assert not run(program, packet(FIN | ACK))


def test_a_deaf_listener_hears_nothing():
    for flags in (SYN, ACK, RST):
        assert not run(DROP_ALL, packet(flags, bytes(8)))


@pytest.mark.parametrize("numbers", [(-1, 3), (4, 3), (0, 2**32)])
def test_numbers_that_no_filter_can_hold(numbers):
    with pytest.raises(ValueError, match="numbers"):
        pair_numbers(*numbers, "little")


def test_as_it_lies_in_memory():
    assert encode(DROP_ALL) == struct.pack("=HBBI", 6, 0, 0, 0)


def test_the_kernel_reads_it_the_same_way():
    ctypes = pytest.importorskip("ctypes")
    octets = encode(pair_numbers(7, 9, "little"))
    held = ctypes.create_string_buffer(octets, len(octets))
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as wrong, socket.socket() as right:
        try:
            server.setsockopt(
                socket.SOL_SOCKET, 26, struct.pack("@HP", len(octets) // 8, ctypes.addressof(held))
            )
        except OSError as error:
            pytest.skip(f"no packet filters here: {error}")
        for caller, number in ((wrong, 10), (right, 9)):
            caller.settimeout(10)
            caller.connect(server.getsockname())
            caller.sendall(number.to_bytes(8, "little"))
        server.settimeout(10)
        connection, address = server.accept()
        with connection:
            assert address == right.getsockname()
            server.settimeout(0.3)
            with pytest.raises(TimeoutError):
                server.accept()
