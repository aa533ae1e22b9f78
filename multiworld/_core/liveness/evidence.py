"""Evidence from the host of a silent member: questions, answers and their proofs.

A small program beside each member (`multiworld._net.liveness.evidence_program`) answers a datagram with the
kernel's view of the member's threads during a tenth of a second. Question and answer are authenticated with
the token of a world that the member is in.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
from dataclasses import dataclass

__all__ = ["ANSWER_SIZE", "RUNS_FROM", "Activity", "Evidence", "answer", "question"]

RUNS_FROM = 0.5
"""Share of the time for which some thread ran, or waited for a core, that makes a process one that runs.

A thread that holds the GIL and computes has about 1, on a saturated machine too. Threads that wait for the
GIL wake up 200 times a second, gloo's 100 times: below 0.05 each (measured).
"""

_ASKED = b"m8dq"
_ANSWER = b"m8da"
ANSWER_SIZE = 39
"""Bytes."""


class Activity(enum.Enum):
    """State of a process."""

    RUNS = "it runs"
    STOPPED = "it is stopped"
    SLEEPS = "none of its threads runs"
    UNKNOWN = "nothing is known"


@dataclass(frozen=True)
class Evidence:
    """Observation of a process.

    Attributes:
        state: T where all threads are stopped, R or S where one ran or all slept, ``?`` where nothing was
            seen.
        share: of the time, 0 to 1, for which its busiest thread ran or waited for a core.
    """

    state: str
    share: float

    @property
    def activity(self) -> Activity:
        """The state that the observation implies."""
        if self.state == "T":
            return Activity.STOPPED
        if self.state not in {"R", "S"}:
            return Activity.UNKNOWN
        return Activity.RUNS if self.share >= RUNS_FROM else Activity.SLEEPS


def question(token: bytes, nonce: bytes) -> bytes:
    """Return the question's datagram; `token`: 16 bytes of a world, `nonce`: 16 fresh ones."""
    name = hashlib.blake2b(token, digest_size=8).digest()
    return _ASKED + name + nonce + _proof(token, b"q" + nonce)


def answer(datagram: bytes, token: bytes) -> Evidence | None:
    """Parse an answer; None where it is invalid. The caller compares its nonce.

    Args:
        datagram: as received; bytes 4 to 19 are the nonce.
        token: of the question.
    """
    if len(datagram) != ANSWER_SIZE or datagram[:4] != _ANSWER:
        return None
    nonce, said, proof = datagram[4:20], datagram[20:23], datagram[23:]
    if not hmac.compare_digest(_proof(token, b"a" + nonce + said), proof):
        return None
    return Evidence(chr(said[0]), int.from_bytes(said[1:], "big") / 1000)


def _proof(token: bytes, text: bytes) -> bytes:
    return hashlib.blake2b(text, key=token, digest_size=16).digest()
