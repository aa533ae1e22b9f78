"""Turns: in which order a world's operations begin while an awaited one of them takes several steps.

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

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = [
    "COLLECTIVE",
    "RECEIVE",
    "SEND",
    "Turn",
    "Turns",
    "Way",
    "batch",
    "collective",
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


def collective(device: Any) -> tuple[Way, ...]:
    """Return the ways of an object collective whose bytes travel on `device`."""
    return COLLECTIVE if (kind := _type_of(device)) == "cpu" else ((kind, None, None),)


def message(kind: str, peer: int | None, tag: int, on: Any) -> tuple[Way, ...]:
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


def batch(p2p_op_list: Sequence[Any]) -> list[Way]:
    """Return the ways of a batch's messages (``dist.P2POp``); what is none of them torch refuses."""
    return [
        way
        for each in p2p_op_list
        if hasattr(each, "peer")
        for way in message(RECEIVE if each.op.__name__ == "irecv" else SEND, each.peer, each.tag, each.tensor)
    ]


def posted(name: str, args: Sequence[Any]) -> tuple[Way, ...]:
    """Return the ways of what a method of torch's ProcessGroup posts, by its name and arguments."""
    if name not in {"send", "recv", "recv_anysource"}:
        return COLLECTIVE
    tensors, *rest = args
    peer, tag = (None, *rest) if name == "recv_anysource" else rest
    return message(SEND if name == "send" else RECEIVE, peer, tag, tensors[0])


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
        self.taken.append(turn)
        taken = tuple(self.taken)
        turn.before = [each for each in taken[: taken.index(turn)] if each.meets(ways)]
        return turn

    def wait(self, ways: Sequence[Way], goes_on: Callable[[], bool]) -> None:
        """`wait_and_take`, of an operation of one step: its turn is over before it is posted."""
        if not getattr(_here, "own", False) and self.hold(ways):
            self.wait_and_take(ways, goes_on).over()

    def wait_and_take(self, ways: Sequence[Way], goes_on: Callable[[], bool]) -> Turn:
        """Take the turn of an operation on `ways`, in a call that blocks, and wait for it or the world's end.

        As for awaited ones no timeout counts yet: those ahead end by theirs.

        Args:
            ways: of the operation.
            goes_on: whether the world is active.

        Raises:
            RuntimeError: one that was called before it needs the event loop of this thread.
        """
        turn, come = self.take(ways), threading.Event()
        try:
            turn.refuse(_running_loop())
            turn.when_come(come.set)
            while goes_on() and not come.wait(_LOOK):
                pass
        except BaseException:
            turn.over()
            raise
        return turn


class Turn:
    """One operation's; it lasts from `Turns.take` until `over`.

    Args:
        taken: see `Turns`.
        ways: that it keeps others from.

    Attributes:
        before: those that it waits for.
        left: whether it is over.
        loop: the event loop that it needs to go on; None if it needs none.
    """

    def __init__(self, taken: list[Turn], ways: Sequence[Way]) -> None:
        self.before: Sequence[Turn] = ()
        self.left = False
        self.loop: asyncio.AbstractEventLoop | None = None
        self._taken = taken
        self._ways = ways
        self._calls: list[Callable[[], None]] = []  # one at most; who takes it out makes it

    def meets(self, ways: Sequence[Way]) -> bool:
        """Whether an operation on `ways` must not begin before this one is over."""
        return any(_meet(mine, other) for mine in self._ways for other in ways)

    def refuse(self, loop: asyncio.AbstractEventLoop | None) -> None:
        """Raise RuntimeError if it comes only after one that needs `loop`."""
        seen, ahead = {self}, [*self.before]
        while loop is not None and ahead:
            each = ahead.pop()
            if each.loop is loop and not each.left:
                raise RuntimeError(
                    "this call has to wait for an operation of World.aio that was called before it, and goes "
                    "on in the event loop of this thread. Await that one first, or await this one as well"
                )
            if each not in seen:
                seen.add(each)
                ahead += each.before

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
        """Let the next ones begin; again does nothing."""
        if self.left:
            return
        self.left = True
        self.before = ()
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


def _type_of(device: Any) -> str:
    return str(device).partition(":")[0]


def _settle(here: asyncio.Future[None]) -> None:
    if not here.done():
        here.set_result(None)
