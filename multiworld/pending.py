"""Operations of a world that are not over: who waits in them, and for which members.

`World.pending` returns these, and the event `multiworld.events.WorldStuck` has one.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = ["PendingOperation"]


@dataclass(frozen=True)
class PendingOperation:
    """One operation that at least one member waits in. ``str()`` says all of it in one sentence.

    Attributes:
        kind: as torch.distributed has it: "all_reduce", "send", "recv", ...
        number: of a collective among those of its group, from 1 on; None for messages.
        size: bytes of the tensor that the member gave which waits longest.
        ranks: of the group's members, as ranks of the world; of a message: both ends, where both are known.
        peer: the root, or the other end of a message; None: there is none, or it is any.
        tag: of a message; None for collectives.
        waiting: ranks of the members that are in it -> seconds since each called it.
        missing: ranks of the members that it waits for -> what each does instead, in words.
        idle: whether it only waits to be given something to do: a receive, or a broadcast or scatter that the
            root has not called, from members that are in no operation, or in one for less than a second.
        stacks: ranks of missing members -> their Python threads' stacks; only in `WorldStuck`.
    """

    kind: str
    number: int | None
    size: int
    ranks: tuple[int, ...]
    peer: int | None
    tag: int | None
    waiting: Mapping[int, float]
    missing: Mapping[int, str]
    idle: bool = False
    stacks: Mapping[int, str] = field(default_factory=dict, repr=False)

    @property
    def seconds(self) -> float:
        """For how long the member that came first has waited."""
        return max(self.waiting.values())

    def with_stacks(self, stacks: Mapping[int, str]) -> PendingOperation:
        """Return the same with stacks of missing members."""
        return replace(self, stacks=stacks)

    def __str__(self) -> str:
        waits = f"{_ranks(self.waiting)} since {self.seconds:.1f} s"
        if self.number is None:
            ends = {
                "send": f" to {self.peer}",
                "recv": f" from {'any rank' if self.peer is None else self.peer}",
            }
            name = self.kind + ends.get(self.kind, "") + (f" (tag {self.tag})" if self.tag else "")
        else:
            name = f"{self.kind} #{self.number}"
        if not self.missing:
            what = "all that take part are in it" if self.number is not None else "both ends are in it"
            return f"{name}: {waits}; {what}"
        return f"{name}: {waits}; " + "; ".join(
            f"rank {rank} {does}" for rank, does in sorted(self.missing.items())
        )


def _ranks(ranks: Iterable[int]) -> str:
    *first, last = sorted(ranks)
    if not first:
        return f"rank {last} waits"
    return f"ranks {', '.join(map(str, first))} and {last} wait"
