"""Which collectives of a group with many members go over the lane."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from multiworld._c10d.lane.collective_dispatch import LIMITS, GroupCollectives
from multiworld._core.operations.log import OperationLog

SMALL = torch.zeros(LIMITS.whole // 4)
LARGE = torch.zeros(LIMITS.whole // 4 + 1)


def group(size, *, crowds):
    """Rank 0's, of members that are never asked."""
    nowhere, log = cast("Any", None), OperationLog(0, size)
    return GroupCollectives(
        nowhere, 0, range(size), 0, 1.0, carried=True, near=True, alone=True, log=log, crowds=crowds
    )


@pytest.mark.parametrize(("size", "crowds", "small", "large"), [
    (LIMITS.members, True, True, True),
    (LIMITS.members, False, True, True),  # as in every version that has collectives
    (LIMITS.members + 1, True, True, False),
    (LIMITS.members + 1, False, False, False),  # a member of an older version would use gloo
])  # fmt: skip
def test_small_ones_if_all_members_do_so(size, crowds, small, large):
    of = group(size, crowds=crowds)
    assert (of.barrier() is not None) == small
    for op in (of.all_reduce, lambda tensor: of.broadcast(tensor, 0), lambda tensor: of.reduce(tensor, 0)):
        assert (op(SMALL) is not None) == small
        assert (op(LARGE) is not None) == large
    each = [torch.zeros(1) for _ in range(size)]
    assert (of.all_to_all(each, each) is not None) == large
