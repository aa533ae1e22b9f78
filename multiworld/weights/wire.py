"""Messages between the trainer and one engine, in their world of two: JSON, and buckets of bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from multiworld._c10d.lane import tensors
from multiworld._core.weights import encode, message

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from multiworld.world import World

__all__ = ["BEATS", "MOST", "receive", "receive_number", "room", "send", "send_number", "view"]

MOST = 64 << 20
"""Bytes of a message; a head has some 100 for each tensor."""

BEATS = 4
"""In each `timeout` an end hears so often that the other one has nothing to say yet."""

_READ, _WRITE = 0x100, 0x200  # PyBUF_READ, PyBUF_WRITE


def room(size: int) -> Tensor:
    """Return new bytes in the host's memory, whatever the thread's default device and mode are."""
    with torch.inference_mode(mode=False):
        return torch.empty(size, dtype=torch.uint8, device="cpu")


def view(data: Tensor, *, write: bool = False) -> memoryview:
    """The bytes of a contiguous CPU tensor."""
    return tensors.memory_view(data.data_ptr(), data.nbytes, _WRITE if write else _READ)


def send(world: World, told: Mapping[str, Any]) -> None:
    """Send a message to the other member."""
    data = torch.frombuffer(bytearray(encode(told)), dtype=torch.uint8)
    send_number(world, data.nbytes)
    world.send(data, 1 - world.rank)


def receive(world: World) -> dict[str, Any]:
    """Receive a message of the other member.

    Raises:
        ValueError: it is none.
    """
    size = receive_number(world)
    if not 0 < size <= MOST:
        raise ValueError(f"a message of {size:,} bytes; there are from 1 to {MOST:,}")
    data = room(size)
    world.recv(data, 1 - world.rank)
    return message(bytes(view(data)))


def send_number(world: World, number: int) -> None:
    """Send a number to the other member."""
    world.send(torch.tensor([number], device="cpu"), 1 - world.rank)


def receive_number(world: World) -> int:
    """Receive a number of the other member."""
    number = torch.zeros(1, dtype=torch.int64, device="cpu")
    world.recv(number, 1 - world.rank)
    return int(number)
