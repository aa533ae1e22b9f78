"""Ledger: a world's membership record in the store, one small JSON text replaced by compare-and-set.

With one record per world every step of a member is one atomic replacement: no order of keys matters, and no
part of an older attempt can be mistaken for the current one.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from multiworld._core.membership import serving
from multiworld._core.membership.roster import Endpoint, LaneAddress, Member
from multiworld._core.membership.state_sources import advances, outdated
from multiworld.errors import JoinError

__all__ = [
    "FAILURES_KEPT",
    "MAX_RECORD",
    "MAX_SIZE",
    "MAX_TEXT",
    "Attempt",
    "Claim",
    "Failure",
    "Ledger",
    "Terms",
    "claim_from_json",
    "claim_to_json",
    "decode",
    "encode",
]

MAX_RECORD = 1 << 22
"""Bytes. A claim takes about 200; a longer record was not written by multiworld and is not read."""
MAX_SIZE = 1 << 12
"""Members of a world. Their claims, in three attempts, fit into `MAX_RECORD`."""
MAX_TEXT = 600
"""Characters of each part of a failure's message that go on the store."""
FAILURES_KEPT = 4
"""How many closed attempts keep their reason, for members that were too slow to read it at once."""

_FORMAT = 1
_NO_STATE, _TORN, _OUTDATED = 1, 2, 3
"""What is said of a member's state in its row, where that is not the latest."""
_MOST_KNOWN = 2 * MAX_SIZE
_known: dict[str, Claim] = {}  # by the text of their rows; emptied when there are so many


@dataclass(frozen=True)
class Terms:
    """Terms of a join on which all members must agree.

    Attributes:
        size: how many members the world has; at most, where ranks are assigned.
        backend: as given to the join, "gloo" for instance.
        device: the type of device, "cpu" or "cuda" for instance.
        least: how many members it has at least, where ranks are assigned; 0 where members choose them.
        state: of the state that members that come get from the others: its names, as text; "" for none.
    """

    size: int
    backend: str
    device: str
    least: int = 0
    state: str = ""

    @property
    def assigned(self) -> bool:
        """Whether ranks are assigned, so that the size may change from one generation to the next."""
        return self.least > 0


@dataclass(frozen=True)
class Claim:
    """A member's claim of its rank in one attempt.

    Attributes:
        id: drawn anew for every join: two joins of one process are two claims.
        member: the claimant, with its rank; where ranks are assigned, one by the order of claims until then.
        last: the last generation of the world that its process knows of.
        was: the last generation that its process was a member of; 0 if none, and where members choose ranks.
            In a sealed attempt 0 as well for a member that comes new.
        step: which state its process had when it claimed: how many advances (`World.advance`); None: it has
            not had the world's state yet; a negative number: see `state_sources`.
        working: whether its generation still works: the next one is to be prepared beside it.
        torn: whether its process had received the world's state in part, into its own, when it claimed.
    """

    id: str
    member: Member
    last: int
    was: int = 0
    step: int | None = 0
    working: bool = False
    torn: bool = False

    @property
    def rank(self) -> int:
        """The claimed or assigned rank."""
        return self.member.rank

    @property
    def slot(self) -> int | str:
        """What no other claim of an attempt has: the seat, or else the rank."""
        return self.member.slot


