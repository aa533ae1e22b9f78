"""A join's arguments: checked, completed, and what a rejoin repeats."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from multiworld import settings
from multiworld._core import durations
from multiworld.errors import InvalidJoinError

if TYPE_CHECKING:
    import datetime as dt
    from collections.abc import Callable

    import torch
    from torch._C._distributed_c10d import Store

__all__ = ["LAST_CALL", "JoinPlan", "Size", "StateLike", "Stateful", "is_same_state", "make_plan"]

LAST_CALL = 30.0
"""Seconds; the ``last_call_timeout`` of torch elastic's rendezvous, by default."""


class Stateful(Protocol):
    """What has a state, as `torch.distributed.checkpoint.stateful.Stateful`: a module, an optimizer, ..."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state: nested dicts, lists and tuples of tensors, numbers, texts and bytes."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:
        """Take a state over."""


StateLike = Stateful | Mapping[str, Stateful]
"""A world's state: one object that has it, or several by names that are the same on all members."""

Size = int | str | tuple[int, int]
"""A world's size: a number of members, or a range as "MIN:MAX" or (MIN, MAX)."""


@dataclass(frozen=True)
class JoinPlan:
    """A join's arguments, checked and complete; what a rejoin repeats.

    Attributes:
        name, store, backend: as given.
        rank: as given; -1 where it is assigned.
        world_size: as given; the largest, where ranks are assigned.
        timeout: seconds, for the join and for each operation.
        hang_timeout: seconds of silence after which a member is hung.
        device: as given; None lets the backend decide.
        gpu: index of the GPU that was current where the join was asked for; None without NCCL, or without a
            GPU.
        served: whether a process that is not a member serves the store: then rank 0 never does.
        least: smallest size of a world whose ranks are assigned; 0 where members choose them.
        seat: as given; "" for one that is made for the process.
        last_call: seconds for which members that may still come are waited for once there are `least`.
        on_loss: as given.
        state: as given.
        present: where a launcher serves the store: returns its present address, "" where that is not known.
    """

    name: str
    rank: int
    world_size: int
    store: str | Store
    backend: str
    timeout: float
    hang_timeout: float
    device: torch.device | str | int | None
    gpu: int | None = None
    served: bool = False
    least: int = 0
    seat: str = ""
    last_call: float = LAST_CALL
    on_loss: str = "break"
    state: StateLike | None = None
    present: Callable[[], str] | None = None

    @property
    def meets_at(self) -> str | Store:
        """The store where members meet now: a launcher's moves when its node is lost."""
        return (self.present() if self.present is not None else "") or self.store

    @property
    def assigned(self) -> bool:
        """Whether ranks are assigned, so that the world's size may change."""
        return self.least > 0

    @property
    def who(self) -> str:
        """This process among the members, in a sentence."""
        return (
            f"rank {self.rank}" if not self.assigned else f"seat {self.seat!r}" if self.seat else "a member"
        )

    @property
    def uses_nccl(self) -> bool:
        """Whether NCCL, in one of its forms, is among its backends."""
        return "nccl" in self.backend

    def torch_device(self) -> torch.device:
        """The device of this member."""
        import torch  # only a join loads torch

        found = torch.device("cpu")
        if self.device is not None:
            found = torch.device(self.device)
        elif self.uses_nccl and "gloo" not in self.backend:
            found = torch.device("cuda")
        if found.type == "cuda" and found.index is None and self.gpu is not None:
            return torch.device("cuda", self.gpu)
        return found

    def group_device(self) -> torch.device | None:
        """The device that its process group is made for; None: its backend has none of its own."""
        return self.torch_device() if self.device is not None or self.uses_nccl else None


