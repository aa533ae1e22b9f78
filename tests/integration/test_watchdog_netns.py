"""Two network namespaces with a cable between them that can be cut."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time

import pytest
from watchkit import SLACK, Family, join

HANG = 3.0  # seconds; a stall of either side that is longer is a hang too


def ip(*arguments, check=True):
    return subprocess.run(["ip", *arguments], check=check, capture_output=True, text=True, timeout=60)


def tc(*arguments, netns):
    return subprocess.run(
        ["ip", "netns", "exec", netns, "tc", *arguments],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.fixture
def cable():
    """Names of two namespaces, 10.77.0.1 and 10.77.0.2, joined by the pair m8da-m8db."""
    if shutil.which("ip") is None:
        pytest.skip("there is no ip(8) here")
    names = [f"m8d-{os.getpid()}-{side}" for side in "ab"]
    made = ip("netns", "add", names[0], check=False)
    if made.returncode:
        pytest.skip(f"network namespaces are not permitted here: {made.stderr.strip()}")
    try:
        ip("netns", "add", names[1])
        pair = ip(
            "link", "add", "m8da", "netns", names[0], "type", "veth", "peer", "name", "m8db", "netns", names[1],
            check=False,
        )  # fmt: skip
        if pair.returncode:
            pytest.skip(f"veth pairs are not permitted here: {pair.stderr.strip()}")
        for number, (name, device) in enumerate(zip(names, ("m8da", "m8db"), strict=True), 1):
            ip("-n", name, "address", "add", f"10.77.0.{number}/24", "dev", device)
            ip("-n", name, "link", "set", device, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            ip("netns", "delete", name, check=False)


@pytest.fixture
def pair(cable):
    with Family() as family:
        children = [
            family.born(1, host=f"10.77.0.{number}", netns=name)[0] for number, name in enumerate(cable, 1)
        ]
        yield children


def both_say(children, cause, cut):
    """`cut`: a moment that is not after it."""
    for rank, child in enumerate(children):
        verdict = child.wait("verdict")
        assert (verdict["cause"], verdict["ranks"]) == (cause, [1 - rank])
        # Counted from the last sign of life, which a stalled machine may have kept from being sent.
        assert 0.25 * HANG <= verdict["at"] - cut <= 1.2 * HANG + SLACK


def test_a_cable_that_is_down_makes_both_sides_unreachable(cable, pair):
    join(pair, hang=HANG)
    cut = time.monotonic()
    ip("-n", cable[0], "link", "set", "m8da", "down")
    both_say(pair, "unreachable", cut)


def test_packets_that_are_dropped_make_both_sides_unreachable(cable, pair):
    join(pair, hang=HANG)
    began = time.monotonic()
    for name, device in zip(cable, ("m8da", "m8db"), strict=True):
        # netem where the kernel has it; a policer that lets nothing pass where it has not.
        cut = tc("qdisc", "add", "dev", device, "root", "netem", "loss", "100%", netns=name)
        if cut.returncode:
            cut = tc(
                "qdisc",
                "add",
                "dev",
                device,
                "root",
                "tbf",
                "rate",
                "8bit",
                "burst",
                "1",
                "limit",
                "1",
                netns=name,
            )
        if cut.returncode:
            pytest.skip(f"this kernel drops no packets for tc: {cut.stderr.strip()}")
    both_say(pair, "unreachable", began)


def test_a_stopped_process_behind_a_cable_is_hung_not_unreachable(pair):
    join(pair, hang=HANG)
    pair[1].send_signal(signal.SIGSTOP)
    verdict = pair[0].wait("verdict")
    assert (verdict["cause"], verdict["ranks"]) == ("hung", [1])


def test_a_cable_that_comes_back_carries_the_next_generation(cable, pair):
    join(pair, hang=HANG)
    cut = time.monotonic()
    ip("-n", cable[0], "link", "set", "m8da", "down")
    both_say(pair, "unreachable", cut)
    for child in pair:
        child.call("leave", world="w")
        child.wait("left")
    ip("-n", cable[0], "link", "set", "m8da", "up")
    join(pair, hang=HANG, generation=2, token="cd" * 16)
    for child in pair:
        child.quiet("verdict", 0.5)
