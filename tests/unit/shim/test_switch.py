"""What importing ``torch.distributed.multiworld`` does to torch's namespace; torch is a stand-in."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from multiworld.shim import switch


@pytest.fixture
def attached(monkeypatch):
    """Attaches to a torch.distributed of that much; returns whether it has a WorldManager then."""
    dist = SimpleNamespace()
    monkeypatch.setattr(switch, "_distributed", lambda: dist)
    monkeypatch.setattr(switch, "_manager", lambda: object)

    def attach():
        switch.attach()
        return hasattr(dist, "WorldManager")

    return attach


@pytest.mark.parametrize(
    ("value", "there"), [(None, True), ("auto", True), (" OFF ", False), ("", True), ("maybe", True)]
)
def test_off_leaves_it_alone(monkeypatch, attached, value, there):
    monkeypatch.delenv("M8D_SHIM", raising=False)
    if value is not None:
        monkeypatch.setenv("M8D_SHIM", value)
    assert attached() is there


def test_another_setting_that_is_wrong_does_not_keep_a_program_from_importing(monkeypatch, attached):
    monkeypatch.delenv("M8D_SHIM", raising=False)
    monkeypatch.setenv("M8D_HANG_TIMEOUT", "soon")
    assert attached()
