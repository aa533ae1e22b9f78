"""Turns: in which order a world's operations begin while some of them take several steps.

Object operations take several steps: of two at once, each could take what is the other's. What is called
meanwhile, and would come in between, waits until they are over, in the caller's thread where the call blocks;
all else goes on at once. So collectives wait until one that was called before them, and waits for torch's
group, is posted. A turn belongs to no event loop: its operation goes on in a thread after its loop has ended.

There is no lock: the collector may end a task, and with it a turn, in the middle of any line here.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import TYPE_CHECKING, Any

from multiworld._net.lane.waiting import nested_call

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import torch
    from torch import Tensor
    from torch.distributed import P2POp

__all__ = [
    "COLLECTIVE",
    "RECEIVE",
    "SEND",
    "Turn",
    "Turns",
    "Way",
    "batch",
    "collective",
    "forget_own_turn",
    "message",
    "own_turn",
    "posted",
]

Way = tuple[str | None, str | None, int | None]
"""What an operation travels on: type of device, kind, rank of the other member. None stands for any."""

SEND, RECEIVE = "send", "receive"
_LOOK = 0.2  # seconds between two looks whether the world goes on
COLLECTIVE: tuple[Way, ...] = ((None, "collective", None),)
"""The ways of a tensor's collective."""


def collective(device: torch.device) -> tuple[Way, ...]:
    """Return the ways of an object collective whose bytes travel on `device`."""
    return COLLECTIVE if (kind := _type_of(device)) == "cpu" else ((kind, None, None),)


def message(kind: str, peer: int | None, tag: int, on: Tensor | torch.device) -> tuple[Way, ...]:
    """Return the ways of a message; none where an object's message, which has tag 0, is never taken for it.

    Args:
        kind: `SEND` or `RECEIVE`.
        peer: rank of the other member; None for any.
        tag: as given.
        on: the tensor, or its device.
    """
    device = _type_of(getattr(on, "device", on))
    if device != "cpu":
        return ((device, None, None),)  # NCCL knows no tags, and all its operations have one order
    return ((device, kind, peer),) if tag == 0 else ()


def batch(p2p_op_list: Sequence[P2POp]) -> list[Way]:
    """Return the ways of a batch's messages (``dist.P2POp``); what is none of them torch refuses."""
    return [
        way
        for each in p2p_op_list
        if hasattr(each, "peer")
        for way in message(RECEIVE if each.op.__name__ == "irecv" else SEND, each.peer, each.tag, each.tensor)
    ]


_MESSAGES = {"send": ("dstRank", SEND), "recv": ("srcRank", RECEIVE), "recv_anysource": (None, RECEIVE)}
"""Methods of ProcessGroup that post messages: their name of the other rank, and the kind of message."""


def posted(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Way, ...]:
    """Return the ways of what a method of torch's ProcessGroup posts, by its name and arguments."""
    if name not in _MESSAGES:
        return COLLECTIVE
    other, kind = _MESSAGES[name]
    names = [each for each in ("tensors", other, "tag") if each is not None]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    if not {*names} <= {*given} or not given["tensors"]:
        return ()  # torch refuses it
    return message(kind, None if other is None else given[other], given["tag"], given["tensors"][0])


_here = threading.local()


@contextlib.contextmanager
def own_turn() -> Iterator[None]:
    """For the thread of an operation whose turn has come: what it posts waits for no other one."""
    before = getattr(_here, "own", False)
    _here.own = True
    try:
        yield
    finally:
        _here.own = before


def forget_own_turn() -> None:
    """For a thread in which an exception of a signal's handler may have ended `own_turn` at any place."""
    _here.own = False


class Turns:
    """Of one world.

    Attributes:
        taken: those that are not over, in the order in which they were taken.
    """

    def __init__(self) -> None:
        self.taken: list[Turn] = []

    def hold(self, ways: Sequence[Way]) -> bool:
        """Whether an operation on `ways` has to take a turn."""
        return any(each.meets(ways) for each in tuple(self.taken))

    def take(self, ways: Sequence[Way]) -> Turn:
        """Return a turn behind all that meet its ways."""
        turn = Turn(self.taken, ways)
        turn.take()
        return turn

    def wait(self, ways: Sequence[Way], goes_on: Callable[[], bool]) -> None:
        """Wait for the turn of an operation of one step, in a call that blocks, as `Turn.wait` does.

        The turn is over then: what is posted next has its place.
        """
        if getattr(_here, "own", False) or not self.hold(ways):
            return
        turn = Turn(self.taken, ways)
        try:
            turn.wait(goes_on)
        finally:
            turn.over()


