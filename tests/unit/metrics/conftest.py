from __future__ import annotations

import pytest

pytest.importorskip("prometheus_client", reason="the numbers are of the extra m8d[metrics]")

from fakeworlds import FakeProcess


@pytest.fixture
def process(monkeypatch):
    made = FakeProcess(monkeypatch)
    yield made
    made.recorder.end()
