"""Images to classify: generated, or the files of a folder (which needs Pillow)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["SIDE", "batch", "files"]

SIDE = 64
"""Height and width of an image, in pixels."""

KINDS = {".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm"}


def files(folder: str) -> list[Path]:
    """The images in `folder`, in the order of their names; none for an empty name."""
    found = sorted(path for path in Path(folder).iterdir() if path.suffix.lower() in KINDS) if folder else []
    if folder and not found:
        raise SystemExit(
            f"no image in {folder!r}. It is a folder with files ending in {', '.join(sorted(KINDS))}."
        )
    return found


def batch(numbers: Sequence[int], paths: Sequence[Path] = ()) -> Tensor:
    """The images with these numbers, of shape (n, 3, SIDE, SIDE), float32 between -1 and 1."""
    return torch.stack([_read(paths[n % len(paths)]) if paths else _generated(n) for n in numbers])


def _generated(number: int) -> Tensor:
    """Stripes whose direction, width and colour come from the image's number, and some noise."""
    source = torch.Generator().manual_seed(number)
    angle, width = (torch.rand(2, generator=source) * torch.tensor([math.pi, 0.5])).tolist()
    steps = torch.arange(SIDE, dtype=torch.float32)
    along = steps[:, None] * math.cos(angle) + steps[None, :] * math.sin(angle)
    stripes = torch.sin(along * (0.1 + width))
    colour = torch.rand(3, 1, 1, generator=source)
    noise = torch.rand(3, SIDE, SIDE, generator=source) - 0.5
    return (stripes * colour + 0.2 * noise).clamp(-1, 1)


def _read(path: Path) -> Tensor:
    try:
        from PIL import Image  # noqa: PLC0415  (only this needs Pillow)
    except ImportError:
        raise SystemExit(
            "reading image files needs Pillow: pip install pillow (or leave --folder out)"
        ) from None
    with Image.open(path) as image:
        pixels = bytearray(image.convert("RGB").resize((SIDE, SIDE)).tobytes())
    return torch.frombuffer(pixels, dtype=torch.uint8).view(SIDE, SIDE, 3).permute(2, 0, 1) / 127.5 - 1