def make_plan(
    name: str,
    rank: int | None,
    world_size: Size,
    store: str | Store | None,
    backend: str,
    timeout: float | dt.timedelta | None,
    hang_timeout: float | dt.timedelta | None,
    device: torch.device | str | int | None,
    *,
    seat: str | None = None,
    on_loss: str = "break",
    last_call: float | dt.timedelta = LAST_CALL,
    state: StateLike | None = None,
) -> JoinPlan:
    """Check what can be checked without anybody else.

    Raises:
        InvalidJoinError: with the value, the rule and the next step.
    """
    defaults = settings.load()
    for_all = defaults.join_timeout if timeout is None else durations.seconds(timeout)
    for_signs = defaults.hang_timeout if hang_timeout is None else durations.seconds(hang_timeout)
    shown = name if isinstance(name, str) else repr(name)

    def refuse(value: str, rule: str, next_step: str) -> InvalidJoinError:
        return InvalidJoinError(shown, f"world {shown!r}: {value}", rule=rule, next_step=next_step)

    if not isinstance(name, str) or not 1 <= len(name) <= 200 or not _is_unicode(name):
        raise refuse(f"name {name!r}", "A name is Unicode text of 1 to 200 characters", "Give another name")
    sizes = _sizes(world_size)
    if sizes is None:
        raise refuse(
            f"world_size {world_size!r}",
            "It is a whole number, at least 1, or a range of them: 'MIN:MAX'",
            "Count the members",
        )
    least, most = sizes
    if rank is not None:
        if not isinstance(world_size, int):
            raise refuse(
                f"rank {rank!r} with world_size {world_size!r}",
                "Ranks are assigned where the size may change",
                "Give rank=None, and seat='...' for a name that a member keeps",
            )
        if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < most:
            raise refuse(
                f"rank {rank!r}", f"It is a whole number from 0 to {most - 1}", "Give each member its own"
            )
        if seat is not None or on_loss != "break" or last_call != LAST_CALL or state is not None:
            raise refuse(
                f"seat {seat!r}, on_loss {on_loss!r}, last_call {last_call!r} or a state with rank {rank}",
                "These belong to worlds whose ranks are assigned: with others the world keeps its members",
                "Give rank=None, and a range as in world_size='2:8'",
            )
    if seat is not None and (not isinstance(seat, str) or not 1 <= len(seat) <= 200 or not _is_unicode(seat)):
        raise refuse(f"seat {seat!r}", "It is Unicode text of 1 to 200 characters", "Give another, or none")
    if on_loss not in ("break", "shrink"):  # no set: it may be anything
        raise refuse(f"on_loss {on_loss!r}", "It is 'break' or 'shrink'", "Give one of them")
    if state is not None:
        _check_state(state, on_loss, defaults, refuse)
    for_last = durations.seconds(last_call)
    if for_last is None or not 0 <= for_last <= settings.MAX_TIMEOUT:
        raise refuse(
            f"last_call {last_call!r}",
            "It is a number of seconds, or a timedelta, from 0 on",
            f"Give one, as in last_call={LAST_CALL:g}",
        )
    longest = settings.MAX_TIMEOUT
    if for_all is None or not 0 < for_all <= longest:
        raise refuse(
            f"timeout {timeout!r}",
            f"It is a number of seconds, or a timedelta, above 0 and up to {longest:,.0f} s",
            "Give one, as in timeout=30",
        )
    if for_signs is None or not settings.MIN_HANG_TIMEOUT <= for_signs <= longest:
        raise refuse(
            f"hang_timeout {hang_timeout!r}",
            f"It is a number of seconds, or a timedelta, from {settings.MIN_HANG_TIMEOUT} (below it a busy machine "
            f"looks hung) to {longest:,.0f} s",
            "Give one, as in hang_timeout=5",
        )
    if store is None:
        host, port = settings.environment("MASTER_ADDR"), settings.environment("MASTER_PORT")
        if not host or not port:
            raise refuse(
                "no store, and MASTER_ADDR and MASTER_PORT are not both set",
                "Members find each other through a store",
                "Give one, as in store='tcp://10.0.0.1:29500' (rank 0's host; nothing needs to run there)",
            )
        store = f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
    if not isinstance(backend, str) or not backend:
        raise refuse(f"backend {backend!r}", "It is a name", "Give one, as in backend='gloo'")
    if device is not None:
        import torch  # a device was named, so a join follows

        try:
            torch.device(device)
        except (RuntimeError, TypeError) as exc:
            raise refuse(
                f"device {device!r}",
                f"It is a device of torch's ({str(exc).splitlines()[0]})",
                "Give one, as in device='cuda:0'",
            ) from exc
        if (why := _unreachable(torch.device(device), backend.lower())) is not None:
            raise refuse(
                f"device {device!r} with backend {backend!r}",
                why,
                "Give a device that is there, or none, which means the CPU for gloo",
            )
    backend = backend.lower()
    gpu = _current_gpu() if "nccl" in backend else None
    return JoinPlan(
        name,
        -1 if rank is None else rank,
        most,
        store,
        backend,
        for_all,
        for_signs,
        device,
        gpu,
        least=least if rank is None else 0,
        seat=seat or "",
        last_call=for_last,
        on_loss=on_loss,
        state=state,
    )