@dataclass(frozen=True)
class Attempt:
    """One attempt to make a generation: open, then sealed (all claimed), then active (all ready).

    Attributes:
        number: counts the attempts of the world in this store.
        terms: those of all its members.
        claims: ascending by rank.
        generation: 0 while it is open.
        token: 32 hex digits, empty while it is open.
        ready: ranks that reported ready, ascending.
        over: ranks for which the generation is over, ascending.
        lost: ranks that will not come to the next generation, ascending: those that died, and those that
            left. Kept only where ranks are assigned.
        leaving: ranks that want to leave at an advance, ascending.
        after: the generation beside which this one is prepared; 0 where that was over.
        limits: by rank in that generation, the advance that its member does not pass before all have said
            theirs; 0: it has not said. Empty without `after`.
        entered: ranks in that generation of those that have left it for this one, or for good.
        left: those of `lost` that have said so themselves.
    """

    number: int
    terms: Terms
    claims: tuple[Claim, ...]
    generation: int = 0
    token: str = ""
    ready: tuple[int, ...] = ()
    over: tuple[int, ...] = ()
    lost: tuple[int, ...] = ()
    leaving: tuple[int, ...] = ()
    after: int = 0
    limits: tuple[int, ...] = ()
    entered: tuple[int, ...] = ()
    left: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        """How many members it has: where ranks are assigned, as many as have claimed one."""
        return len(self.claims) if self.terms.assigned else self.terms.size

    @property
    def missing(self) -> tuple[int, ...]:
        """Ranks that have to be claimed yet."""
        there = {claim.rank for claim in self.claims}
        return tuple(rank for rank in range(self.terms.least or self.terms.size) if rank not in there)

    @property
    def unready(self) -> tuple[int, ...]:
        """Ranks that have not reported ready."""
        said = set(self.ready)
        return tuple(rank for rank in range(self.size) if rank not in said)

    @property
    def active(self) -> bool:
        """Whether every member has reported ready and, if prepared beside another, when it begins."""
        return self.generation > 0 and not self.unready and all(self.limits)

    @property
    def holders(self) -> tuple[Claim, ...]:
        """The members whose generation it is: newcomers only once a member of the one before has entered it.

        Before that these know nothing of the world, and must not go on with it alone.
        """
        if not self.after or self.entered:
            return self.claims
        return tuple(claim for claim in self.claims if claim.was)

    @property
    def entry(self) -> int:
        """The advance at which members of the generation before enter this one; 0: not known, or at once.

        It is one that none of them has passed, because none passes its own limit before this is known.
        """
        return max(self.limits) if self.limits and all(self.limits) else 0

    def at(self, slot: int | str) -> Claim | None:
        """Return the claim of a rank; of a seat where ranks are assigned."""
        return next((claim for claim in self.claims if claim.slot == slot), None)

    def of(self, me: str) -> Claim | None:
        """Return the claim with the id `me`."""
        return next((claim for claim in self.claims if claim.id == me), None)

    def of_process(self, process: str) -> Claim | None:
        """Return the first claim of a process."""
        return next((claim for claim in self.claims if claim.member.process == process), None)

    def has(self, me: str) -> bool:
        """Whether the claim `me` is part of this attempt."""
        return self.of(me) is not None


@dataclass(frozen=True)
class Failure:
    """Why an attempt was closed: the parts of the error that every one of its members raises.

    Attributes:
        attempt: its number.
        kind: the name of a class in `multiworld.errors`.
        value, rule, next_step: as for `MultiworldError`.
    """

    attempt: int
    kind: str
    value: str
    rule: str = ""
    next_step: str = ""


@dataclass(frozen=True)
class Ledger:
    """Membership state of a world in its store.

    Attributes:
        number: of the latest attempt.
        last: the latest generation number in use.
        current: the sealed or active attempt.
        waiting: the open attempt, which may fill up while `current` is still active.
        failures: of the attempts closed last, oldest first.
        before: where ranks are assigned, the generation before `current`, until that is active: whose members
            are waited for if `current` fails.
        epoch: of the server, where the store is a list of addresses; see `serving`. Else `serving.NEVER`.
    """

    number: int = 0
    last: int = 0
    current: Attempt | None = None
    waiting: Attempt | None = None
    failures: tuple[Failure, ...] = ()
    before: Attempt | None = None
    epoch: int = serving.NEVER

    @property
    def listed(self) -> bool:
        """Whether the store is a list of addresses."""
        return self.epoch != serving.NEVER

    @property
    def members(self) -> int:
        """How many members have to do with it, about: those of the larger attempt."""
        return max(1 if each is None else len(each.claims) for each in (self.current, self.waiting))

    @property
    def next_number(self) -> int:
        """The number of the next attempt."""
        return max(self.number, self.epoch) + 1

    def failure_of(self, number: int) -> Failure | None:
        """Return why attempt `number` was closed, where that is still known."""
        return next((failure for failure in self.failures if failure.attempt == number), None)


def encode(ledger: Ledger) -> str:
    """Return the record's text: ASCII JSON."""
    fields: dict[str, Any] = {"m8d": _FORMAT, "n": ledger.number, "g": ledger.last}
    if ledger.listed:
        fields["e"] = ledger.epoch
    if ledger.current is not None:
        fields["current"] = _attempt_to_json(ledger.current)
    if ledger.waiting is not None:
        fields["waiting"] = _attempt_to_json(ledger.waiting)
    if ledger.before is not None:
        fields["before"] = _attempt_to_json(ledger.before)
    if ledger.failures:
        fields["failures"] = [
            [each.attempt, each.kind, *(part[:MAX_TEXT] for part in (each.value, each.rule, each.next_step))]
            for each in ledger.failures
        ]
    return json.dumps(fields, separators=(",", ":"))


