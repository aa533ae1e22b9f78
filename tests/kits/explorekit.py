"""Every interleaving of a few processes' steps on the ledger of a world whose ranks are assigned, with faults.

A state is the ledger, what each process is about, and how many faults are left. `explore` visits all states that can be
reached; a process that has claimed `claims` times goes no further, which keeps their number finite.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

from kits.lifekit import seat
from multiworld._core.membership import admission, assigned
from multiworld._core.membership.admission import Phase
from multiworld._core.membership.ledger import Attempt, Ledger
from multiworld._core.membership.refusals import abandoned
from multiworld._core.membership.request import JoinRequest

TOKEN = "ab" * 16


@dataclass(frozen=True)
class Process:
    """One process: `phase` is out, open, sealed, ready, active, leaving, gone or dead.

    Attributes:
        number: of its attempt.
        generation: that it agreed on last, of `members`, by rank.
        was: the last generation that was active for it, of `past`.
        claims: how many more it may make.
        after: the generation from which it entered this one, without a breakage; 0: none.
        leaves: whether it will want to leave, at an advance.
        next: what it prepares beside the active generation: number, phase (open, sealed, ready or limited), generation,
            members.
    """

    phase: str = "out"
    number: int = 0
    generation: int = 0
    members: tuple[int, ...] = ()
    was: int = 0
    past: tuple[int, ...] = ()
    claims: int = 0
    after: int = 0
    leaves: bool = False
    next: tuple[int, str, int, tuple[int, ...]] | None = None


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
        advances: whether generations that work let newcomers in.
        leaver: the process that wants to leave at an advance, if any.
    """

    def __init__(
        self,
        size: int,
        least: int,
        most: int,
        *,
        claims: int,
        faults: int,
        kinds: tuple[str, ...],
        advances: bool = False,
        leaver: int | None = None,
    ) -> None:
        self.advances = advances
        self.requests = [seat(who, least, most) for who in range(size)]
        self.least, self.claims, self.kinds = least, claims, kinds
        processes = tuple(Process(claims=claims, leaves=who == leaver) for who in range(size))
        self.first = State(Ledger(), processes, faults)

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
            if process.phase in {"dead", "gone"}:
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
        if now is not None and all(each.id in dead for each in now.holders):
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
            after = replace(process, phase="active", was=process.generation, past=process.members, after=0)
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
            out = self._with(state, who, replace(process, phase="out", next=None, leaves=False))
            yield "breaks", out
            ledger = state.ledger
            if process.next is not None:
                ledger = self._given_up(ledger, who, process)
            ledger = admission.over(ledger, process.number, self._id(who, process.claims + 1))
            yield "breaks and says so", replace(out, ledger=ledger)
            if process.next is None:
                return
        ledger, mine = state.ledger, process.generation
        if (
            process.leaves
            and (said := assigned.leave(ledger, mine, process.members.index(who))) is not ledger
        ):
            yield "wants to leave", replace(state, ledger=said)
        after_mine = ledger.current is not None and ledger.current.after == mine
        away = after_mine or assigned.leaves(ledger, mine, process.members.index(who))
        if process.leaves and away and process.next is None:
            yield from self._leaves(state, who, process)
            return
        if process.next is not None:
            yield from getattr(self, f"_next_{process.next[1]}")(state, who, process)
        elif self.advances and process.claims and assigned.due(state.ledger, process.generation):
            yield from self._claims_beside(state, who, process)

    # -- the next generation, beside the active one

    def _claims_beside(self, state: State, who: int, process: Process) -> Iterator[tuple[str, State]]:
        me, dead = self._id(who, process.claims), self._dead(state)
        there = () if state.ledger.waiting is None else state.ledger.waiting.claims
        seen = frozenset(each.id for each in there) - dead
        request = replace(self._request(state, who), lost=(), working=True)
        move = admission.claim(state.ledger, request, me, TOKEN, dead=dead, seen=seen)
        after = replace(process, claims=process.claims - 1)
        if move.refusal is None and move.holder is None:
            after = replace(after, next=(move.attempt, "open", 0, ()))
        yield "claims beside", self._with(replace(state, ledger=move.ledger), who, after)

    def _next_open(self, state: State, who: int, process: Process) -> Iterator[tuple[str, State]]:
        number, me = self._beside(process), self._id(who, process.claims + 1)
        found = admission.claim_state(state.ledger, number, me, self.requests[who])
        if found.attempt is None:
            yield "hears that it is closed", self._with(state, who, replace(process, next=None))
        elif found.phase is not Phase.OPEN:
            attempt = found.attempt
            members = tuple(int(str(each.slot)[1:]) for each in attempt.claims)
            assert attempt.generation > process.generation, "a number went back"
            assert attempt.after == process.generation, "it is prepared beside another generation"
            sealed = (attempt.number, "sealed", attempt.generation, members)
            yield "agrees", self._with(state, who, replace(process, next=sealed))
        elif not assigned.due(state.ledger, process.generation):
            yield "has nothing to do", self._without_next(state, who, process)
        else:
            dead = self._dead(state)
            left = admission.drop(state.ledger, found.attempt.number, me, dead)
            after = admission.seal(left, found.attempt.number, me, TOKEN, dead=dead)
            if after != state.ledger:
                yield "seals", replace(state, ledger=after)

    def _next_sealed(self, state: State, who: int, process: Process) -> Iterator[tuple[str, State]]:
        yield from self._fails_beside(state, who, process)
        ledger = admission.ready(state.ledger, self._beside(process), self._id(who, process.claims + 1))
        assert process.next is not None
        ready = replace(process, next=(process.next[0], "ready", *process.next[2:]))
        yield "is ready", self._with(replace(state, ledger=ledger), who, ready)

    def _next_ready(self, state: State, who: int, process: Process) -> Iterator[tuple[str, State]]:
        yield from self._fails_beside(state, who, process)
        yield from self._says_limit(state, who, process)

    def _next_limited(self, state: State, who: int, process: Process) -> Iterator[tuple[str, State]]:
        me = self._id(who, process.claims + 1)
        found = admission.claim_state(state.ledger, self._beside(process), me, self.requests[who])
        if found.phase is not Phase.ACTIVE:
            yield from self._fails_beside(state, who, process)
            return
        assert process.next is not None
        number, _, generation, members = process.next
        entered = replace(
            process,
            number=number,
            generation=generation,
            members=members,
            was=generation,
            past=members,
            after=process.generation,
            next=None,
        )
        rank = process.members.index(who)
        ledger = assigned.enter(state.ledger, process.generation, rank)
        yield "enters", self._with(replace(state, ledger=ledger), who, entered)

    def _says_limit(self, state: State, who: int, process: Process) -> Iterator[tuple[str, State]]:
        ledger = assigned.limit(state.ledger, process.generation, process.members.index(who), 1)
        if ledger is not state.ledger and process.next is not None:
            said = replace(process, next=(process.next[0], "limited", *process.next[2:]))
            yield "says its limit", self._with(replace(state, ledger=ledger), who, said)

    def _fails_beside(self, state: State, who: int, process: Process) -> Iterator[tuple[str, State]]:
        me = self._id(who, process.claims + 1)
        found = admission.claim_state(state.ledger, self._beside(process), me, self.requests[who])
        assert process.next is not None
        if found.attempt is None:
            yield "hears that it failed", self._with(state, who, replace(process, next=None))
        elif any(state.processes[each].phase in {"dead", "out"} for each in process.next[3]):
            yield "sees a death", self._without_next(state, who, process)

    def _without_next(self, state: State, who: int, process: Process) -> State:
        ledger = self._given_up(state.ledger, who, process)
        return self._with(replace(state, ledger=ledger), who, replace(process, next=None))

    def _given_up(self, ledger: Ledger, who: int, process: Process) -> Ledger:
        number, me = self._beside(process), self._id(who, process.claims + 1)
        failed = admission.fail(ledger, number, me, abandoned(number, "it came to nothing"))
        return failed if failed is not ledger else admission.over(ledger, number, me)

    def _beside(self, process: Process) -> int:
        assert process.next is not None
        return process.next[0]

    def _leaves(self, state: State, who: int, process: Process) -> Iterator[tuple[str, State]]:
        """What a member does that leaves at an advance."""
        generation, rank = process.generation, process.members.index(who)
        now = state.ledger.current
        if now is None or now.after != generation:
            return
        ledger = assigned.limit(state.ledger, generation, rank, 1)
        if ledger is not state.ledger:
            yield "says its limit", replace(state, ledger=ledger)
        if now.active:
            ledger = assigned.enter(state.ledger, generation, rank)
            yield "leaves", self._with(replace(state, ledger=ledger), who, replace(process, phase="leaving"))

    def _leaving(self, state: State, who: int, process: Process) -> Iterator[tuple[str, State]]:
        if assigned.all_entered(state.ledger, process.generation) or self._lost(state, process):
            yield "is gone", self._with(state, who, replace(process, phase="gone"))

    # -- what must hold

    def check(self, state: State) -> None:
        agreed: dict[int, tuple[int, ...]] = {}
        for each in state.processes:
            if each.phase in {"sealed", "ready", "active"}:
                assert agreed.setdefault(each.generation, each.members) == each.members, (
                    "two rosters of a number"
                )
            if each.phase == "active" and each.next is not None and each.next[2]:
                assert agreed.setdefault(each.next[2], each.next[3]) == each.next[3], (
                    "two rosters of a number"
                )
        lasting = [each for each in state.processes if each.phase == "active" and not self._lost(state, each)]
        stable = {each.generation for each in lasting}
        # On the way from one to the next, members are in both.
        now = state.ledger.current
        assert len(stable) <= 1 or (now is not None and stable == {now.after, now.generation}), (
            f"generations {stable} are active at once, and none ends"
        )

    def settled(self, state: State) -> bool:
        """Whether nothing more has to happen: one active generation, or too few processes are left."""
        living = [each for each in state.processes if each.phase not in {"dead", "gone"}]
        if any(each.phase in {"out", "active"} and not each.claims for each in living):
            return True  # beyond the bound
        if len(living) < self.least:
            return True
        active = [each for each in living if each.phase == "active"]
        others = {each.phase for each in living} - {"active"}
        if self.advances and active and assigned.due(state.ledger, active[0].generation, self._dead(state)):
            return False
        return (
            bool(active)
            and others <= {"open"}
            and len({each.generation for each in active}) == 1
            and not any(each.next or self._lost(state, each) for each in active)
        )

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
            if other.phase == "leaving":
                continue
            if other.phase == "gone":
                if process.after and who not in process.members:
                    continue
                return True
            if other.phase == "active" and other.after == process.generation:
                continue  # it is in both, until all are in the next one
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
