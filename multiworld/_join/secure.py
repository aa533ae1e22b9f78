"""Secure joins (docs/security.md): whether a join is one, and the rules that it keeps then. Mostly pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from multiworld import settings
from multiworld._c10d import groups
from multiworld._core.lane.greeting import LATE_GROUP
from multiworld._net.tls import credentials
from multiworld.errors import InvalidJoinError, MismatchError

if TYPE_CHECKING:
    from multiworld._core.membership.roster import Roster
    from multiworld._join.arguments import JoinPlan
    from multiworld.settings import Settings

__all__ = ["check", "gloo_may_connect", "require_lanes"]


def check(plan: JoinPlan, others: bool | None) -> None:
    """Raise if a join is secure, and would make connections without TLS that are not allowed.

    Args:
        plan: of the join.
        others: whether the process's other worlds are secure; None if it has none.

    Raises:
        InvalidJoinError: so it is.
        MultiworldError: the files cannot be used.
    """
    mode = credentials.current() is not None
    if others not in (None, mode):
        raise InvalidJoinError(
            plan.name,
            f"world {plan.name!r} is joined {'with' if mode else 'without'} M8D_TLS_CERT, "
            f"and this process is in worlds {'without' if mode else 'with'} it",
            rule="The worlds of a process share connections: all are secure, or none is",
            next_step="Set M8D_TLS_CERT, M8D_TLS_KEY and M8D_TLS_CA before the first join, and leave them",
        )
    if mode and (why := _refusal(plan, settings.load())) is not None:
        value, rule, next_step = why
        raise InvalidJoinError(
            plan.name, f"world {plan.name!r} is secure: {value}", rule=rule, next_step=next_step
        )


def gloo_may_connect(chosen: Settings) -> bool:
    """Whether gloo may make connections, for all that the lane does not carry."""
    return not chosen.tls_cert or "gloo" in chosen.tls_plain


def require_lanes(plan: JoinPlan, roster: Roster) -> None:
    """Raise if a member of a secure world has no lane that carries all that the others expect.

    Raises:
        MismatchError: it names them.
    """
    if roster.size == 1 or roster.lane_version >= LATE_GROUP or gloo_may_connect(settings.load()):
        return
    without = [
        rank
        for rank, each in enumerate(roster.members)
        if each.lane is None or each.lane.version < LATE_GROUP
    ]
    raise MismatchError(
        plan.name,
        f"world {plan.name!r} is secure, and ranks {', '.join(map(str, without))} have no lane "
        "for its collectives",
        rule="Every member of a secure world has M8D_LANE=1, the default, or M8D_TLS_PLAIN=gloo",
        next_step="Give all members the same settings",
    )


def _refusal(plan: JoinPlan, chosen: Settings) -> tuple[str, str, str] | None:
    """Return the value, the rule and the next step of what is not allowed."""
    names = {part.rpartition(":")[2].strip() for part in plan.backend.split(",")}
    if plain := sorted(names - {"gloo"} - chosen.tls_plain):
        return (
            f"backend {plan.backend!r}",
            f"{', '.join(plain)} connects without TLS",
            f"Use backend='gloo', or allow it where the network is trusted: M8D_TLS_PLAIN={','.join(plain)}",
        )
    if gloo_may_connect(chosen) or plan.world_size == 1:
        return None
    if not chosen.lane or not chosen.lane_collectives:
        return "M8D_LANE is not 1", "gloo, which connects without TLS, is not used", "Unset M8D_LANE"
    if names == {"gloo"} and not groups.may_be_late(plan.backend):
        return (
            "TORCH_DISTRIBUTED_DEBUG=DETAIL",
            "Its checks go over gloo's connections, which have no TLS",
            "Set M8D_CHECK=1 instead, which checks over the lane, or M8D_TLS_PLAIN=gloo",
        )
    return None
