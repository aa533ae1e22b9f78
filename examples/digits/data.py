"""1797 handwritten digits of 8 x 8 pixels, as scikit-learn ships them (UCI, "Optical Recognition of ... Digits").

Only the file is read: `pip install --no-deps scikit-learn` is enough.
"""

from __future__ import annotations

import gzip
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

__all__ = ["digits"]

FOR_TEST = 360
"""The last ones."""


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Return the digits to learn from, and those to test with: pixels from 0 to 1, float64, and what they are."""
    found = find_spec("sklearn")
    if found is None or found.origin is None:
        raise SystemExit("This example needs a file of scikit-learn: pip install --no-deps scikit-learn")
    with gzip.open(Path(found.origin).parent / "datasets" / "data" / "digits.csv.gz", "rt") as lines:
        rows = torch.tensor(
            [[float(each) for each in line.split(",")] for line in lines], dtype=torch.float64
        )
    pixels, labels = rows[:, :-1] / 16, rows[:, -1].long()
    return _pairs(pixels[:-FOR_TEST], labels[:-FOR_TEST]), _pairs(pixels[-FOR_TEST:], labels[-FOR_TEST:])


def _pairs(pixels: Tensor, labels: Tensor) -> TensorDataset:
    return TensorDataset(pixels, labels)
