"""Fixtures of the patch algebra: a small series of three patches on two files, one of them new."""

from __future__ import annotations

import pytest
from kits.patchkit import TOPICS, Kit, commit_all, make_kit, small_states


@pytest.fixture
def kit(tmp_path) -> Kit:
    """A plain source folder with the small series."""
    return make_kit(tmp_path, small_states(), TOPICS)


@pytest.fixture
def git_kit(kit) -> Kit:
    """The same as a git checkout."""
    commit_all(kit.tree)
    return kit
