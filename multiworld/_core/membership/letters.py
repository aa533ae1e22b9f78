"""Letters: what a member wants to have in its world's record, for any other member that writes it. Pure.

Of n members that replace the record at once one succeeds, and the others try anew: about n² tries. So a
member that came too late several times leaves a letter beside the record, and each one that writes takes in
the letters that it finds: then few have to write at all.

A letter says only what its sender could write itself at that moment, and is for one attempt: taken in late,
twice, or after its sender has written, it changes nothing. What needs more than one member's word, to seal an
attempt above all, is in no letter.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass

from multiworld._core.membership import assigned
from multiworld._core.membership.admission import over_for, ready
from multiworld._core.membership.ledger import Claim, Ledger, Terms, claim_from_json, claim_to_json

__all__ = ["ClaimLetter", "Letter", "ReadyLetter", "letter_from", "letter_text", "take_in"]


@dataclass(frozen=True)
class ClaimLetter:
    """A member of the last generation, which is over for it, claims its seat.

    Attributes:
        attempt: number of the open attempt.
        terms: of the claim.
        claim: of rank 0; the attempt assigns another.
    """

    attempt: int
    terms: Terms
    claim: Claim

    @property
    def me(self) -> str:
        """Id of the claim."""
        return self.claim.id


@dataclass(frozen=True)
class ReadyLetter:
    """A member of a sealed attempt is ready.

    Attributes:
        attempt: its number.
        me: id of the claim.
    """

    attempt: int
    me: str


Letter = ClaimLetter | ReadyLetter


def letter_text(letter: Letter) -> str:
    """Return the letter's text: ASCII JSON."""
    if isinstance(letter, ReadyLetter):
        return json.dumps([letter.attempt, letter.me], separators=(",", ":"))
    row = [letter.attempt, dataclasses.astuple(letter.terms), claim_to_json(letter.claim)]
    return json.dumps(row, separators=(",", ":"))


def letter_from(text: str) -> Letter | None:
    """Return the letter; None for anything else: its sender writes for itself then."""
    try:
        found = json.loads(text)
        if not isinstance(found, list) or type(found[0]) is not int:
            return None
        if len(found) == 2 and type(found[1]) is str:
            return ReadyLetter(found[0], found[1])
        attempt, terms, row = found
        return ClaimLetter(attempt, Terms(*terms), claim_from_json(row))
    except (ValueError, TypeError, IndexError, RecursionError):
        return None


def take_in(ledger: Ledger, letter: Letter) -> Ledger:
    """Return the ledger with what a letter says; unchanged where that is not simply to be added."""
    if isinstance(letter, ReadyLetter):
        return ready(ledger, letter.attempt, letter.me)
    waiting, claim = ledger.waiting, letter.claim
    if waiting is None or waiting.number != letter.attempt or waiting.terms != letter.terms:
        return ledger
    if assigned.working(waiting) or assigned.survives(ledger, claim) is None:
        return ledger
    if any(each.slot == claim.slot or each.member.process == claim.member.process for each in waiting.claims):
        return ledger
    filled = dataclasses.replace(waiting, claims=assigned.with_claim(waiting, claim))
    return over_for(dataclasses.replace(ledger, waiting=filled), claim.member.process)
