"""Operations that are timed: their tensors, arguments and expected results."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["Operation"]

ROOT = 0
"""The rank that everything is sent from, or to, in the operations that have one."""


class Operation:
    """One operation with its tensors; every form uses the same ones, so that they lie in the same pages.

    A part is what one member has for one other: `size` bytes of float32. `whole` are the parts of all, in one
    tensor; `parts` the same as a list.

    Args:
        name: torch.distributed's; "send_recv" for a message to and fro between ranks 0 and 1.
        size: bytes of a part, a multiple of 4.
        rank: of this process.
        count: of members.
    """

    def __init__(self, name: str, size: int, rank: int, count: int) -> None:
        self.name = name
        self._rank, self._count = rank, count
        self._n = size // 4
        tensors = self._tensors()
        self.part: torch.Tensor = tensors["part"]
        self.spare: torch.Tensor = tensors["spare"]
        self._other: dict[str, Any] = tensors
        self.arguments: tuple[Any, ...] = self._arguments()

    def fill(self, value: float) -> None:
        """Give every tensor this value: pages that were never written would all be the same zero page."""
        for each in self._other.values():
            for tensor in each if isinstance(each, list) else [each]:
                tensor.fill_(value)

    def begin_check(self) -> None:
        """Put in what `end_check` knows the outcome of."""
        self.fill(-1.0)
        self.part.fill_(self._rank + 1.0)
        for name in ("inputs", "whole_input"):
            given = self._other.get(name)
            if isinstance(given, list):
                for other, tensor in enumerate(given):
                    tensor.fill_(10.0 * self._rank + other)
            elif given is not None:
                for other, tensor in enumerate(given.chunk(self._count)):
                    tensor.fill_(10.0 * self._rank + other)

    def end_check(self) -> None:
        """Compare with what must have come out.

        Raises:
            AssertionError: something else has.
        """
        for tensor, value in self._expected():
            if not bool((tensor == value).all()):
                raise AssertionError(
                    f"{self.name} left {tensor.flatten()[:4].tolist()}... in rank {self._rank}, not {value}"
                )

    def _tensors(self) -> dict[str, Any]:
        def one(parts: int = 1) -> torch.Tensor:
            return torch.empty(self._n * parts).fill_(0.0)

        found: dict[str, Any] = {"part": one(), "spare": one()}
        if self.name in {"all_gather", "gather", "all_to_all"}:
            found["outputs"] = [one() for _ in range(self._count)]
        if self.name in {"scatter", "reduce_scatter", "all_to_all"}:
            found["inputs"] = [one() for _ in range(self._count)]
        if self.name in {"all_gather_into_tensor", "all_to_all_single"}:
            found["whole_output"] = one(self._count)
        if self.name in {"reduce_scatter_tensor", "all_to_all_single"}:
            found["whole_input"] = one(self._count)
        return found

    def _arguments(self) -> tuple[Any, ...]:
        """In torch.distributed's order; the same for a world's methods and for `World.aio`."""
        part, at_root = self.part, self._rank == ROOT
        outputs, inputs = self._other.get("outputs"), self._other.get("inputs")
        whole_output, whole_input = self._other.get("whole_output"), self._other.get("whole_input")
        found: dict[str, tuple[Any, ...]] = {
            "send_recv": (part,),
            "broadcast": (part, ROOT),
            "all_reduce": (part,),
            "reduce": (part, ROOT),
            "all_gather": (outputs, part),
            "all_gather_into_tensor": (whole_output, part),
            "gather": (part, outputs if at_root else None, ROOT),
            "scatter": (part, inputs if at_root else None, ROOT),
            "reduce_scatter": (part, inputs),
            "reduce_scatter_tensor": (part, whole_input),
            "all_to_all": (outputs, inputs),
            "all_to_all_single": (whole_output, whole_input),
            "barrier": (),
        }
        return found[self.name]

    def _expected(self) -> list[tuple[torch.Tensor, float]]:
        rank, ranks, part, given = self._rank, range(self._count), self.part, self._other
        everyone = float(sum(other + 1 for other in ranks))
        for_me = float(sum(10 * other + rank for other in ranks))
        match self.name:
            case "send_recv":
                # It went from 0 to 1 and came back.
                return [(part, 1.0)] if rank < 2 else []
            case "broadcast":
                return [(part, ROOT + 1.0)]
            case "all_reduce":
                return [(part, everyone)]
            case "reduce":
                return [(part, everyone)] if rank == ROOT else []
            case "all_gather":
                return [(given["outputs"][other], other + 1.0) for other in ranks]
            case "gather":
                return [(given["outputs"][other], other + 1.0) for other in ranks] if rank == ROOT else []
            case "all_gather_into_tensor":
                return [
                    (each, other + 1.0) for other, each in enumerate(given["whole_output"].chunk(self._count))
                ]
            case "scatter":
                return [(part, 10.0 * ROOT + rank)]
            case "reduce_scatter" | "reduce_scatter_tensor":
                return [(part, for_me)]
            case "all_to_all":
                return [(given["outputs"][other], 10.0 * other + rank) for other in ranks]
            case "all_to_all_single":
                parts = given["whole_output"].chunk(self._count)
                return [(each, 10.0 * other + rank) for other, each in enumerate(parts)]
            case _:  # barrier: nothing comes out
                return []
