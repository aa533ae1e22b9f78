"""What the value programs are made of: inputs every rank can compute for every other, and a record of what was wrong."""

from __future__ import annotations

import ctypes
import traceback
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from bed.defects import PREMUL

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from bed.rank import Rank

__all__ = ["FLOAT8", "FLOATS", "NUMBERS", "Checks", "short"]

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
NUMBERS = (*FLOATS, torch.int8, torch.uint8, torch.int32, torch.int64)
FLOAT8 = tuple(
    getattr(torch, name)
    for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
    if hasattr(torch, name)
)
UNKNOWN_DTYPE = ("Unconvertible NCCL type", "PreMulSum Data type must be")
PREMUL_OF_BFLOAT16 = "bfloat16 premul"
"""torch gives NCCL the factor as a float32, of which NCCL reads the lower half: 0 for a power of two."""
N = 7  # elements: not a multiple of anything
_SHOWN = 700  # characters of a failure
_DEEPEST = 8  # NCCL groups inside each other


def short(dtype: torch.dtype) -> str:
    """Return "float32" for torch.float32."""
    return str(dtype).removeprefix("torch.")


class Checks:
    """Checks in one group; a rank's inputs are known to all its ranks.

    Args:
        me: the rank.
        group: None for the default group.
    """

    def __init__(self, me: Rank, group: Any = None) -> None:
        self.me = me
        self.group = group
        self.device = me.device
        self.ranks: list[int] = dist.get_process_group_ranks(group or dist.group.WORLD)
        self.rank: int = dist.get_rank(group)
        self.size = len(self.ranks)
        self.done: list[str] = []
        self.failed: dict[str, str] = {}
        self.refused: dict[str, int] = {}
        self.defects: dict[str, str] = {}
        self._name = ""

    def run(self, name: str, check: Callable[..., None], *args: Any) -> None:
        """Do a check; what it raises is kept, and the next one goes on.

        A dtype this torch does not know is no failure, but is told as well, with how many NCCL groups torch left
        open on this thread. Those are closed: with them every operation that follows would do nothing.
        """
        self._name = name
        try:
            check(self, *args)
        except Exception as exc:  # noqa: BLE001 -- told at the end, all of them
            if any(text in str(exc) for text in UNKNOWN_DTYPE):
                self.refused[name] = self.me.bed.abandon_group() if self.me.bed else close_groups()
            else:
                self.failed[name] = traceback.format_exc()[-_SHOWN:]
        self.done.append(name)

    def equal(self, got: torch.Tensor, expected: torch.Tensor, *, within: torch.Tensor | None = None) -> None:
        """Compare on the CPU. A difference is kept, not raised: the other ranks go on, so this one must.

        Args:
            got: on any device.
            expected: on the CPU, of the same shape and dtype.
            within: how far off each may be (float64); None: they are exactly equal.
        """
        got = got.cpu()
        if (got.dtype, got.shape) != (expected.dtype, expected.shape):
            self.failed[self._name] = f"{got} instead of {expected}"
            return
        one_byte = got.dtype.itemsize == 1  # eight bits of float cannot be compared as such
        bits = (got.view(torch.uint8), expected.view(torch.uint8)) if one_byte else (got, expected)
        if within is not None:
            right = bool(((got.to(torch.float64) - expected.to(torch.float64)).abs() <= within).all())
        else:
            right = torch.equal(*bits)
        if right:
            return
        if PREMUL_OF_BFLOAT16 in self._name and not got.any():
            self.defects[self._name] = PREMUL
        else:
            shown = [each.to(torch.float64).flatten()[:16].tolist() for each in (got, expected)]
            self.failed[self._name] = "{} instead of {}".format(*shown)

    def refuses(self, name: str, call: Callable[[], Any]) -> None:
        """Check that torch refuses a call, on every rank alike."""
        try:
            call()
        except (RuntimeError, ValueError, TypeError):
            pass
        else:
            self.failed[name] = "it was taken"
        self.done.append(name)

    def given(
        self, rank: int, dtype: torch.dtype = torch.float32, n: int = N, *, salt: int = 0
    ) -> torch.Tensor:
        """Return a rank's input, on the CPU: of -3 to 3 (1 to 3, or a pattern of booleans), never 0."""
        places = torch.arange(n, dtype=torch.int64)
        if dtype == torch.bool:
            return (places + rank + salt) % 3 == 0
        wrong = int(
            self.me.config.get("spoil") == rank == self.rank
        )  # a test of the checks: a rank that lies
        values = (places * (rank + 2) + rank * 5 + salt + wrong) % 3 + 1
        if dtype.is_signed:
            values *= 1 - 2 * ((places + rank) % 2)
        return values.to(torch.float32).to(dtype)

    def mine(self, dtype: torch.dtype = torch.float32, n: int = N, *, salt: int = 0) -> torch.Tensor:
        """Return this rank's input, on its device."""
        return self.there(self.given(self.rank, dtype, n, salt=salt))

    def all_given(
        self, dtype: torch.dtype = torch.float32, n: int = N, *, salt: int = 0
    ) -> list[torch.Tensor]:
        """Return everybody's inputs, on the CPU."""
        return [self.given(rank, dtype, n, salt=salt) for rank in range(self.size)]

    def there(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a tensor to the device."""
        return tensor.to(self.device)

    def room(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return an output: ones made on the CPU, so that what nobody wrote is seen."""
        return self.there(torch.ones(shape, dtype=torch.float32).mul(9).to(dtype))

    def tell(self) -> None:
        """Tell the test what was done and what was wrong."""
        self.me.event(
            "checked", done=self.done, failed=self.failed, refused=self.refused, defects=self.defects
        )


def close_groups() -> int:
    """Close the NCCL groups this thread left open, without the double; return how many there were.

    Nothing is queued in them: a type is refused before the call into NCCL.
    """
    everybody = ctypes.CDLL(None)
    nccl = everybody if hasattr(everybody, "ncclGroupEnd") else ctypes.CDLL("libnccl.so.2")
    for depth in range(_DEEPEST):
        if nccl.ncclGroupEnd() != 0:  # none is open
            return depth
    return _DEEPEST


def add_up(parts: Sequence[Checks]) -> Checks:
    """Return the first of several, with the results of all."""
    first, *others = parts
    for other in others:
        first.done += other.done
        first.failed |= other.failed
        first.refused |= other.refused
    return first