class Turn:
    """One operation's; it lasts from `take` until `over`.

    Args:
        taken: see `Turns`.
        ways: that it keeps others from.

    Attributes:
        before: those that it waits for.
        left: whether it is over.
        loop: the event loop that it needs to go on; None if it needs none.
        waits_in: the thread, by its identifier, in which a call waits for it or runs it; None if none does.
    """

    def __init__(self, taken: list[Turn], ways: Sequence[Way]) -> None:
        self.before: Sequence[Turn] = ()
        self.left = False
        self.loop: asyncio.AbstractEventLoop | None = None
        self.waits_in: int | None = None
        self._taken = taken
        self._ways = ways
        self._calls: list[Callable[[], None]] = []  # one at most; who takes it out makes it

    def meets(self, ways: Sequence[Way]) -> bool:
        """Whether an operation on `ways` must not begin before this one is over."""
        return any(_meet(mine, other) for mine in self._ways for other in ways)

    def take(self) -> None:
        """Stand behind all that were taken before and meet its ways."""
        self._taken.append(self)
        taken = tuple(self._taken)
        self.before = [each for each in taken[: taken.index(self)] if each.meets(self._ways)]

    def wait(self, goes_on: Callable[[], bool]) -> None:
        """Take it, in a call that blocks, and wait until it has come, or the world is over.

        As for awaited ones no timeout counts yet: those ahead end by theirs. The caller ends it, also where
        an exception ends this, which a signal's handler may raise anywhere here.

        Args:
            goes_on: whether the world is active.

        Raises:
            RuntimeError: it cannot come while this call waits.
        """
        self.waits_in = threading.get_ident()
        self.take()
        # No Event: an exception of a signal's handler may come out of its `wait` as another one.
        come = threading.Lock()
        come.acquire()
        self.when_come(come.release)
        while goes_on():
            self._refuse(_running_loop())
            if come.acquire(timeout=_LOOK):
                break

    def _refuse(self, loop: asyncio.AbstractEventLoop | None) -> None:
        """Raise RuntimeError if one ahead does not go on while this thread, which runs `loop`, waits."""
        seen, ahead = {self}, [*self.before]
        while ahead:
            each = ahead.pop()
            if each in seen or each.left:
                continue
            seen.add(each)
            ahead += each.before
            if each.waits_in == self.waits_in:
                raise nested_call()
            if each._is_stuck(loop):  # noqa: SLF001  (of this class)
                which = "that this thread runs" if each.loop is loop else "that does not run now"
                raise RuntimeError(
                    "this call has to wait for an operation of World.aio that was called before it, and goes "
                    f"on in an event loop {which}. Await that one first, or await this one as well"
                )

    def _is_stuck(self, loop: asyncio.AbstractEventLoop | None) -> bool:
        """Whether it needs `loop`, or one that does not run."""
        own = self.loop
        if own is None or (own.is_closed() and self._calls):  # it ends when it comes
            return False
        return own is loop or not own.is_running()

    def when_come(self, call: Callable[[], None]) -> None:
        """Call `call` once, here if the turn has come, else in the thread in which it comes."""
        self._calls.append(call)
        self._look()

    async def come(self) -> None:
        """Wait until it has come, and go on in this event loop; if that fails, it is over."""
        self.loop = loop = asyncio.get_running_loop()
        if self._is_here():
            return
        here: asyncio.Future[None] = loop.create_future()

        def tell() -> None:
            try:
                loop.call_soon_threadsafe(_settle, here)
            except RuntimeError:  # the loop is closed, and its tasks with it
                self.over()

        self.when_come(tell)
        try:
            await here
        except BaseException:
            self.over()
            raise

    def give_up(self) -> None:
        """It is over, unless its call was made already."""
        if self._take_call() is not None:
            self.over()

    def over(self) -> None:
        """Let the next ones begin; again it does what an exception of a signal's handler left undone."""
        self.left = True
        self.before = ()
        with contextlib.suppress(ValueError):  # it was not taken yet
            self._taken.remove(self)
        for each in tuple(self._taken):
            each._look()  # noqa: SLF001  (of this class)

    def _is_here(self) -> bool:
        # The last first: as a rule it is the last to leave.
        return all(each.left for each in reversed(self.before))

    def _look(self) -> None:
        if self._calls and self._is_here() and (call := self._take_call()) is not None:
            self.before = ()
            call()

    def _take_call(self) -> Callable[[], None] | None:
        try:
            return self._calls.pop()
        except IndexError:  # another thread has it, or there was none
            return None


def _meet(one: Way, other: Way) -> bool:
    return all(a == b or a is None or b is None for a, b in zip(one, other, strict=True))


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _type_of(device: object) -> str:
    return str(device).partition(":")[0]


def _settle(here: asyncio.Future[None]) -> None:
    if not here.done():
        here.set_result(None)
