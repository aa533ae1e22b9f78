from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multiworld._core.nccl_policy import (
    ENDED_BY,
    NO_HANDLING,
    VARIABLES,
    Implementation,
    Mode,
    NcclFacts,
    decide,
)

ALL = ("remote-error", "group-guard", "cleanup-only", "world-scope", "abort-offload", "marker")
STOCK = NcclFacts("nccl", Implementation.LEGACY, remote_error=True)
PATCHED = replace(STOCK, patched=True, topics=("group-guard", "cleanup-only", "abort-offload", "marker"))
NCCL2 = NcclFacts("nccl", Implementation.NCCL2, remote_error=True)
HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
EVENTS = "TORCH_NCCL_CUDA_EVENT_CACHE"
MONITORS = {
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "TORCH_NCCL_BLOCKING_WAIT": "0",
}
WAIT = {"TORCH_NCCL_BLOCKING_WAIT": "0"}
GUARDS = {HANDLING: "0", **MONITORS}
NONE = {HANDLING: "0", **WAIT}
PATCHED_GUARDS = {HANDLING: "2", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}


def ids(decision):
    return [defect.id for defect in decision.remaining]


@pytest.mark.parametrize(
    ("facts", "environ", "shim", "mode", "environment", "remaining"),
    [
        (STOCK, {}, "auto", Mode.GUARDED, GUARDS, ["D5", "D6", "D8"]),
        (STOCK, {}, "on", Mode.GUARDED, GUARDS, ["D5", "D6", "D8"]),
        (STOCK, {}, "off", Mode.OFF, {}, []),
        (STOCK, {"TORCH_DISTRIBUTED_DEBUG": "detail"}, "auto", Mode.GUARDED, {HANDLING: "2", **MONITORS}, ["D1", "D5", "D6", "D8"]),
        (STOCK, {"TORCH_NCCL_DESYNC_DEBUG": "1"}, "auto", Mode.GUARDED, {HANDLING: "2", **MONITORS}, ["D1", "D5", "D6", "D8"]),
        (STOCK, {"TORCH_NCCL_DESYNC_DEBUG": "0"}, "auto", Mode.GUARDED, GUARDS, ["D5", "D6", "D8"]),
        (STOCK, {"NCCL_DESYNC_DEBUG": "1"}, "auto", Mode.GUARDED, {HANDLING: "2", **MONITORS}, ["D1", "D5", "D6", "D8"]),
        (STOCK, {"NCCL_DESYNC_DEBUG": "1", "TORCH_NCCL_DESYNC_DEBUG": "0"}, "auto", Mode.GUARDED, GUARDS, ["D5", "D6", "D8"]),
        (replace(STOCK, detail=True), {}, "auto", Mode.GUARDED, {HANDLING: "2", **MONITORS}, ["D1", "D5", "D6", "D8"]),
        (replace(STOCK, thread_events=True), {}, "auto", Mode.GUARDED, {**GUARDS, EVENTS: "0"}, ["D5", "D6", "D8"]),
        (replace(STOCK, remote_error=False), {}, "auto", Mode.GUARDED, GUARDS, ["D0", "D5", "D6", "D8"]),
        (replace(STOCK, remote_error=None), {}, "auto", Mode.GUARDED, GUARDS, ["D5", "D6", "D8"]),
        (PATCHED, {}, "auto", Mode.ON, PATCHED_GUARDS, ["D7"]),
        (replace(PATCHED, topics=("group-guard", "cleanup-only", "marker")), {}, "auto", Mode.GUARDED, GUARDS, ["D5", "D6", "D8"]),
        (replace(PATCHED, thread_events=True), {}, "auto", Mode.ON, {**PATCHED_GUARDS, EVENTS: "0"}, ["D7"]),
        (replace(PATCHED, thread_events=True, topics=(*ALL, "event-cache")), {}, "auto", Mode.ON, PATCHED_GUARDS, []),
        (replace(PATCHED, topics=ALL), {}, "auto", Mode.ON, PATCHED_GUARDS, []),
        (replace(PATCHED, topics=("marker", "group-guard")), {}, "auto", Mode.GUARDED, GUARDS, ["D5", "D6", "D8"]),
        (replace(PATCHED, topics=("marker",)), {}, "auto", Mode.GUARDED, GUARDS, ["D5", "D6", "D8"]),
        (replace(PATCHED, disagreements=("no.",)), {}, "auto", Mode.GUARDED, GUARDS, ["D5", "D6", "D8"]),
        (replace(PATCHED, implementation=Implementation.NCCL2), {}, "auto", Mode.GUARDED, {HANDLING: "2", **WAIT}, ["N1", "N3"]),
        (NCCL2, {}, "auto", Mode.GUARDED, NONE, ["N3"]),
        (NCCL2, {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}, "auto", Mode.GUARDED, NONE, ["N3"]),
        (NCCL2, {"TORCH_NCCL_DESYNC_DEBUG": "1"}, "auto", Mode.GUARDED, NONE, ["N3"]),
        (replace(NCCL2, detail=True), {}, "auto", Mode.GUARDED, NONE, ["N3"]),
        (NCCL2, {HANDLING: "2"}, "auto", Mode.GUARDED, WAIT, ["N1", "N3"]),
        (replace(STOCK, distributed=False), {}, "on", Mode.OFF, {}, []),
        (replace(STOCK, implementation=Implementation.NONE), {}, "on", Mode.OFF, {}, []),
        (replace(STOCK, implementation=Implementation.OTHER), {}, "auto", Mode.OFF, {}, []),
    ],
)  # fmt: skip
def test_the_table(facts, environ, shim, mode, environment, remaining):
    decision = decide(facts, environ, shim=shim)
    assert (decision.mode, dict(decision.environment), ids(decision)) == (mode, environment, remaining)
    assert decision.reason
    assert bool(decision.warning()) == (mode is Mode.GUARDED)


