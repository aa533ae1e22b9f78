"""A member's state, sent to another member: nested dicts of tensors, as ``state_dict()`` returns them.

Tensors travel from their memory into the receiver's, in pieces; other values as text that cannot run anything
(`multiworld._core.state_tree`). What both ends say in which order: `multiworld._core.state_notes`.

What is on its way when a transfer fails, two parts at most, stays with the lane until that ends; it is never
taken for a part of another transfer.
"""

from __future__ import annotations

import contextlib
import secrets
import struct
import zlib
from collections import deque
from typing import TYPE_CHECKING, Any

from multiworld._c10d.lane import state_tensors
from multiworld._c10d.lane.state_coming import Coming
from multiworld._c10d.lane.state_line import TRANSFERS, Line
from multiworld._c10d.lane.state_sums import Sums
from multiworld._c10d.lane.state_tensors import Form
from multiworld._core import state_pieces
from multiworld._core.state_notes import Kind
from multiworld._core.state_tree import dotted, flatten, rebuild
from multiworld.errors import StateError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, MutableMapping

    from torch import Tensor

    from multiworld._c10d.lane.messages import Messages
    from multiworld._core.state_pieces import Piece
    from multiworld._core.state_tree import Path

    Progress = Callable[[int, int], None]
    Kept = MutableMapping[Path, tuple[Tensor, int]]

__all__ = ["receive_state", "send_state"]

_UNDER_WAY = 2  # parts that the receiver has not taken


# -- the member that has the state ---------------------------------------------------------------------------


def send_state(
    messages: Messages,
    receiver_rank: int,
    state: object,
    *,
    deadline: float,
    patience: float | None = None,
    progress: Progress | None = None,
) -> None:
    """Send a state to a member that is in, or will come to, `receive_state`; wait until it has it whole.

    Threads may send to several members at once, one each. The tensors must stay as they are meanwhile.

    Args:
        messages: of the world.
        receiver_rank: rank of that member.
        state: dicts, lists and tuples of None, bool, int, float, str, bytes and dense tensors on any device.
        deadline: ``time.monotonic()`` seconds.
        patience: seconds from each thing that comes to a new deadline; None: there is but one.
        progress: called in this thread with the bytes of tensors that were taken, and that will be in all.

    Raises:
        StateError: the state has what cannot be sent; the receiver is told.
        StateTransferError: the receiver gave up, or something came damaged.
        Exception: the lane's: the receiver is lost, or it is late.
    """
    provided = False
    while not provided:
        line = Line(messages, receiver_rank, deadline, patience=patience)
        transfer, size, checksum, knows_busy = line.hear(Kind.HELLO).numbers
        if not 0 < transfer < TRANSFERS:
            raise line.failed(f"it has number {transfer}")
        line.transfer = transfer
        try:
            announced = _read(line.receive_text(size, checksum), line)
            provided = _provide(line, state, announced, progress, tell=bool(knows_busy))
        except BaseException as error:
            line.give_up(error)
            raise


def _provide(line: Line, state: object, announced: Any, progress: Progress | None, *, tell: bool) -> bool:
    """Send a state; False if its receiver was gone before it came to that."""
    text, leaves = flatten(state, state_tensors.is_tensor)
    forms = [state_tensors.sendable_form(path, tensor) for path, tensor in leaves]
    there = _already_there(line, leaves, forms, announced, tell=tell)
    described, _ = flatten([text, [(*each, at in there) for at, each in enumerate(forms)]], _none)
    coming = [at for at in range(len(forms)) if at not in there]
    total = sum(forms[at].nbytes for at in coming)
    line.tell(Kind.OFFER, len(described), zlib.crc32(described.encode()), len(forms), total)
    if line.hear(Kind.GO, Kind.GONE).kind is Kind.GONE:
        return False
    line.send_text(described.encode())
    with contextlib.closing(Sums()) as sums:
        _send_parts(line, leaves, state_tensors.parts_of(forms, coming), sums, total, progress)
        table = [each for at in coming for each in sums.of(at)]
    packed = struct.pack(f"<{len(table)}I", *table)
    line.tell(Kind.SUMS, len(packed), zlib.crc32(packed))
    line.send_text(packed)
    line.hear(Kind.DONE)
    return True


def _send_parts(
    line: Line,
    leaves: list[tuple[Path, Tensor]],
    parts: Iterable[list[Piece]],
    sums: Sums,
    total: int,
    progress: Progress | None,
) -> None:
    under_way: deque[int] = deque()  # bytes of parts
    done = 0

    def until(most: int) -> None:
        nonlocal done
        while len(under_way) > most:
            line.hear(Kind.TOOK)
            done += under_way.popleft()
            if progress is not None:
                progress(done, total)

    for number, part in enumerate(parts):
        until(_UNDER_WAY - 1)
        sums.settle(state_pieces.CHUNK)
        for piece in part:
            data = _data(leaves[piece.tensor], piece)
            line.send(data)
            sums.add(piece, data)
        line.tell(Kind.PART, number)
        under_way.append(sum(piece.size for piece in part))
    until(0)