def decode(raw: str, world: str) -> Ledger:
    """Parse a record; the empty string is an empty ledger.

    Raises:
        JoinError: it is not a record, or one of another version of multiworld.
    """
    if not raw:
        return Ledger()
    try:
        if len(raw) > MAX_RECORD:
            raise _Garbage(f"{len(raw)} characters")
        if not raw.isascii():
            raise _Garbage("not ASCII")
        fields = json.loads(raw)
        if not isinstance(fields, dict) or fields.get("m8d") != _FORMAT:
            raise _Garbage("not a record of format 1")
        return Ledger(
            number=_number(fields, "n"),
            last=_number(fields, "g"),
            current=_attempt_from_json(fields["current"]) if "current" in fields else None,
            waiting=_attempt_from_json(fields["waiting"]) if "waiting" in fields else None,
            failures=tuple(_failure_from_json(each) for each in _list(fields, "failures")),
            before=_attempt_from_json(fields["before"]) if "before" in fields else None,
            epoch=_number(fields, "e") if "e" in fields else serving.NEVER,
        )
    except (ValueError, RecursionError) as error:
        raise JoinError(
            world,
            f"The store's record of world {world!r} cannot be read ({error}): {raw[:120]!r}",
            rule="It is written by multiworld alone, in the same version on all members",
            next_step="Use the same version everywhere, and another store, or another name, for this world",
        ) from error


class _Garbage(ValueError):
    """Something in the record is not what it should be."""


def _attempt_to_json(attempt: Attempt) -> dict[str, Any]:
    terms = attempt.terms
    fields = {
        "n": attempt.number,
        "terms": [
            terms.size,
            terms.backend,
            terms.device,
            *([terms.least, terms.state or 0] if terms.assigned else []),
        ],
        "g": attempt.generation,
        "token": attempt.token,
        "ready": list(attempt.ready),
        "over": list(attempt.over),
        "claims": [claim_to_json(claim) for claim in attempt.claims],
    }
    if not terms.assigned:
        return fields
    more = {
        "leaving": attempt.leaving,
        "limits": attempt.limits,
        "entered": attempt.entered,
        "left": attempt.left,
    }
    fields |= {name: list(numbers) for name, numbers in more.items() if numbers}
    return fields | {"lost": list(attempt.lost)} | ({"after": attempt.after} if attempt.after else {})


def claim_to_json(claim: Claim) -> list[Any]:
    """Return the claim's row: plain values, as JSON has them."""
    member = claim.member
    where = [member.endpoint.host, member.endpoint.port]
    row = [member.rank, claim.id, member.process, *where, member.pid, member.hostname, claim.last]
    at = member.lane
    lane = [] if at is None else [[at.version, at.place, at.port, at.options]]
    # One more number where there is no state, or an old one: the row is for good where there is the latest.
    step = claim.step or 0
    without = [_TORN if claim.torn else _NO_STATE] if claim.step is None else [_OUTDATED] if step < 0 else []
    seat = [member.seat, claim.was, advances(step), int(claim.working), *without]
    return [*row, *lane, *([seat] if member.seat else [])]


