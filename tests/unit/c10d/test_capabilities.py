"""What is set and said before the first NCCL world. Torch itself is asked in tests/contract."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import pytest

from multiworld._c10d import capabilities
from multiworld._core.nccl_policy import VARIABLES, Implementation, Mode, NcclFacts
from multiworld.errors import MultiworldError, PatchRequiredError, ShimError

STOCK = NcclFacts("nccl", Implementation.LEGACY, remote_error=True)
PATCHED = replace(STOCK, patched=True, topics=("group-guard", "cleanup-only", "abort-offload"))
HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


@pytest.fixture
def facts(monkeypatch):
    """An environment without any of the variables, a process that has said nothing, and a build to be chosen."""
    before = dict(os.environ)
    for name in (*VARIABLES, "M8D_SHIM", "M8D_REQUIRE_PATCH"):
        os.environ.pop(name, None)
    monkeypatch.setattr(capabilities._Prepared, "ours", {})
    monkeypatch.setattr(capabilities._Prepared, "_said", set())
    found = {"nccl": STOCK}
    monkeypatch.setattr(
        capabilities, "nccl_facts", lambda backend="nccl": replace(found["nccl"], backend=backend)
    )
    yield found
    os.environ.clear()
    os.environ.update(before)


def test_the_guards_are_set_and_the_defects_named_once(facts):
    with pytest.warns(RuntimeWarning, match="not patched") as said:
        decision = capabilities.prepare_nccl("w")
    assert len(said) == 1
    assert said[0].filename == __file__
    assert decision.mode is Mode.GUARDED
    assert os.environ[HANDLING] == "0"
    assert os.environ["TORCH_NCCL_ENABLE_MONITORING"] == "0"
    again = capabilities.prepare_nccl("w2")
    assert again == decision, "what was set here is no choice of the user's"


def test_what_the_user_has_set_stays(facts):
    os.environ["TORCH_NCCL_ENABLE_MONITORING"] = "1"
    with pytest.warns(RuntimeWarning, match="TORCH_NCCL_ENABLE_MONITORING=1 is set"):
        capabilities.prepare_nccl("w")
    assert os.environ["TORCH_NCCL_ENABLE_MONITORING"] == "1"


def test_a_patched_build_gets_its_mode_and_no_warning(facts):
    facts["nccl"] = PATCHED
    assert capabilities.prepare_nccl("w").mode is Mode.ON
    assert {name for name in VARIABLES if name in os.environ} == {HANDLING, "TORCH_NCCL_DUMP_ON_TIMEOUT"}


def test_off_does_nothing(facts, monkeypatch):
    monkeypatch.setenv("M8D_SHIM", "off")
    monkeypatch.setenv("M8D_REQUIRE_PATCH", "1")
    assert capabilities.prepare_nccl("w").mode is Mode.OFF
    assert not set(VARIABLES) & set(os.environ)


def test_a_patch_that_is_asked_for_and_not_there_is_an_error_that_says_how_to_get_one(facts, monkeypatch):
    monkeypatch.setenv("M8D_REQUIRE_PATCH", "1")
    with pytest.raises(PatchRequiredError, match="nox -s build-torch") as caught:
        capabilities.prepare_nccl("hub")
    assert "'hub'" in str(caught.value)
    assert "M8D_REQUIRE_PATCH=1" in str(caught.value)
    assert not set(VARIABLES) & set(os.environ)
    facts["nccl"] = PATCHED
    assert capabilities.prepare_nccl("hub").mode is Mode.ON


def test_on_is_not_content_with_nothing(facts, monkeypatch):
    facts["nccl"] = replace(STOCK, implementation=Implementation.NONE)
    assert capabilities.prepare_nccl("w").mode is Mode.OFF
    monkeypatch.setenv("M8D_SHIM", "on")
    with pytest.raises(ShimError, match="no backend 'nccl'"):
        capabilities.prepare_nccl("w")
    monkeypatch.setenv("M8D_SHIM", "perhaps")
    with pytest.raises(MultiworldError, match="auto, on, off"):
        capabilities.prepare_nccl("w")


@pytest.mark.parametrize(
    ("backend", "part"),
    [
        ("nccl", "nccl"), ("NCCL2", "nccl2"), ("cpu:gloo,cuda:nccl", "nccl"), ("cuda:nccl-legacy", "nccl-legacy"),
        ("gloo", None), ("cpu:gloo", None), ("my_nccl", None), ("", None),
    ],
)  # fmt: skip
def test_only_torchs_own_nccl_is_prepared(facts, backend, part):
    assert capabilities.nccl_name(backend) == part
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        decision = capabilities.prepare_nccl("w", backend)
    assert (decision.mode is Mode.OFF) == (part is None)
    assert bool(said) == (part is not None)
    assert (HANDLING in os.environ) == (part is not None)


def test_nothing_of_this_loads_torch():
    code = (
        "import sys, multiworld.shim, multiworld.shim.report, multiworld._c10d.capabilities as c\n"
        "assert c.prepare_nccl('w', 'gloo').mode == 'off'\n"
        "assert 'torch' not in sys.modules\n"
    )
    root = Path(__file__).parents[3]
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, cwd=root)
