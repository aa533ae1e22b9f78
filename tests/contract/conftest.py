from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="the contract battery needs torch (nox -s tests installs it)")

import worldkit


@pytest.fixture(scope="session", autouse=True)
def forkserver():
    """One server per run, with torch loaded, that members are forked from."""
    worldkit.CONTEXT.set_forkserver_preload(["torch", "torch.distributed", "worldkit"])


@pytest.fixture
def cast():
    with worldkit.cast() as made:
        yield made


@pytest.fixture
def soak_seconds(request) -> float:
    """How long a soak lasts: ``--soak``."""
    return request.config.getoption("--soak")
