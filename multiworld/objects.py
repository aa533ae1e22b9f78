"""Object collectives of a world: Python objects, unpickled with torch's ``weights_only`` rules.

An object arrives from another process: unpickling it freely would run whatever that process put into it. With
``weights_only=True``, the default, only plain data, tensors and what ``torch.serialization.add_safe_globals``
allows is read; ``weights_only=False`` reads anything, for members that trust each other. (What is plain data
is torch's say: ``bytes`` are from torch 2.5 on.)
"""

from __future__ import annotations

import io
import pickle
import re
from typing import TYPE_CHECKING, Any, TypeVar

from multiworld import uninterrupted
from multiworld.collectives import Collectives
from multiworld.events import State
from multiworld.steps import Steps
from multiworld.turns import RECEIVE, SEND, collective, message

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch
    from torch import Tensor

    from multiworld._generation.generation import Generation
    from multiworld.turns import Way
    from multiworld.work import WorldWork

__all__ = ["ComingList", "ObjectCollectives", "OneGeneration"]

_T = TypeVar("_T")
_GLOBAL = re.compile(r"(?:GLOBAL|Unsupported class) ([\w.]+)")


class ObjectCollectives(Collectives):
    """Mixin of `multiworld.World`. `device` is where the bytes travel; None takes the world's own device.

    All raise what the tensor collectives raise, and ``pickle.UnpicklingError`` for an object that
    ``weights_only`` does not allow.
    """

    if TYPE_CHECKING:

        @property
        def rank(self) -> int:
            """The world's."""

        @property
        def world_size(self) -> int:
            """The world's."""

        @property
        def device(self) -> torch.device:
            """The world's."""

    def send_object_list(self, object_list: list[Any], dst: int, device: torch.device | None = None) -> None:
        """Send the objects of `object_list` to rank `dst`."""
        here, device = self._pinned(), device or self.device
        parts = _parts(object_list)
        works = self._in_turn(message(SEND, dst, 0, device), lambda: here.post_objects(parts, dst, device))
        for work in works:
            work.wait()

    def recv_object_list(
        self,
        object_list: list[Any],
        src: int | None = None,
        device: torch.device | None = None,
        *,
        weights_only: bool = True,
    ) -> int:
        """Fill `object_list`, to its length, from rank `src` (None: any); returns the sender's rank."""
        here, device = self._pinned(), device or self.device
        coming, sender = ComingList(object_list, device), 0

        def sizes() -> bool:
            nonlocal sender
            sender = here.recv(coming.sizes, src)
            return True

        def data() -> None:
            with here.steps("recv_object_list", begun=True):
                here.recv(coming.room(), sender)

        def both() -> None:
            sizes()
            data()

        ways = message(RECEIVE, src, 0, device)
        if coming.over_lane(here._gen):  # noqa: SLF001  (of this module)
            self._in_turn(ways, data, first=sizes)
        else:  # Ctrl-C takes no receive of torch's back, and its group looks whose turn it is
            self._in_turn(ways, both)
        coming.fill(sender, weights_only=weights_only)
        return sender

    def broadcast_object_list(
        self,
        object_list: list[Any],
        src: int = 0,
        device: torch.device | None = None,
        *,
        weights_only: bool = True,
    ) -> None:
        """Give every member the objects of `src`'s `object_list` (same length everywhere), in place."""
        _require_list("object_list", object_list)
        here, device = self._pinned(), device or self.device
        mine = here.rank == src
        parts = [_encode(each) for each in object_list] if mine else []
        sizes = _sizes(parts, device) if mine else _numbers(len(object_list), device)

        def spread() -> Tensor:
            with here.steps("broadcast_object_list") as steps:
                here.broadcast(sizes, src)
                steps.begun = True
                data = _joined(parts, device) if mine else _room(int(sizes.sum()), device)
                here.broadcast(data, src)
            return data

        data = self._in_turn(collective(device), spread)
        if not mine:
            object_list[:] = _split(data, sizes.tolist(), src, weights_only)

    def all_gather_object(self, object_list: list[Any], obj: object, *, weights_only: bool = True) -> None:
        """Fill `object_list` with everyone's `obj`, by rank; it is ``world_size`` long."""
        _require_list("object_list", object_list)
        here, part = self._pinned(), _encode(obj)
        datas = self._in_turn(collective(here.device), lambda: here.gather_bytes(part))
        for rank, data in enumerate(datas):
            object_list[rank] = obj if rank == here.rank else _decode(data, rank, weights_only)

    def gather_object(
        self,
        obj: object,
        object_gather_list: list[Any] | None = None,
        dst: int = 0,
        *,
        weights_only: bool = True,
    ) -> None:
        """Fill `dst`'s `object_gather_list` with all ranks' `obj`: ``world_size`` long, None elsewhere."""
        here = self._pinned()
        if not 0 <= dst < here.world_size:
            raise ValueError(f"dst {dst}. Ranks are 0 to {here.world_size - 1}. Name a member.")
        if here.rank == dst and object_gather_list is None:
            raise ValueError(
                f"object_gather_list is None on rank {dst}, which gathers. Give a list of {here.world_size}."
            )
        if here.rank == dst:
            _require_list("object_gather_list", object_gather_list)
        part = _encode(obj)
        datas = self._in_turn(collective(here.device), lambda: here.gather_bytes(part))
        if here.rank == dst and object_gather_list is not None:
            for rank, data in enumerate(datas):
                object_gather_list[rank] = obj if rank == here.rank else _decode(data, rank, weights_only)

    def scatter_object_list(
        self,
        scatter_object_output_list: list[Any],
        scatter_object_input_list: list[Any] | None = None,
        src: int = 0,
        *,
        weights_only: bool = True,
    ) -> None:
        """Put rank r's object of `src`'s list into ``scatter_object_output_list[0]`` of rank r."""
        _require_list("scatter_object_output_list", scatter_object_output_list)
        here = self._pinned()
        objects = list(scatter_object_input_list or []) if here.rank == src else []
        if here.rank == src and len(objects) != here.world_size:
            raise ValueError(
                f"scatter_object_input_list has {len(objects)} objects. It has one per rank: {here.world_size}."
            )
        parts = [_encode(each) for each in objects]
        sizes = _sizes(parts, here.device) if parts else _numbers(here.world_size, here.device)

        def spread() -> Tensor:
            with here.steps("scatter_object_list") as steps:
                here.broadcast(sizes, src)
                steps.begun = True
                longest = int(sizes.max())
                padded = [_joined([part.ljust(longest, b"\0")], here.device) for part in parts]
                data = _room(longest, here.device)
                here.scatter(data, padded or None, src)  # no message: those are the program's own
            return data

        data = self._in_turn(collective(here.device), spread)
        if here.rank == src:
            scatter_object_output_list[0] = objects[src]
        else:
            scatter_object_output_list[0] = _decode(data[: int(sizes[here.rank])], src, weights_only)

    def _pinned(self) -> OneGeneration:
        """The world in its present generation, for an operation of several steps."""
        return OneGeneration(self, self._gen)

    def _in_turn(
        self, ways: Sequence[Way], steps: Callable[[], _T], *, first: Callable[[], bool] | None = None
    ) -> _T:
        """Run the steps of an operation on `ways` in its turn; see `uninterrupted.run`."""
        gen = self._gen
        cut = Steps(gen, "an operation of several steps").cut
        return uninterrupted.run(self._turns, ways, lambda: gen.state is State.ACTIVE, steps, first, cut=cut)


