"""Protocol of a state's transfer: what its two ends tell and send each other, over the lane.

Each transfer has a number, chosen by the receiver, and tags of its own: what an earlier one that failed has
left on its way is never taken for a part of it.
"""

from __future__ import annotations

import time
import zlib
from typing import TYPE_CHECKING

import torch

from multiworld._c10d.lane.p2p_dispatch import number_of
from multiworld._core import state_notes
from multiworld._core.lane.operations import SizesDifferError
from multiworld._core.state_notes import Kind, Note
from multiworld._net.lane.background import background
from multiworld.errors import StateError, StateTransferError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from multiworld._c10d.lane.messages import Messages
    from multiworld._core.lane.operations import Receive, Send

__all__ = ["LONGEST", "TRANSFERS", "GaveUpError", "Line"]

LONGEST = 64 << 20
"""Bytes of a text (a description, what is announced, checksums) that a member takes from another."""

TRANSFERS = 1 << 30
"""Numbers of transfers are 1 and more, and below this: each has two tags."""

_CHANNEL = number_of("m8d:state")
_BUSY_BELOW = 0.75
"""Part of the patience that is left when the other end is told that this one is at work."""
_LEAST = 1e-6  # seconds: 0 is the world's timeout


class GaveUpError(StateTransferError):
    """The other end ended the transfer, and said why."""


class Line:
    """One end's side of a transfer.

    Args:
        messages: of the world.
        peer: rank of the other end.
        deadline: ``time.monotonic()`` seconds.
        transfer: its number; 0: the first HELLO that comes tells.
        patience: seconds from each thing that comes to a new deadline; None: there is but one.
    """

    def __init__(
        self,
        messages: Messages,
        peer: int,
        deadline: float,
        transfer: int = 0,
        patience: float | None = None,
    ) -> None:
        self.peer = peer
        self.transfer = transfer
        self._messages = messages
        self._deadline = deadline
        self._patience = patience
        self._over = False  # the other end takes no more notes
        self._begun = not transfer  # False at a receiver that has not said GO

    # -- notes -----------------------------------------------------------------------------------------------

    def tell(self, kind: Kind, *numbers: int, text: str = "") -> None:
        """Send a note."""
        self._begun = self._begun or kind is Kind.GO
        self._checked(self._tell(kind, *numbers, text=text))

    def hear(self, *kinds: Kind) -> Note:
        """Wait for a note of one of these kinds.

        Raises:
            GaveUpError: the other end gave up.
            StateTransferError: it said something else.
            Exception: the lane's.
        """
        data = bytearray(state_notes.SIZE)
        self._take([_tensor(data)], 0 if Kind.HELLO in kinds else 2 * self.transfer)
        try:
            note = state_notes.unpack(data)
        except StateError as error:
            raise self.failed(str(error)) from error
        if note.kind in kinds:
            return note
        if note.kind is Kind.FAILED:
            self._over = True
            text = f"rank {self.peer} gave up: {note.text}"
            raise self.failed(text, "See there why, and begin again", GaveUpError)
        raise self.failed(f"rank {self.peer} said {note.kind.name} where {kinds[0].name} was due")

    def go_on(self, *, tell: bool) -> None:
        """Called while this end works on what it has heard: its patience begins anew, and the other end's.

        Args:
            tell: whether the other end knows `Kind.BUSY`.

        Raises:
            Exception: the lane's: the world is over.
        """
        endpoint = self._messages.endpoint
        receive = endpoint.post_receive(self.peer, _CHANNEL, 2 * self.transfer + 1, memoryview(b""))
        if receive.error is not None:
            self._messages.raise_explained(receive.error)
        endpoint.cancel(receive)
        now = time.monotonic()
        if self._patience is not None and self._deadline - now < _BUSY_BELOW * self._patience:
            self._deadline = now + self._patience
            if tell:
                self.tell(Kind.BUSY)

    def give_up(self, error: BaseException) -> None:
        """Tell the other end why this one ends the transfer, if it still wants to know."""
        if not self._over and self.transfer:
            self._over = True
            self._discard()
            kind = Kind.FAILED if self._begun else Kind.GONE
            self._tell(kind, text=f"{type(error).__name__}: {error}")

    def failed(
        self,
        value: str,
        next_step: str = "Begin again, also with another member",
        kind: type[StateTransferError] = StateTransferError,
    ) -> StateTransferError:
        """Return the error of a transfer that went wrong."""
        world = self._messages.world
        return kind(world, f"the transfer of a state in world {world!r} failed: {value}", next_step=next_step)

    # -- bytes -----------------------------------------------------------------------------------------------

    def send(self, tensor: Tensor) -> None:
        """Begin to send a tensor's bytes, which must stay as they are until the other end has taken them."""
        self._checked(self._post(tensor, 2 * self.transfer + 1))

    def send_text(self, data: bytes) -> None:
        """Begin to send bytes of which a note has told the number; none are no message."""
        if data:
            self.send(_tensor(bytearray(data)))

    def receive(self, rooms: Sequence[Tensor], landed: Callable[[int], None] = lambda _: None) -> None:
        """Receive tensors' bytes.

        Args:
            rooms: contiguous; on an error no byte is written any more, and no receive is left.
            landed: called with the number of each, in order, when it is there.
        """
        self._take(rooms, 2 * self.transfer + 1, landed)

    def receive_text(self, size: int, checksum: int) -> bytes:
        """Receive bytes of which a note has told number and checksum.

        Raises:
            StateTransferError: they are too many, or came damaged.
        """
        if size > LONGEST:
            raise self.failed(
                f"{size} bytes of description, of which {LONGEST} are taken", "Make the state of fewer parts"
            )
        data = bytearray(size)
        if size:
            self.receive([_tensor(data)])
        if zlib.crc32(data) != checksum:
            raise self.failed(f"{size} bytes of description came damaged")
        return bytes(data)

    def _take(
        self, rooms: Sequence[Tensor], tag: int, landed: Callable[[int], None] = lambda _: None
    ) -> None:
        messages = self._messages
        receives: list[Receive] = []
        try:
            for room in rooms:
                receives.append(messages.begin_receive(room, self.peer, tag, _CHANNEL)[0])  # noqa: PERF401  (one may fail)
            for at, each in enumerate(receives):
                messages.finish(each, max(_LEAST, self._deadline - time.monotonic()))
                if self._patience is not None:
                    self._deadline = time.monotonic() + self._patience
                landed(at)
        except BaseException:
            for each in receives:
                messages.endpoint.cancel(each)
            raise

    def _tell(self, kind: Kind, *numbers: int, text: str = "") -> Send:
        tag = 0 if kind is Kind.HELLO else 2 * self.transfer
        return self._post(_tensor(bytearray(state_notes.pack(kind, *numbers, text=text))), tag)

    def _post(self, tensor: Tensor, tag: int) -> Send:
        send = self._messages.begin_send(tensor, self.peer, tag, _CHANNEL)
        if not send.done:
            background.take_on(self._messages.endpoint, send)
        return send

    def _checked(self, send: Send) -> None:
        if send.error is not None:
            self._messages.raise_explained(send.error)

    def _discard(self) -> None:
        """Let go of what has come, and is not received any more: a receive of another size does that."""
        endpoint, tag = self._messages.endpoint, 2 * self.transfer + 1
        while True:
            receive = endpoint.post_receive(self.peer, _CHANNEL, tag, memoryview(b""))
            if not isinstance(receive.error, SizesDifferError):
                endpoint.cancel(receive)
                return


def _tensor(data: bytearray) -> Tensor:
    return torch.frombuffer(data, dtype=torch.uint8)
