"""What members compare of a call before it begins (M8D_CHECK=1)."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from multiworld._c10d.lane.comparing import described  # noqa: E402  (torch may be missing)


def test_sparse_tensors_of_one_shape_are_alike():
    """A reduction adds them whatever elements they have."""
    said = {described("allreduce", ([each.to_sparse()],), {}) for each in (torch.eye(2), torch.zeros(2, 2))}
    assert said == {"all_reduce of 16 bytes of float32"}