def is_same_state(one: StateLike | None, other: StateLike | None) -> bool:
    """Whether both are the same object, or the same objects by the same names."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(each is other[name] for name, each in one.items())
    return one is other


def _check_state(
    state: object,
    on_loss: str,
    chosen: settings.Settings,
    refuse: Callable[[str, str, str], InvalidJoinError],
) -> None:
    each = list(state.values()) if isinstance(state, Mapping) else [state]
    for one in each:
        if not callable(getattr(one, "state_dict", None)) or not callable(
            getattr(one, "load_state_dict", None)
        ):
            raise refuse(
                f"state {type(one).__name__}",
                "A state has state_dict() and load_state_dict(), as modules and optimizers have",
                "Give such an object, or several by name: state={'model': model, 'optimizer': optimizer}",
            )
    if on_loss != "break":
        raise refuse(
            f"a state with on_loss={on_loss!r}",
            "A state is sent while its program stands still, and not in the background",
            "Call reform where an operation raises BrokenWorldException",
        )
    if not chosen.lane:
        raise refuse(
            "a state with M8D_LANE=0",
            "It travels over the lane",
            "Unset M8D_LANE, or give the state another way",
        )


def _sizes(size: object) -> tuple[int, int] | None:
    """The smallest and the largest size; None where it is none."""
    if isinstance(size, str) and size.isascii() and len(size) < 20:
        texts = (size if ":" in size else f"{size}:{size}").split(":")
        size = tuple(int(each) for each in texts) if all(each.isdigit() for each in texts) else None
    if isinstance(size, int):
        size = (size, size)
    if not isinstance(size, tuple) or len(size) != 2:
        return None
    least, most = size
    if any(isinstance(each, bool) or not isinstance(each, int) for each in size) or not 1 <= least <= most:
        return None
    return least, most


def _unreachable(device: torch.device, backend: str) -> str | None:
    """Why a world cannot have its tensors on `device`, as far as it is known before the group is built.

    NCCL is not looked at: it says itself which GPUs it needs, and which it finds.
    """
    import torch  # a device was named

    if device.type == "meta":
        return "A meta tensor has no data that could be sent"
    if backend == "gloo" and device.type not in {"cpu", "cuda"}:
        return "Gloo reaches tensors on: cpu, cuda"
    if device.type == "cuda" and "nccl" not in backend:
        found = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= found:
            return f"This process sees {found} GPUs" + (f", 0 to {found - 1}" if found else "")
    return None


def _current_gpu() -> int | None:
    import torch  # a join follows

    # It belongs to the thread, and a join may go on in another one.
    return torch.cuda.current_device() if torch.cuda.is_available() else None


def _is_unicode(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:  # half a surrogate pair: it cannot be sent
        return False
    return True