@pytest.mark.parametrize(
    ("environ", "wanted", "remaining"),
    [
        ({HANDLING: "3"}, NO_HANDLING, ["D1"]),
        ({HANDLING: "2"}, NO_HANDLING, ["D1"]),
        ({"NCCL_ASYNC_ERROR_HANDLING": "1"}, NO_HANDLING, ["D1"]),
        ({"TORCH_NCCL_ENABLE_MONITORING": "1"}, "0", ["D3", "D4"]),
        ({"TORCH_NCCL_DUMP_ON_TIMEOUT": "true"}, "0", ["D2", "D7"]),
        ({"TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "60000"}, "1", ["D2"]),
        ({"TORCH_NCCL_RETHROW_CUDA_ERRORS": "1"}, "0", []),
        ({"TORCH_NCCL_BLOCKING_WAIT": "1"}, "0", []),
        ({"NCCL_BLOCKING_WAIT": "true"}, "0", []),
    ],
)
def test_what_the_user_has_set_stays_and_is_told(environ, wanted, remaining):
    decision = decide(STOCK, environ)
    (override,) = decision.overrides
    assert (override.name, override.value, override.wanted) == (*next(iter(environ.items())), wanted)
    assert not {override.name, next(iter(environ))} & dict(decision.environment).keys()
    assert sorted(ids(decision)) == sorted(["D5", "D6", "D8", *remaining])
    assert decision.survives is not ("ASYNC_ERROR" in override.name and override.value in {"1", "3"})
    assert f"{override.name}={override.value} is set" in decision.warning()


@pytest.mark.parametrize(
    ("facts", "older", "name", "survives", "torch_aborts"),
    [
        (STOCK, "0", "1", False, True),
        (STOCK, "0", "2", True, True),
        (STOCK, "1", "0", True, False),
        (PATCHED, "2", "1", False, True),
    ],
)
def test_torch_takes_the_newer_name_of_its_error_handling(facts, older, name, survives, torch_aborts):
    decision = decide(facts, {"NCCL_ASYNC_ERROR_HANDLING": older, HANDLING: name})
    assert (decision.survives, decision.torch_aborts) == (survives, torch_aborts)
    assert decision.mode is Mode.GUARDED
    assert [each.name for each in decision.overrides] == [HANDLING] * (name != "0")
    assert HANDLING not in dict(decision.environment)


def test_the_next_step_names_the_variable_that_is_set():
    assert decide(STOCK, {"NCCL_ASYNC_ERROR_HANDLING": "1"}).next_step.startswith("Unset NCCL_ASYNC_ERROR")


RECORDER = {"TORCH_FR_DUMP_ON_TIMEOUT": "0", "TORCH_FR_WAIT_TIMEOUT_DUMP_MILSEC": "1"}


def test_names_that_the_build_does_not_know_do_nothing():
    assert dict(decide(STOCK, RECORDER).environment) == GUARDS
    known = decide(replace(STOCK, recorder_names=True), RECORDER)
    assert GUARDS.keys() - dict(known.environment).keys() == {
        "TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"
    }  # fmt: skip
    assert ids(known) == ["D5", "D6", "D8"]


def test_the_recorders_newer_name_wins_where_the_build_knows_it():
    environ = {"TORCH_FR_DUMP_ON_TIMEOUT": "1", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}
    assert decide(STOCK, environ).overrides == ()
    decision = decide(replace(STOCK, recorder_names=True), environ)
    (override,) = decision.overrides
    assert (override.name, override.value) == ("TORCH_FR_DUMP_ON_TIMEOUT", "1")
    assert ids(decision) == ["D2", "D5", "D6", "D7", "D8"]


@pytest.mark.parametrize("name", ["TORCH_NCCL_ENABLE_MONITORING", "TORCH_NCCL_DUMP_ON_TIMEOUT"])
@pytest.mark.parametrize("value", ["0", "false", "N"])
def test_the_guards_own_values_are_no_override_in_any_spelling(name, value):
    decision = decide(STOCK, {name: value, HANDLING: " 0 "})
    assert decision.overrides == ()
    assert not {name, HANDLING} & dict(decision.environment).keys()


def test_a_patched_build_acts_only_under_clean_up_only():
    decision = decide(PATCHED, {HANDLING: "3"})
    assert decision.mode is Mode.GUARDED
    assert "another error handling" in decision.reason
    assert decision.next_step == f"Unset {HANDLING}, or set it to 2"
    assert decide(PATCHED, {HANDLING: "2"}).mode is Mode.ON
    asleep = decide(PATCHED, {HANDLING: "0"})
    assert (asleep.mode, asleep.survives, asleep.fragile) == (Mode.GUARDED, True, True)
    assert not asleep.abort_returns  # before NCCL's
    whole = replace(PATCHED, topics=ALL)
    told = [decide(replace(whole, number=number), {HANDLING: "2"}).abort_returns for number in (0, 3, 4)]
    assert told == [True, False, True]
    assert "the patches act only with 2" in asleep.warning()
    assert asleep.next_step == f"Unset {HANDLING}, or set it to 2"
    assert dict(asleep.environment) == MONITORS


@pytest.mark.parametrize(
    ("facts", "environ", "fragile", "torch_aborts"),
    [
        (STOCK, {}, True, False),
        (STOCK, {HANDLING: "2"}, True, True),
        (PATCHED, {}, False, True),
        (PATCHED, {HANDLING: "0"}, True, False),
        (NCCL2, {}, False, False),
        (NCCL2, {HANDLING: "2"}, False, True),
    ],
)
def test_how_the_runtime_is_to_call_torch(facts, environ, fragile, torch_aborts):
    decision = decide(facts, environ)
    assert (decision.fragile, decision.torch_aborts) == (fragile, torch_aborts)


def test_groups_that_were_made_before_are_told_of():
    decision = decide(replace(STOCK, groups=2), {})
    assert "2 NCCL group(s)" in decision.warning()
    assert decide(replace(STOCK, groups=2), GUARDS).notes == ()


def test_the_reasons_name_what_was_found():
    assert "not patched" in decide(STOCK, {}).reason
    assert "group-guard, cleanup-only, abort-offload, marker" in decide(PATCHED, {}).reason
    assert (
        "without cleanup-only, abort-offload" in decide(replace(PATCHED, topics=("group-guard",)), {}).reason
    )
    assert "contradicts itself: no" in decide(replace(PATCHED, disagreements=("no.",)), {}).reason
    assert "Install the patched wheel again" in decide(replace(PATCHED, disagreements=("no.",)), {}).next_step
    assert "nccl2" in decide(NCCL2, {}).reason
    assert "build-torch" in decide(STOCK, {}).warning()
    assert str(Mode.ON) == "on"
    assert str(Implementation.NCCL2) == "nccl2"


facts = st.builds(
    NcclFacts,
    backend=st.just("nccl"),
    implementation=st.sampled_from(Implementation),
    distributed=st.booleans(),
    remote_error=st.sampled_from([None, False, True]),
    patched=st.booleans(),
    topics=st.lists(st.sampled_from(ALL), unique=True).map(tuple),
    disagreements=st.sampled_from([(), ("x",)]),
    groups=st.integers(0, 2),
    recorder_names=st.booleans(),
    detail=st.booleans(),
)
environs = st.dictionaries(st.sampled_from(VARIABLES), st.sampled_from(["0", "1", "2", "3", "x"]))


@given(facts, environs, st.sampled_from(["auto", "on", "off"]))
def test_what_holds_for_every_build_and_environment(found, environ, shim):
    decision = decide(found, environ, shim=shim)
    assert not dict(decision.environment).keys() & environ.keys(), "what the user has set is never set"
    if decision.mode is Mode.OFF:
        assert not decision.environment
        assert not decision.remaining
    else:
        after = {**environ, **dict(decision.environment)}
        again = decide(found, after, shim=shim)
        assert (again.mode, again.remaining, again.overrides) == (
            decision.mode,
            decision.remaining,
            decision.overrides,
        )
    if decision.mode is Mode.ON:
        assert found.patched
        assert not found.disagreements
        assert not decision.next_step
        assert not {"D1", "D2", "D3", "D4", "D5", "D6"} & set(ids(decision))
    for defect in decision.remaining:
        acting = found.patched and not found.disagreements and not decision.fragile
        topics = found.topics if acting else ()
        assert ENDED_BY.get(defect.id) not in topics or found.implementation is Implementation.NCCL2
