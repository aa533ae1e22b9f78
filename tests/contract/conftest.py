from __future__ import annotations

import os
import random

import pytest

pytest.importorskip("torch", reason="the contract battery needs torch (nox -s tests installs it)")

from kits import forkedkit
from kits.contract import statekit, worldkit

from multiworld._core import state_pieces


@pytest.fixture(scope="session", autouse=True)
def forkserver():
    """One server per run, with what members load already loaded, that they are forked from; one for launchers."""
    worldkit.CONTEXT.set_forkserver_preload(worldkit.preloaded())
    yield
    forkedkit.stop()


@pytest.fixture
def cast():
    with worldkit.cast() as made:
        yield made


@pytest.fixture
def soak_seconds(request) -> float:
    """How long a soak lasts: ``--soak``."""
    return request.config.getoption("--soak")


@pytest.fixture
def seed(request) -> int:
    """``--seed``, or in CI the same each time, or a new one."""
    given = request.config.getoption("--seed")
    return given if given is not None else 1 if "CI" in os.environ else random.getrandbits(32)


# -- states over lanes of this process ------------------------------------------------------------------------


@pytest.fixture
def lanes():
    made = statekit.Lanes()
    yield made
    made.close()


@pytest.fixture
def pair(lanes):
    """Two connected ends."""
    return lanes.connect(2)


@pytest.fixture
def small(monkeypatch):
    """States travel in many parts."""
    monkeypatch.setattr(state_pieces, "CHUNK", statekit.SMALL)
