"""Which builds have torch's own defects, as the test bed expects them."""

from __future__ import annotations

import pytest
from bed.defects import premul_of_bfloat16


@pytest.mark.parametrize(
    ("torch", "has"),
    [
        ("2.11.0+cu130", True),
        ("2.12.1+cu130.m8d1", True),
        ("2.13.0", True),
        ("2.14.1", False),
        ("2.15.0", False),
    ],
)
def test_premultiplied_sums_of_bfloat16(torch, has):
    assert premul_of_bfloat16(torch) is has
