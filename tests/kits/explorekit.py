"""Every interleaving of a few processes' steps on the ledger of a world whose ranks are assigned, with faults.

A state is the ledger, what each process is about, and how many faults are left. `explore` visits all states that can be
reached; a process that has claimed `claims` times goes no further, which keeps their number finite.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

from kits.lifekit import seat
from multiworld._core.membership import admission
from multiworld._core.membership.admission import Phase
from multiworld._core.membership.ledger import Attempt, Ledger
from multiworld._core.membership.refusals import abandoned
from multiworld._core.membership.request import JoinRequest

TOKEN = "ab" * 16


@dataclass(frozen=True)
class Process:
    """One process: `phase` is out, open, sealed, ready, active or dead.

    Attributes:
        number: of its attempt.
        generation: that it agreed on last, of `members`, by rank.
        was: the last generation that was active for it, of `past`.
        claims: how many more it may make.
    """

    phase: str = "out"
    number: int = 0
    generation: int = 0
    members: tuple[int, ...] = ()
    was: int = 0
    past: tuple[int, ...] = ()
    claims: int = 0


@dataclass(frozen=True)
class State:
    """Everything: the ledger, the processes, and how many faults are left."""

    ledger: Ledger
    processes: tuple[Process, ...]
    faults: int


class Explorer:
    """The states that `size` processes reach in a world of `least` to `most`.

    Args:
        size, least, most: see above.
        claims: that each process may make.
        faults: of the `kinds`: "death" of a process, "server": the death of a member together with the store that it
            serves, "timeout" of a join.
    """

    def __init__(
        self, size: int, least: int, most: int, *, claims: int, faults: int, kinds: tuple[str, ...]
    ) -> None:
        self.requests = [seat(who, least, most) for who in range(size)]
        self.least, self.claims, self.kinds = least, claims, kinds
        self.first = State(Ledger(), (Process(claims=claims),) * size, faults)

    def explore(self) -> dict[State, list[tuple[str, State]]]:
        """All states, each with its steps; raises AssertionError with the way to a state that must not be."""
        came: dict[State, tuple[str, State] | None] = {self.first: None}
        steps: dict[State, list[tuple[str, State]]] = {}
        todo = deque([self.first])
        while todo:
            state = todo.popleft()
            try:
                steps[state] = list(self.steps(state))
                for name, after in steps[state]:
                    if after not in came:
                        came[after] = (name, state)
                        self.check(after)
                        todo.append(after)
            except AssertionError as error:
                way = []
                at = state
                while (before := came[at]) is not None:
                    way.append(before[0])
                    at = before[1]
                raise AssertionError(f"{error}; on the way: {', '.join(reversed(way))}") from error
        return steps

    # -- steps

    def steps(self, state: State) -> Iterator[tuple[str, State]]:
        for who, process in enumerate(state.processes):
            if process.phase == "dead":
                continue
            for name, after in getattr(self, f"_{process.phase}")(state, who, process):
                yield f"{who} {name}", after
            if state.faults and "death" in self.kinds:
                gone = self._with(state, who, replace(process, phase="dead"))
                yield f"{who} dies", replace(gone, faults=state.faults - 1)
            if state.faults and "server" in self.kinds and process.phase == "active":
                there = (
                    replace(each, phase="out") if each.phase in {"open", "sealed", "ready"} else each
                    for each in state.processes
                )
                left = replace(state, ledger=Ledger(), processes=tuple(there), faults=state.faults - 1)
                yield f"{who} dies with the store", self._with(left, who, replace(process, phase="dead"))

    def _out(self, state: State, who: int, process: Process) -> Iterator[tuple[str, State]]:
        if not process.claims:
            return
        me, dead, ledger = self._id(who, process.claims), self._dead(state), state.ledger
        request = self._request(state, who)
        for _ in range(2):
            there = () if ledger.waiting is None else ledger.waiting.claims
            seen = frozenset(each.id for each in there) - dead
            move = admission.claim(ledger, request, me, TOKEN, dead=dead, seen=seen)
            if move.holder is None:
                break
            dead |= {move.holder.id}  # an older claim of its own, which gives no sign of life
        phase = "out" if move.refusal is not None else "open"
        after = replace(process, phase=phase, number=move.attempt, claims=process.claims - 1)
        yield "claims", self._with(replace(state, ledger=move.ledger), who, after)

    def _open(self, state: State, who: int, process: Process) -> Iterator[tuple[str, State]]:
        me = self._id(who, process.claims + 1)
        found = admission.claim_state(state.ledger, process.number, me, self.requests[who])
        if found.attempt is None:
            yield "hears that it is closed", self._with(state, who, replace(process, phase="out"))
            return
        if found.phase is not Phase.OPEN:
            yield "agrees", self._agreed(state, who, process, found.attempt)
            return
        gone, dead = 0, self._dead(state)
        now = state.ledger.current
        if now is not None and all(each.id in dead for each in now.claims):
            gone = now.number
        for last_call in (False, True) if self._seeded(state) else (False,):
            left = admission.drop(state.ledger, found.attempt.number, me, dead)
            after = admission.seal(
                left, found.attempt.number, me, TOKEN, gone=gone, dead=dead, last_call=last_call
            )
            if after != state.ledger:
                yield f"seals{' late' * last_call}", replace(state, ledger=after)
        if state.faults and "timeout" in self.kinds:
            move = admission.expire(
                state.ledger, found.attempt.number, me, self.requests[who], timeout=1.0, gone=gone
            )
            late = self._with(replace(state, ledger=move.ledger), who, replace(process, phase="out"))
            yield "is out of time", replace(late, faults=state.faults - 1)

    def _agreed(self, state: State, who: int, process: Process, attempt: Attempt) -> State:
        members = tuple(int(str(each.slot)[1:]) for each in attempt.claims)
        assert [each.rank for each in attempt.claims] == list(range(len(members)))
        assert len(set(members)) == len(members)
        assert attempt.generation > process.generation, "a number went back"
        return self._with(
            state,
            who,
            replace(
                process, phase="sealed", number=attempt.number, generation=attempt.generation, members=members
            ),
        )

    def _sealed(self, state: State, who: int, process: Process) -> Iterator[tuple[str, State]]:
        yield from self._gives_up(state, who, process)
        me = self._id(who, process.claims + 1)
        ledger = admission.ready(state.ledger, process.number, me)
        yield "is ready", self._with(replace(state, ledger=ledger), who, replace(process, phase="ready"))

    def _ready(self, state: State, who: int, process: Process) -> Iterator[tuple[str, State]]:
        found = admission.claim_state(
            state.ledger, process.number, self._id(who, process.claims + 1), self.requests[who]
        )
        if found.phase is Phase.ACTIVE:
            after = replace(process, phase="active", was=process.generation, past=process.members)
            yield "is active", self._with(state, who, after)
        else:
            yield from self._gives_up(state, who, process)

    def _gives_up(self, state: State, who: int, process: Process) -> Iterator[tuple[str, State]]:
        me = self._id(who, process.claims + 1)
        found = admission.claim_state(state.ledger, process.number, me, self.requests[who])
        out = replace(process, phase="out")
        if found.attempt is None:
            yield "hears that it failed", self._with(state, who, out)
        elif self._lost(state, process):
            ledger = admission.fail(
                state.ledger, process.number, me, abandoned(process.number, "a member died")
            )
            if ledger is state.ledger:
                ledger = admission.over(ledger, process.number, me)
            yield "sees a death", self._with(replace(state, ledger=ledger), who, out)

    def _active(self, state: State, who: int, process: Process) -> Iterator[tuple[str, State]]:
        if self._lost(state, process):
            out = self._with(state, who, replace(process, phase="out"))
            yield "breaks", out
            ledger = admission.over(state.ledger, process.number, self._id(who, process.claims + 1))
            yield "breaks and says so", replace(out, ledger=ledger)

    # -- what must hold

    def check(self, state: State) -> None:
        agreed: dict[int, tuple[int, ...]] = {}
        for each in state.processes:
            if each.phase in {"sealed", "ready", "active"}:
                assert agreed.setdefault(each.generation, each.members) == each.members, (
                    "two rosters of a number"
                )
        stable = {
            each.generation
            for each in state.processes
            if each.phase == "active" and not self._lost(state, each)
        }
        assert len(stable) <= 1, f"generations {stable} are active at once, and none ends"

    def settled(self, state: State) -> bool:
        """Whether nothing more has to happen: one active generation, or too few processes are left."""
        living = [each for each in state.processes if each.phase != "dead"]
        if any(each.phase == "out" and not each.claims for each in living):
            return True  # beyond the bound
        if len(living) < self.least:
            return True
        active = [each for each in living if each.phase == "active"]
        others = {each.phase for each in living} - {"active"}
        return bool(active) and others <= {"open"} and not any(self._lost(state, each) for each in active)

    # -- helpers

    def _seeded(self, state: State) -> bool:
        """Whether the store knows the latest generation.

        A store that died is seeded by the first survivor, long before the last call of newcomers ends.
        """
        return all(each.phase == "dead" or each.was <= state.ledger.last for each in state.processes)

    def _lost(self, state: State, process: Process) -> bool:
        """Whether a member of its generation died, or went on without it."""
        for who in process.members:
            other = state.processes[who]
            late = other.generation < process.generation  # it has not read yet that the attempt was sealed
            if other.phase == "dead" or other.generation > process.generation:
                return True
            if other.phase in {"out", "open"} and not (late and other.number == process.number):
                return True
        return False

    def _request(self, state: State, who: int) -> JoinRequest:
        process = state.processes[who]
        request = replace(self.requests[who], last_generation=process.generation)
        if not process.was:
            return request
        members = process.past
        past = tuple(replace(self.requests[each].member, rank=rank) for rank, each in enumerate(members))
        lost = tuple(rank for rank, each in enumerate(members) if state.processes[each].phase == "dead")
        return replace(
            request, past=past, past_generation=process.was, past_rank=members.index(who), lost=lost
        )

    def _dead(self, state: State) -> frozenset[str]:
        attempts = (state.ledger.waiting, state.ledger.current)
        return frozenset(
            each.id
            for attempt in attempts
            if attempt is not None
            for each in attempt.claims
            if state.processes[int(str(each.slot)[1:])].phase == "dead"
        )

    def _id(self, who: int, claims: int) -> str:
        return f"{who}.{claims}"

    def _with(self, state: State, who: int, process: Process) -> State:
        return replace(state, processes=(*state.processes[:who], process, *state.processes[who + 1 :]))


def stuck(explorer: Explorer, steps: dict[State, list[tuple[str, State]]]) -> list[State]:
    """The states from which no settled one can be reached without a further fault."""
    before: dict[State, list[State]] = {}
    for state, nexts in steps.items():
        for _, after in nexts:
            if after.faults == state.faults:
                before.setdefault(after, []).append(state)
    good = {state for state in steps if explorer.settled(state)}
    todo = list(good)
    while todo:
        for earlier in before.get(todo.pop(), ()):
            if earlier not in good:
                good.add(earlier)
                todo.append(earlier)
    return [state for state in steps if state not in good]
