"""The tensors of a state that comes: where each is received into, and whether it has come whole."""

from __future__ import annotations

import contextlib
import struct
from typing import TYPE_CHECKING

from multiworld._c10d.lane import state_tensors, tensors
from multiworld._c10d.lane.state_sums import Sums
from multiworld._core import state_pieces
from multiworld._core.state_notes import Kind
from multiworld._core.state_tree import dotted

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, MutableMapping, Sequence

    from torch import Tensor

    from multiworld._c10d.lane.state_line import Line
    from multiworld._c10d.lane.state_tensors import Form
    from multiworld._core.state_pieces import Piece
    from multiworld._core.state_tree import Path

__all__ = ["Coming"]


class Coming:
    """See the module.

    Args:
        line: to the provider.
        paths: of the tensors.
        forms: of the tensors.
        there: which of them do not come, because they are in `has`.
        rooms: to receive into, by path, where the form is the same.
        has: what came before, with its checksums; what is about to be received over is taken out of it.
        changes: called before one of `rooms` is changed.

    Attributes:
        tensors: that came, or were there, in order; after `receive`.
        total: bytes that come.

    Raises:
        StateTransferError: `there` names what is not in `has`.
    """

    def __init__(
        self,
        line: Line,
        paths: Sequence[Path],
        forms: Sequence[Form],
        there: Sequence[bool],
        rooms: Mapping[Path, Tensor],
        has: MutableMapping[Path, tuple[Tensor, int]],
        changes: Callable[[], None] | None = None,
    ) -> None:
        self.tensors: list[Tensor] = []
        self.total = sum(form.nbytes for form, here in zip(forms, there, strict=True) if not here)
        self._line = line
        self._paths = paths
        self._forms = forms
        self._rooms = rooms
        self._has = has
        self._changes = changes
        self._coming = [at for at, here in enumerate(there) if not here]
        self._sums = Sums()
        self._found: dict[int, Tensor] = {}
        self._left = {at: forms[at].nbytes for at in self._coming}  # bytes
        self._damaged: set[int] = set()
        for at, here in enumerate(there):
            if here:
                path, known = paths[at], has.get(paths[at])
                if known is None or state_tensors.form(known[0]) != forms[at]:
                    raise line.failed(f"{dotted(path)} does not come, and is not here")
                self._found[at] = self._put(at, known[0])

    def receive(self, progress: Callable[[int, int], None] | None) -> None:
        """Receive all that comes.

        Raises:
            StateError: there is not so much memory.
            StateTransferError: it is damaged.
            Exception: the lane's.
        """
        line, done = self._line, 0
        for number, part in enumerate(state_tensors.parts_of(self._forms, self._coming)):
            if line.hear(Kind.PART).numbers[0] != number:
                raise line.failed(f"part {number} was due")
            self._sums.settle(state_pieces.CHUNK)
            self._receive(part)
            line.tell(Kind.TOOK, number)
            done += sum(piece.size for piece in part)
            if progress is not None:
                progress(done, self.total)
        self._compare()
        self.tensors = [self._tensor(at) for at in range(len(self._forms))]

    def keep(self) -> None:
        """Put into `has` what came whole, take out what came damaged; nothing is received any more."""
        with contextlib.closing(self._sums):
            for at, left in self._left.items():
                if at in self._damaged:
                    self._has.pop(self._paths[at], None)
                elif not left and at in self._found:
                    self._has[self._paths[at]] = self._found[at], self._sums.whole(at)

    def _receive(self, part: Sequence[Piece]) -> None:
        views = [state_tensors.part_of(self._tensor(piece.tensor), piece.at) for piece in part]
        rooms = [
            each if state_tensors.in_memory(each) else state_tensors.form(each).staging() for each in views
        ]

        def landed(at: int) -> None:
            piece, view, room = part[at], views[at], rooms[at]
            if room is not view:
                tensors.copied_back(room, view)
            self._sums.add(piece, room)
            self._left[piece.tensor] -= piece.size

        self._line.receive(rooms, landed)

    def _compare(self) -> None:
        mine = {at: self._sums.of(at) for at in self._coming}
        size, checksum, *_ = self._line.hear(Kind.SUMS).numbers
        data = self._line.receive_text(size, checksum)
        if len(data) != 4 * sum(map(len, mine.values())):
            raise self._line.failed(f"{len(data)} bytes of checksums came")
        theirs = iter(struct.unpack(f"<{len(data) // 4}I", data))
        self._damaged = {at for at, sums in mine.items() if [next(theirs) for _ in sums] != sums}
        if self._damaged:
            names = ", ".join(dotted(self._paths[at]) for at in sorted(self._damaged)[:5])
            count = len(self._damaged)
            raise self._line.failed(f"{count} tensors came damaged, or were changed meanwhile: {names}")

    def _tensor(self, at: int) -> Tensor:
        """Return where a tensor is received into."""
        if at not in self._found:
            room = self._room(at)
            if room is not None:
                # What came before may lie there: with another value in it, its checksum would be a false one.
                self._has.pop(self._paths[at], None)
            self._found[at] = self._forms[at].room() if room is None else room
        return self._found[at]

    def _room(self, at: int) -> Tensor | None:
        room = self._rooms.get(self._paths[at])
        if room is None or state_tensors.form(room) != self._forms[at]:
            return None
        if self._changes is not None:
            self._changes()
        return room

    def _put(self, at: int, known: Tensor) -> Tensor:
        """Return a tensor that was here already, from where it would have been received into."""
        room = self._room(at)
        if room is None:
            return known
        if room.data_ptr() != known.data_ptr() or room.device != known.device:
            tensors.copied_back(known.detach(), room)
        return room