class OneGeneration(ObjectCollectives):
    """The collectives of a world in one of its generations: once that is over, each raises what it ended with.

    Several steps, and what is posted after a wait, are one operation: none of it is the next generation's.

    Args:
        world: whose device is used.
        gen: the generation.
    """

    def __init__(self, world: ObjectCollectives, gen: Generation) -> None:
        self._world, self._gen = world, gen

    @property
    def rank(self) -> int:
        """In the generation."""
        return self._gen.rank

    @property
    def world_size(self) -> int:
        """Of the generation."""
        return self._gen.size

    @property
    def device(self) -> torch.device:
        """The world's."""
        return self._world.device

    def _in_turn(
        self, _ways: Sequence[Way], steps: Callable[[], _T], *, first: Callable[[], bool] | None = None
    ) -> _T:
        """Run the steps: their turn has come, in a thread that no signal's handler interrupts."""
        if first is not None:
            first()
        return steps()

    def steps(self, name: str, *, begun: bool = False) -> Steps:
        """Return the block for the steps of the operation `name`."""
        return Steps(self._gen, name, begun=begun)

    def send_objects(
        self, object_list: list[Any], dst: int, device: torch.device | None, posted: Callable[[], object]
    ) -> None:
        """`send_object_list`, which calls `posted` once both messages are posted."""
        works = self.post_objects(_parts(object_list), dst, device or self.device)
        posted()
        for work in works:
            work.wait()

    def post_objects(self, parts: list[bytes], dst: int, device: torch.device) -> list[WorldWork]:
        """Start to send the two messages of a list to rank `dst`, see `ComingList`."""
        # Both before anything is posted: they take memory.
        sizes, data = _sizes(parts, device), _joined(parts, device)
        with self.steps("send_object_list") as steps:
            first = self.isend(sizes, dst)
            steps.begun = True
            return [first, self.isend(data, dst)]

    def gather_bytes(self, part: bytes) -> list[Tensor]:
        """Return everyone's bytes, by rank: 1-D, of uint8, on the device."""
        sizes = [_numbers(1, self.device) for _ in range(self.world_size)]
        with self.steps("a gather of objects") as steps:
            self.all_gather(sizes, _sizes([part], self.device))
            steps.begun = True
            lengths = [int(size) for size in sizes]
            longest = max(lengths)
            datas = [_room(longest, self.device) for _ in range(self.world_size)]
            self.all_gather(datas, _joined([part.ljust(longest, b"\0")], self.device))
        return [data[:length] for data, length in zip(datas, lengths, strict=True)]


