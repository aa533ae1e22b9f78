"""Failures of a join: their texts, and the errors that members raise for them.

A `Failure` is the part of an error that is stored; every member of the attempt raises the same error from it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from multiworld import errors
from multiworld._core.membership.ledger import MAX_TEXT, Attempt, Claim, Failure, Terms
from multiworld.errors import JoinError

if TYPE_CHECKING:
    from multiworld._core.membership.request import JoinRequest
    from multiworld._core.membership.roster import Member

__all__ = [
    "MOVED", "abandoned", "awaited", "contested", "elsewhere", "error_of", "failure_from", "held", "late",
    "mismatch", "not_working", "replaced", "stale",
]  # fmt: skip

MOVED = "its store's server, which is new or does not see most of its hosts, to let it begin"
"""What a world waits for that may not begin at the present server of a list."""

_SPENT = 0.1
"""Seconds of a timeout that were over when its process came: with fewer, only what was left is said."""
_ANOTHER_RANK = "Give every process a rank of its own, or wait until the other one has closed the world"
_KINDS = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, JoinError)
}


def abandoned(attempt: int, why: str) -> Failure:
    """Return the failure of an abandoned attempt."""
    return Failure(
        attempt, "JoinAbandonedError", why, "A world is joined by all its members or by none", "Join again"
    )


def contested(attempt: int, request: JoinRequest, holder: Claim) -> Failure:
    """Return the failure of two processes that claim one rank."""
    return Failure(
        attempt,
        "RankTakenError",
        f"{request.place} of world {request.world!r} is claimed twice: by {_who(holder.member)} "
        f"and by {_who(request.member)}",
        f"Each {'seat' if request.assigned else 'rank'} belongs to one process",
        _ANOTHER_RANK,
    )


def stale(now: Attempt, holder: Member, request: JoinRequest) -> Failure:
    """Return the failure of a process whose rank in the current generation is taken."""
    return Failure(
        0,
        "StaleGenerationError",
        f"This process held rank {request.rank} of world {request.world!r} "
        f"in generation {request.last_generation}, but the world is in generation {now.generation} "
        f"with {_who(holder)} at that rank",
        "A generation that is over cannot be continued, and its place is taken",
        "Join under another rank, or when the present generation is over",
    )


def mismatch(waiting: Attempt, request: JoinRequest) -> Failure:
    """Return the failure of members that disagree about the world."""
    theirs, ours = waiting.terms, request.terms
    said = [
        (name, mine, other)
        for name, mine, other in (
            ("world_size", _size(ours), _size(theirs)),
            ("backend", ours.backend, theirs.backend),
            ("device", ours.device, theirs.device),
            ("state", ours.state or "none", theirs.state or "none"),
        )
        if mine != other
    ]
    others = _people(waiting.claims)
    return Failure(
        waiting.number,
        "MismatchError",
        f"The members of world {request.world!r} disagree: "
        f"{_small(request.place)} ({_who(request.member)}) says "
        f"{', '.join(f'{name}={mine!r}' for name, mine, _ in said)}, "
        f"{others} say {', '.join(f'{name}={other!r}' for name, _, other in said)}",
        "All members of a world say the same size, backend and device, and give states of the same names, "
        "or none",
        "Change the call that is wrong, and join again on all members",
    )


def elsewhere(request: JoinRequest, other: Member) -> Failure:
    """Return the failure of members that cannot reach each other at their published addresses."""
    mine, theirs = request.member, other
    return Failure(
        0,
        "MismatchError",
        f"{request.place} of world {request.world!r} ({_who(mine)}) is reached at {mine.endpoint.host} "
        f"and does not find {_name(theirs)} ({_who(theirs)}) at {theirs.endpoint.host}, "
        "the address which that one gives",
        "Members reach each other at the addresses that they give; "
        "one of loopback is reached from its own host only",
        "Set M8D_HOST or M8D_IFNAME where the address is not the one that the others reach",
    )


def replaced(attempt: Attempt, request: JoinRequest) -> Failure:
    """Return the failure of a claim that another process took over."""
    holder = attempt.at(request.slot)
    by = _who(holder.member) if holder is not None else "a process that has left since"
    return Failure(
        attempt.number,
        "RankTakenError",
        f"{request.place} of world {request.world!r}, claimed by {_who(request.member)}, "
        f"was taken over by {by}",
        "A member of the generation before has the right to its rank, and a claim without sign of life, "
        "or whose "
        f"process the others do not find at its address (here {request.member.endpoint.host}), is lost",
        _ANOTHER_RANK,
    )


def held(now: Attempt, request: JoinRequest, holder: Claim | None, timeout: float) -> Failure:
    """Return the failure of a join that timed out while another generation was active."""
    state = "active" if now.active else "being formed"
    if request.assigned and holder is None:
        return Failure(
            0,
            "JoinTimeoutError",
            f"Generation {now.generation} of world {request.world!r} is {state}; "
            f"{_who(request.member)} waited {timeout:.1f} s to be let in",
            "A world lets newcomers in when its members make the next generation",
            "Give a longer timeout, or have its members reform",
        )
    if holder is None:
        what = f"there is no rank {request.rank} in it"
    else:
        what = f"{_who(holder.member)} holds {_small(request.place)}"
    return Failure(
        0,
        "RankTakenError",
        f"Generation {now.generation} of world {request.world!r} is {state} and {what}; "
        f"{_who(request.member)} waited {timeout:.1f} s for its end",
        "A rank is free again when the generation that holds it is over",
        _ANOTHER_RANK,
    )


def not_working(request: JoinRequest) -> Failure:
    """Return the failure of a member that prepares for what comes after a generation that is over."""
    return abandoned(
        0, f"Generation {request.past_generation} of world {request.world!r} is over: others reform"
    )


def awaited(attempt: Attempt, request: JoinRequest, waited: float, left: float, held: str = "") -> str:
    """Return a log line with the ranks that an open attempt waits for.

    Args:
        attempt: the open one.
        request: of the process that logs.
        waited: seconds since it began.
        left: seconds until its deadline.
        held: what the world waits for that may not begin at its store yet; "" where it may.
    """
    missing, needed = attempt.missing, str(attempt.terms.size)
    what = _ranks(missing) if missing else "the end of the generation before"
    if request.assigned:
        needed = f"at least {attempt.terms.least}"
        what = f"{len(missing)} more" if missing else held or "members that may still come"
    return (
        f"{request.place} of world {request.world!r} waits for {what} ({len(attempt.claims)} of "
        f"{needed} members are there): {waited:.0f} s so far, {max(0.0, left):.0f} s are left"
    )


def late(
    attempt: Attempt,
    request: JoinRequest,
    timeout: float,
    elsewhere: int = 0,
    held: str = "",
    given: float = 0.0,
) -> Failure:
    """Return the failure of an attempt that was not complete, or not ready, in time.

    Args:
        attempt: the open or sealed one.
        request: of the process whose time is up.
        timeout: seconds.
        elsewhere: how many members may go on without these, as a majority; 0 where that is not the reason.
        held: as for `awaited`.
        given: seconds that the program gave the join, of which `timeout` were left here.
    """
    place = f"{_small(request.place)} ({_who(request.member)})"
    whose = f"the {timeout:.1f} s of {place}"
    if given - timeout >= _SPENT:
        whose = f"the {timeout:.1f} s that {place} had left of its timeout of {given:g} s"
    size = attempt.size
    if attempt.generation:
        silent = attempt.unready
        there = (
            f"{size - len(silent)} of {size} members of world {request.world!r} were ready within {whose}; "
        )
        what = f"not ready: {_ranks(silent)}"
    else:
        silent = attempt.missing
        needed = f"at least {attempt.terms.least}" if request.assigned else str(size)
        there = f"{len(attempt.claims)} of {needed} members of world {request.world!r} came within {whose}; "
        what = (
            f"missing: {len(silent) if request.assigned else _ranks(silent)}"
            if silent
            else "it was not sealed"
        )
    if elsewhere and not silent:
        what = (
            f"{elsewhere} members of the generation before neither came nor are gone for sure, and may go on "
            "at another server of the store"
        )
    if held and not silent:
        what = f"the world may work already, and its store is a new one: it waited for {held}"
    late = tuple(each for each in attempt.claims if each.rank in silent)
    known = f" ({_people(late)})" if late else f"; there: {_people(attempt.claims)}"
    if request.run:
        known += f"; only members of run {request.run!r} (M8D_RUN_ID) are seen"
    return Failure(
        attempt.number,
        "JoinTimeoutError",
        there + what + known,
        "All members join before the first timeout ends",
        "Start the missing ones, or look why they do not come, or give a longer timeout",
    )


def failure_from(error: Exception, request: JoinRequest) -> Failure:
    """Return the failure that the other members raise for an error of this one.

    Where ranks are assigned, this member is one that they go on without: the attempt was abandoned for them.
    """
    kind = type(error).__name__
    if not isinstance(error, JoinError) or kind not in _KINDS or request.assigned:
        kind = "JoinAbandonedError"
    value = error.value if isinstance(error, errors.MultiworldError) else f"{type(error).__name__}: {error}"
    rule = error.rule if isinstance(error, JoinError) else ""
    step = error.next_step if isinstance(error, JoinError) else ""
    text = f"{request.place} of world {request.world!r} ({_who(request.member)}) could not join: {value}"
    return Failure(0, kind, text[:MAX_TEXT], rule[:MAX_TEXT], step[:MAX_TEXT])


def error_of(failure: Failure, world: str) -> JoinError:
    """Return the error that a failure stands for; an unknown kind is a plain `JoinError`."""
    kind = _KINDS.get(failure.kind, JoinError)
    return kind(world, failure.value, rule=failure.rule, next_step=failure.next_step)


def _ranks(ranks: tuple[int, ...]) -> str:
    shown = ", ".join(str(rank) for rank in ranks[:10])
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}" + (", ..." if len(ranks) > 10 else "")


def _people(claims: tuple[Claim, ...]) -> str:
    shown = ", ".join(f"{_name(each.member)} ({_who(each.member)})" for each in claims[:4])
    return shown + (f" and {len(claims) - 4} more" if len(claims) > 4 else "")


def _name(member: Member) -> str:
    return f"seat {member.seat!r}" if member.seat else f"rank {member.rank}"


def _size(terms: Terms) -> int | str:
    return f"{terms.least}:{terms.size}" if terms.assigned else terms.size


def _small(text: str) -> str:
    return text[0].lower() + text[1:]


def _who(member: Member) -> str:
    return f"host {member.hostname}, pid {member.pid}"
