"""Operations of the lane's core: sends and receives that it is asked for, arrivals."""

from __future__ import annotations

import enum

__all__ = ["Arrival", "PayloadSource", "Receive", "Send", "SizesDifferError"]


class SizesDifferError(Exception):
    """A receive's buffer has not the size of the message that it matched.

    Args:
        sent: bytes of the message, which is gone.
        expected: bytes of the buffer, which is untouched.
        sender: rank that the message came from.
    """

    def __init__(self, sent: int, expected: int, sender: int) -> None:
        self.sent = sent
        self.expected = expected
        self.sender = sender
        super().__init__(sent, expected, sender)

    def __str__(self) -> str:
        return (
            f"a message of {self.sent} bytes was sent by rank {self.sender}, and {self.expected} are expected"
        )


class Send:
    """A message on its way.

    Attributes:
        peer: rank that it goes to.
        view: its bytes; they must stay as they are until `done`.
        keep: what owns them, if `view` does not; released with `done`.
        address: where they lie in this process's memory; 0: not to be read from there.
        done: whether the core needs `view` no more.
        error: why it failed; None if it did not.
        id: of its announcement; 0: none.
        sent: bytes handed to the connection so far.
    """

    has_caller = False  # it is not known whether a thread waits for it
    __slots__ = (
        "__weakref__", "address", "channel", "done", "error", "id", "keep", "peer", "sent", "tag", "view",
    )  # fmt: skip

    def __init__(
        self,
        peer: int,
        channel: int,
        tag: int,
        view: memoryview,
        address: int = 0,
        keep: object | None = None,
    ) -> None:
        self.peer = peer
        self.channel = channel
        self.tag = tag
        self.view = view
        self.address = address
        self.keep = keep
        self.done = False
        self.error: Exception | None = None
        self.id = 0
        self.sent = 0


class Receive:
    """A buffer that waits for a message.

    Attributes:
        source: rank that the message comes from; None: any.
        view: gets its bytes; the core writes into it until `done`.
        keep: what owns its memory, if `view` does not; released with `done`.
        order: among the receives of the lane.
        sender: rank whose message it matched; None before that, and if the message was taken back.
        place: of the message among those of its sender.
        announced: the id of its announcement; 0: none.
        done: whether it is over.
        error: why it failed; None if it did not.
        arrival: the message that it matched, while that is not complete.
    """

    has_caller = False  # as of a `Send`
    __slots__ = (
        "__weakref__", "announced", "arrival", "channel", "done", "error", "keep", "order", "place", "sender",
        "source",
        "tag", "view",
    )  # fmt: skip

    def __init__(
        self,
        source: int | None,
        channel: int,
        tag: int,
        view: memoryview,
        order: int,
        keep: object | None = None,
    ) -> None:
        self.source = source
        self.channel = channel
        self.tag = tag
        self.view = view
        self.order = order
        self.keep = keep
        self.sender: int | None = None
        self.place = 0
        self.announced = 0
        self.done = False
        self.error: Exception | None = None
        self.arrival: Arrival | None = None


class PayloadSource(enum.Enum):
    """Where the bytes of an arrival come from."""

    WIRE = "wire"
    """They follow on the connection, or have come."""
    ANNOUNCED = "announced"
    """They are with the sender, who waits to be asked."""
    MEMORY = "memory"
    """They are being read from the sender's memory."""
    VOID = "void"
    """They are not needed: another arrival took the message over."""


class Arrival:
    """A message of which at least the header has come.

    Attributes:
        peer: rank of the sender.
        order: among the messages of that sender.
        id: of its announcement; 0: none.
        address: in the sender's memory; 0: not to be read.
        source: see `PayloadSource`.
        view: where the bytes go: a receive's buffer, or one of its own; None before the first byte.
        received: bytes that have come.
        receive: the one that it matched; None while it waits for one, and where sizes differ.
        here: whether all its bytes have come.
    """

    __slots__ = (
        "address", "channel", "here", "id", "order", "peer", "receive", "received", "size",
        "source", "tag", "view",
    )  # fmt: skip

    def __init__(self, peer: int, channel: int, tag: int, size: int, order: int) -> None:
        self.peer = peer
        self.channel = channel
        self.tag = tag
        self.size = size
        self.order = order
        self.id = 0
        self.address = 0
        self.source = PayloadSource.WIRE
        self.view: memoryview | None = None
        self.received = 0
        self.receive: Receive | None = None
        self.here = False
