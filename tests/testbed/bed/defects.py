"""What a version of torch itself gets wrong on the test bed, and must: a defect that does not show was not looked for."""

from __future__ import annotations

import re

__all__ = ["PREMUL", "premul_of_bfloat16"]

PREMUL = "pytorch #190745"
"""torch gives NCCL the factor of a bfloat16 ``PREMUL_SUM`` as a float32, of which NCCL reads the lower half."""

_PREMUL_BEFORE = (2, 14)
"""Seen on the bed in 2.12.1, on an H100 in 2.11.0; not in 2.14.1 (pytorch #190747). 2.6 refuses such a factor."""


def premul_of_bfloat16(torch: str) -> bool:
    """Whether a torch ("2.12.1+cu130") that takes a bfloat16 factor multiplies by 0 with it."""
    found = re.match(r"(\d+)\.(\d+)", torch)
    return found is not None and (int(found[1]), int(found[2])) < _PREMUL_BEFORE
