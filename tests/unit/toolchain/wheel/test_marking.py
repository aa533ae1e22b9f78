from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from kits.provenancekit import patched_wheel

from m8d_build.errors import OutputUnwritable

if TYPE_CHECKING:
    from pathlib import Path


def test_an_overlay_build_does_not_replace_a_full_one(tmp_path: Path) -> None:
    """Both have the same name; one takes minutes, the other one hours."""
    full = patched_wheel(tmp_path, mode="full", overlay=None).path
    before = full.read_bytes()
    with pytest.raises(OutputUnwritable, match="is a full build"):
        patched_wheel(tmp_path)
    assert full.read_bytes() == before
    assert patched_wheel(tmp_path, mode="full", overlay=None).path == full


@pytest.mark.parametrize("there", ["an overlay build", "a damaged wheel"])
def test_other_wheels_of_its_name_are_replaced(tmp_path: Path, there: str) -> None:
    made = patched_wheel(tmp_path)
    if there == "a damaged wheel":
        made.path.write_bytes(b"cut")
    assert patched_wheel(tmp_path) == made
