"""Assumptions of the simulation: the network, and what the real code costs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Network:
    """Hosts and what lies between them. Times in seconds.

    Attributes:
        per_host: processes on each host.
        local: one way between two processes of a host.
        remote: one way between two hosts.
        jitter: mean of what is added to each way, exponentially distributed.
        loss: share of packets between hosts that are lost.
        rto: the first retransmission timeout of TCP (Linux: at least 0.2), doubled each time.
        syn: the same of a connection that is being made (Linux: 1).
        exit: from a kill until the kernel has closed the process's connections.
    """

    per_host: int = 8
    local: float = 30e-6
    remote: float = 100e-6
    jitter: float = 20e-6
    loss: float = 0.0
    rto: float = 0.2
    syn: float = 1.0
    exit: float = 5e-3


@dataclass(frozen=True)
class Costs:
    """CPU seconds of the watchdog's thread, as `benchmarks.scale.calibrate` measures them.

    Attributes:
        turn: a turn of its loop: it is woken, waits, and does what does not depend on the number of peers.
        look: to look at one peer, whether something is due; all are looked at where something may be.
        event: reading and handling what one connection brought.
        proof: making or checking a proof of membership.
        send: sending a frame.
        connect: dialing or accepting a connection.
        cores: of a host, shared by its processes; 0: as many as processes.
    """

    turn: float = 40e-6
    look: float = 0.2e-6
    event: float = 8e-6
    proof: float = 6e-6
    send: float = 10e-6
    connect: float = 40e-6
    cores: int = 0


@dataclass(frozen=True)
class StoreCosts:
    """What the store and the record in it cost, seconds; of the server as torch's TCPStore was measured.

    Attributes:
        request: of the server, for a request and its answer.
        byte: of the server, for a byte of either.
        decode: of a member, for a claim in a record that it reads.
        step: of a member, for a claim, to decide and to write the new record.
        probe: of a member, to look whether one other process is there.
    """

    request: float = 15e-6
    byte: float = 1e-9
    decode: float = 3e-6
    step: float = 2.5e-6
    probe: float = 90e-6