class ComingList:
    """A list of objects that is received, in two messages: its sizes, then its data.

    Args:
        object_list: to fill, to its length.
        device: where the bytes travel.

    Attributes:
        sizes: receives the first message.
    """

    def __init__(self, object_list: list[Any], device: torch.device) -> None:
        _require_list("object_list", object_list)
        self._list, self._device = object_list, device
        self.sizes = _numbers(len(object_list), device)

    def over_lane(self, gen: Generation) -> bool:
        """Whether the lane of `gen` carries it."""
        return gen.lane is not None and gen.lane.takes(self.sizes)

    def room(self) -> Tensor:
        """Return what receives the second message, once the first has come."""
        self._data = _room(int(self.sizes.sum()), self._device)
        return self._data

    def fill(self, sender: int, *, weights_only: bool) -> None:
        """Put the objects into the list, once both have come from rank `sender`.

        Raises:
            pickle.UnpicklingError: `weights_only` does not allow one of them.
        """
        self._list[:] = _split(self._data, self.sizes.tolist(), sender, weights_only)


def _require_list(name: str, given: object) -> None:
    if not isinstance(given, list):
        raise TypeError(
            f"{name}={given!r:.80}: it is a {type(given).__name__}. It has to be a list of objects."
        )


def _parts(object_list: Sequence[object]) -> list[bytes]:
    if not isinstance(object_list, tuple):
        _require_list("object_list", object_list)
    return [_encode(each) for each in object_list]


def _encode(obj: object) -> bytes:
    import torch  # noqa: PLC0415  (a world exists, so torch is loaded)

    buffer = io.BytesIO()
    torch.save(obj, buffer)
    return buffer.getvalue()


def _decode(data: Tensor, sender: int, weights_only: bool) -> object:
    import torch  # noqa: PLC0415  (a world exists, so torch is loaded)

    from multiworld._c10d import archives  # noqa: PLC0415  (torch is loaded by now)

    stream = (
        io.BytesIO(data.cpu().numpy().tobytes()) if _has_numpy() else io.BytesIO(bytes(data.cpu().tolist()))
    )
    if weights_only and not archives.is_plain(stream):
        raise pickle.UnpicklingError(
            f"What rank {sender} sent is no archive as torch.save writes it, and weights_only=True reads nothing else. "
            "Send it with a world's object methods, or pass weights_only=False where every member is trusted."
        )
    try:
        return torch.load(stream, map_location="cpu", weights_only=weights_only)  # nosec B614  # the caller's choice
    except pickle.UnpicklingError as exc:
        raise pickle.UnpicklingError(
            f"The object from rank {sender} holds what weights_only=True does not read ({_reason(exc)}). "
            "Allow its type with torch.serialization.add_safe_globals, or pass weights_only=False where every "
            "member is trusted."
        ) from exc


def _reason(exc: pickle.UnpicklingError) -> str:
    """What torch says that it met, out of a page of advice and terminal colours."""
    found = _GLOBAL.search(str(exc))
    return found.group(1) if found is not None else (str(exc).splitlines() or ["no reason given"])[0]


def _split(data: Tensor, sizes: list[int], sender: int, weights_only: bool) -> list[object]:
    parts: tuple[Tensor, ...] = data.split(sizes)  # type: ignore[no-untyped-call, unused-ignore]
    return [_decode(part, sender, weights_only) for part in parts]


def _numbers(count: int, device: torch.device) -> Tensor:
    import torch  # noqa: PLC0415  (a world exists, so torch is loaded)

    return torch.zeros(count, dtype=torch.int64, device=device)


def _room(nbytes: int, device: torch.device) -> Tensor:
    import torch  # noqa: PLC0415  (a world exists, so torch is loaded)

    return torch.empty(nbytes, dtype=torch.uint8, device=device)


def _sizes(parts: list[bytes], device: torch.device) -> Tensor:
    import torch  # noqa: PLC0415  (a world exists, so torch is loaded)

    return torch.tensor([len(part) for part in parts], dtype=torch.int64, device=device)


def _joined(parts: list[bytes], device: torch.device) -> Tensor:
    import torch  # noqa: PLC0415  (a world exists, so torch is loaded)

    data = bytearray(b"".join(parts))
    if not data:  # of no objects
        return _room(0, device)
    return torch.frombuffer(data, dtype=torch.uint8).to(device)


def _has_numpy() -> bool:
    from importlib.util import find_spec  # noqa: PLC0415  (only lists of objects ask)

    return find_spec("numpy") is not None
