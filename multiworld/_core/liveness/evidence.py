"""What the kernel of a silent member's host says about it, and how that is asked for.

A small program beside each member (`multiworld._net.liveness.evidence_program`) answers a question, a datagram, with what the
member's threads did in a tenth of a second. Who asks proves to hold the token of a world that the member is in; the
answer is proved by the same token.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
from dataclasses import dataclass

__all__ = ["ANSWER_SIZE", "RUNS_FROM", "Evidence", "Standing", "answer", "question"]

RUNS_FROM = 0.5
"""Share of the time for which some thread ran, or waited for a core, that makes a process one that runs.

A thread that holds the GIL and computes has about 1, on a saturated machine too. Threads that wait for the GIL wake up
200 times a second, gloo's 100 times: below 0.05 each (measured).
"""

_ASKED = b"m8dq"
_ANSWER = b"m8da"
ANSWER_SIZE = 39
"""Bytes."""


class Standing(enum.Enum):
    """What a process does."""

    RUNS = "it runs"
    STOPPED = "it is stopped"
    SLEEPS = "none of its threads runs"
    UNKNOWN = "nothing is known"


@dataclass(frozen=True)
class Evidence:
    """What was seen of a process.

    Attributes:
        state: T where all threads are stopped, R or S where one ran or all slept, ``?`` where nothing was seen.
        share: of the time, 0 to 1, for which its busiest thread ran or waited for a core.
    """

    state: str
    share: float

    @property
    def standing(self) -> Standing:
        """What follows from it."""
        if self.state == "T":
            return Standing.STOPPED
        if self.state not in {"R", "S"}:
            return Standing.UNKNOWN
        return Standing.RUNS if self.share >= RUNS_FROM else Standing.SLEEPS


def question(token: bytes, nonce: bytes) -> bytes:
    """Return what is asked; `token`: 16 bytes of a world, `nonce`: 16 fresh ones."""
    name = hashlib.blake2b(token, digest_size=8).digest()
    return _ASKED + name + nonce + _proof(token, b"q" + nonce)


def answer(datagram: bytes, token: bytes) -> Evidence | None:
    """Read an answer to a question with the nonce that it repeats; None where it is none.

    Args:
        datagram: what came; bytes 4 to 19 are the nonce.
        token: with which was asked.
    """
    if len(datagram) != ANSWER_SIZE or datagram[:4] != _ANSWER:
        return None
    nonce, said, proof = datagram[4:20], datagram[20:23], datagram[23:]
    if not hmac.compare_digest(_proof(token, b"a" + nonce + said), proof):
        return None
    return Evidence(chr(said[0]), int.from_bytes(said[1:], "big") / 1000)


def _proof(token: bytes, text: bytes) -> bytes:
    return hashlib.blake2b(text, key=token, digest_size=16).digest()