def _already_there(
    line: Line, leaves: list[tuple[Path, Tensor]], forms: list[Form], announced: Any, *, tell: bool
) -> frozenset[int]:
    """Return which tensors the receiver has already, with the same values; it is told meanwhile if `tell`."""
    known = {path: at for at, (path, _) in enumerate(leaves)}
    try:
        said = {path: (Form(dtype, shape), checksum) for path, dtype, shape, checksum in announced}
    except (TypeError, ValueError) as error:
        raise line.failed("what was announced are no tensors") from error
    theirs = {
        known[path]: checksum
        for path, (form, checksum) in said.items()
        if path in known and forms[known[path]] == form
    }
    with contextlib.closing(Sums()) as sums:
        for part in state_tensors.parts_of(forms, theirs):
            line.go_on(tell=tell)
            sums.settle(state_pieces.CHUNK)
            for piece in part:
                sums.add(piece, _data(leaves[piece.tensor], piece))
        line.go_on(tell=tell)
        return frozenset(at for at, checksum in theirs.items() if sums.whole(at) == checksum)


def _data(leaf: tuple[Path, Tensor], piece: Piece) -> Tensor:
    path, tensor = leaf
    try:
        return state_tensors.bytes_of(state_tensors.part_of(tensor, piece.at))
    except RuntimeError as error:
        raise StateError(
            f"{dotted(path)}, a tensor of dtype {tensor.dtype} on {tensor.device}, could not be copied",
            rule="Tensors that do not lie in order on the CPU are copied to be sent",
            next_step="Give its contiguous() on the CPU",
        ) from error


def _none(_: object) -> bool:
    return False


# -- the member that gets it ---------------------------------------------------------------------------------


def receive_state(
    messages: Messages,
    provider_rank: int,
    *,
    into: object | None = None,
    in_place: bool,
    deadline: float,
    patience: float | None = None,
    progress: Progress | None = None,
    kept: Kept | None = None,
    changes: Callable[[], None] | None = None,
) -> Any:
    """Receive the state that a member gives to `send_state`.

    Args:
        messages: of the world.
        provider_rank: rank of that member.
        into: a state of this process.
        in_place: whether tensors of the same path, shape and dtype are received into those of `into`, where
            these have memory of their own. All others are new, on the CPU; so are all if this is False.
        deadline: ``time.monotonic()`` seconds.
        patience: as of `send_state`.
        progress: called in this thread with the bytes of tensors that came, and that will have come in all.
        kept: gets the tensors that have come whole, with their checksums, by their paths. A later call with
            it gets only the others, and those that another provider has otherwise. The caller keeps the
            tensors as they are until then.
        changes: called before a tensor of `into` is changed.

    Returns:
        The state; its tensors need no gradients.

    Raises:
        StateError: `into` is no state.
        StateTransferError: the provider gave up, or something came damaged.
        SizeMismatchError: the provider sent a piece of another size than it had said.
        Exception: the lane's: the provider is lost, or it is late.
    """
    rooms: dict[Path, Tensor] = {}
    if in_place:
        rooms = state_tensors.targets(flatten(into, state_tensors.is_tensor)[1])
    line = Line(messages, provider_rank, deadline, 1 + secrets.randbelow(TRANSFERS - 1), patience)
    try:
        return _receive(line, rooms, {} if kept is None else kept, progress, changes)
    except BaseException as error:
        line.give_up(error)
        if isinstance(error, StateError):
            raise line.failed(str(error)) from error
        raise


def _receive(
    line: Line,
    rooms: dict[Path, Tensor],
    has: Kept,
    progress: Progress | None,
    changes: Callable[[], None] | None,
) -> Any:
    announced = [(path, *state_tensors.form(tensor), sum_) for path, (tensor, sum_) in has.items()]
    data = flatten(announced, _none)[0].encode()
    line.tell(Kind.HELLO, line.transfer, len(data), zlib.crc32(data), 1)
    line.send_text(data)
    while (heard := line.hear(Kind.OFFER, Kind.BUSY)).kind is Kind.BUSY:
        pass  # it compares what is here with its own
    size, checksum, count, total = heard.numbers
    line.tell(Kind.GO)
    text, forms, there = _description(_read(line.receive_text(size, checksum), line), line)
    paths: list[Path] = []
    rebuild(text, paths.append)
    if not len(forms) == len(paths) == count:
        raise line.failed(f"{count} tensors were offered, and {len(forms)} and {len(paths)} are described")
    coming = Coming(line, paths, forms, there, rooms, has, changes)
    try:
        if coming.total != total:
            raise line.failed(f"{total} bytes were offered, and {coming.total} are described")
        coming.receive(progress)
    finally:
        coming.keep()
    line.tell(Kind.DONE)
    came = iter(coming.tensors)
    return rebuild(text, lambda _: next(came))


def _read(data: bytes, line: Line) -> Any:
    """Return a value that came as text; b"" is an empty list."""
    try:
        return rebuild(data.decode(), lambda _: None)
    except (StateError, UnicodeDecodeError) as error:
        raise line.failed(str(error)) from error


def _description(value: Any, line: Line) -> tuple[str, list[Form], list[bool]]:
    try:
        text, tensors = value
        forms = [Form.read(dtype, shape) for dtype, shape, _ in tensors]
        there = [each is True for _, _, each in tensors]
    except (TypeError, ValueError) as error:  # StateError is one
        raise line.failed(f"its description is none: {error}") from error
    if not isinstance(text, str):
        raise line.failed("its description is none")
    return text, forms, there