def _attempt_from_json(fields: Any) -> Attempt:
    if not isinstance(fields, dict):
        raise _Garbage("an attempt is not an object")
    said: Any = fields.get("terms")
    assigned = isinstance(said, list) and len(said) == 5
    stateless = not assigned or said[4] in (0, "")
    kinds = (int, str, str, int, int if stateless else str)
    size, backend, device, least, state = [*_row(said, kinds[: 5 if assigned else 3]), 0, 0][:5]
    terms = Terms(size, backend, device, least, state or "")
    if not 1 <= terms.size <= MAX_SIZE or not int(assigned) <= terms.least <= terms.size:
        raise _Garbage(f"a world of {said}")
    size = MAX_SIZE if assigned else terms.size
    claims = tuple(claim_from_json(row) for row in _list(fields, "claims"))
    attempt = Attempt(
        number=_number(fields, "n"),
        terms=terms,
        claims=claims,
        generation=_number(fields, "g"),
        token=_text(fields, "token"),
        ready=_ranks(fields, "ready", size),
        over=_ranks(fields, "over", size),
        lost=_ranks(fields, "lost", size),
        leaving=_ranks(fields, "leaving", size),
        after=_number(fields, "after") if "after" in fields else 0,
        limits=tuple(_row(limits := _list(fields, "limits"), (int,) * len(limits))),
        entered=_ranks(fields, "entered", size),
        left=_ranks(fields, "left", size),
    )
    ranks = [claim.rank for claim in claims]
    if ranks != sorted(set(ranks)) or not all(0 <= rank < size for rank in ranks):
        raise _Garbage(f"claims of the ranks {ranks} in a world of {size}")
    if any(bool(claim.member.seat) is not assigned for claim in claims):
        raise _Garbage("seats belong to worlds whose ranks are assigned, and to all of their members")
    if assigned and ranks != list(range(len(ranks))):
        raise _Garbage(f"assigned ranks {ranks}")
    if bool(attempt.after) is not bool(attempt.limits) or len(attempt.limits) > MAX_SIZE:
        raise _Garbage(f"{len(attempt.limits)} limits after generation {attempt.after}")
    if attempt.generation and (attempt.missing or not _is_token(attempt.token)):
        raise _Garbage("a sealed attempt without all its members or its token")
    return attempt


def claim_from_json(row: Any) -> Claim:
    """Return the claim of a row, the same object where it was read before: members read rows over and over.

    Raises:
        ValueError: the row is none of a claim.
    """
    text = repr(row)  # not the values: 1 == True, and only one of them belongs into a row
    found = _known.get(text)
    if found is None:
        if len(_known) >= _MOST_KNOWN:
            _known.clear()
        found = _known[text] = _new_claim(row)
    return found


def _new_claim(row: Any) -> Claim:
    kinds = (int, str, str, str, int, int, str, int)
    lane: LaneAddress | None = None
    seat, was, step, working, without = "", 0, 0, 0, 0
    base, more = (row[: len(kinds)], row[len(kinds) :]) if isinstance(row, list) else (row, [])
    if more and isinstance(more[-1], list) and more[-1] and type(more[-1][0]) is str:
        said = more.pop()
        if len(said) > 4:
            seat, was, step, working, without = _row(said, (str, int, int, int, int))
        else:
            seat, was, step, working = _row(said, (str, int, int, int))
    if len(more) == 1:
        lane = LaneAddress(*_row(more.pop(), (int, str, int, int)))
    if more:
        raise _Garbage(f"a claim goes on with {more!r}"[:200])
    rank, me, process, host, port, pid, hostname, last = _row(base, kinds)
    member = Member(rank, process, Endpoint(host, port), pid, hostname, lane, seat)
    states = {0: step, _OUTDATED: outdated(step)}
    return Claim(me, member, last, was, states.get(without), bool(working), without == _TORN)


def _failure_from_json(row: Any) -> Failure:
    return Failure(*_row(row, (int, str, str, str, str)))


def _row(row: Any, kinds: tuple[type, ...]) -> list[Any]:
    if not isinstance(row, list) or len(row) != len(kinds):
        raise _Garbage(f"{len(kinds)} values were expected")
    for value, kind in zip(row, kinds, strict=True):
        # `type`, not isinstance: True is no number here. Numbers are counts and ranks, never negative.
        if type(value) is not kind or (isinstance(value, int) and value < 0):
            raise _Garbage(f"{value!r} is not what belongs there")
    return row


def _number(fields: dict[str, Any], name: str) -> int:
    value = fields.get(name)
    if type(value) is not int or value < 0:
        raise _Garbage(f"{name}={value!r}")
    return value


def _text(fields: dict[str, Any], name: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str):
        raise _Garbage(f"{name}={value!r}")
    return value


def _list(fields: dict[str, Any], name: str) -> list[Any]:
    value = fields.get(name, [])
    if not isinstance(value, list):
        raise _Garbage(f"{name} is not a list")
    return value


def _ranks(fields: dict[str, Any], name: str, size: int) -> tuple[int, ...]:
    ranks = _list(fields, name)
    if not all(type(rank) is int and 0 <= rank < size for rank in ranks):
        raise _Garbage(f"{name}={ranks!r}")
    return tuple(sorted(set(ranks)))


def _is_token(text: str) -> bool:
    return len(text) == 32 and all(digit in "0123456789abcdef" for digit in text)
