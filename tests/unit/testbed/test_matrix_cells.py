"""Which cells the matrix has, and that its scenarios are sound."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

import pytest
from kits.matrixkit import NEWER, PATCHED, STOCK
from matrix.catalogue import GROUPS, SCENARIOS, by_id
from matrix.cells import LEGACY, NCCL2, cells, targets
from matrix.defects import DEFECTS
from matrix.modes import CLEAN_UP, ENDINGS, MODES, OTHERS
from matrix.scenario import KILL, NOTHING, STOP

TESTBED = Path(__file__).parents[2] / "testbed"
KNOBS = ("ABORT", "ASYNC", "ENQUEUE", "GROUPEND", "INIT", "NO_DETECT")


def test_a_build_has_a_column_for_each_implementation_under_the_plainest_name() -> None:
    every = ["nccl", "nccl-legacy", "nccl2", "nccl-lazy"]
    (only,) = targets("a", "2.6.0+cu124", patched=False, backends=["nccl"], default=LEGACY)
    assert (only.torch, only.backend, only.implementation) == ("2.6.0", "nccl", LEGACY)
    older = targets("b", "2.14.1+cu130", patched=False, backends=every, default=LEGACY)
    assert [(each.backend, each.implementation) for each in older] == [("nccl", LEGACY), ("nccl2", NCCL2)]
    newer = targets("c", "2.15.0+cu132", patched=False, backends=every, default=NCCL2)
    assert [(each.backend, each.implementation) for each in newer] == [
        ("nccl", NCCL2),
        ("nccl-legacy", LEGACY),
    ]


def test_twins_are_run_in_every_mode_and_others_only_where_it_matters() -> None:
    found = cells(SCENARIOS, [STOCK, PATCHED, NEWER])
    modes = {
        target: {cell.mode.id for cell in found if cell.target == target and not cell.scenario.everywhere}
        for target in (STOCK, PATCHED, NEWER)
    }
    assert modes[STOCK] == modes[PATCHED] == set(MODES)
    assert modes[NEWER] == set(MODES) - {"aeh0", "aeh1", "aeh3"}
    alone = cells(SCENARIOS, [STOCK])
    assert {cell.mode.id for cell in alone if not cell.scenario.everywhere} == modes[NEWER]


def test_twins_have_the_same_cells() -> None:
    keys = Counter((c.scenario.id, c.mode.id) for c in cells(SCENARIOS, [STOCK, PATCHED]))
    assert set(keys.values()) == {2}


def test_cells_are_chosen_by_pattern_and_repeated() -> None:
    found = cells(SCENARIOS, [STOCK], only=["lost.barrier.*", "nothing"], modes=["aeh2*"], repeat=3)
    assert [cell.key for cell in found] == [
        ("stock-2.6.0", "nccl", "lost.barrier.wait", "aeh2", number) for number in range(3)
    ]
    assert str(found[0]) == "stock-2.6.0 nccl lost.barrier.wait aeh2"


def test_no_cell_is_there_twice() -> None:
    keys = Counter(cell.key for cell in cells(SCENARIOS, [STOCK, PATCHED, NEWER], repeat=2))
    assert set(keys.values()) == {1}


def test_modes_are_told_apart_by_what_they_ask_for() -> None:
    assert set(CLEAN_UP) | set(OTHERS) == set(MODES)
    assert not set(CLEAN_UP) & set(OTHERS)
    assert all(mode.startswith("aeh2") for mode in CLEAN_UP)
    assert not any(mode.startswith("aeh2") for mode in OTHERS)
    assert len({tuple(sorted(mode.env.items())) for mode in MODES.values()}) == len(MODES)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda each: each.id)
def test_a_scenario_is_sound(scenario) -> None:
    assert re.fullmatch(r"[a-z-]+(\.[A-Za-z_-]+)+", scenario.id)
    assert scenario.group in GROUPS
    assert scenario.title
    assert "|" not in scenario.title
    assert scenario.fault.verb in {KILL, STOP, NOTHING}
    assert scenario.fault.rank not in scenario.observers
    assert max(scenario.fault.rank, *scenario.observers) < scenario.world_size
    assert set(scenario.modes) <= set(MODES)
    assert len(set(scenario.modes)) == len(scenario.modes)
    assert set(scenario.shows) <= {defect.id for defect in DEFECTS}
    # The observation outlasts what the program does of its own accord.
    assert scenario.deadline > scenario.config.get("linger", 2.0) + scenario.config.get("timeout", 0)
    file, function = scenario.program.split(":")
    tree = ast.parse((TESTBED / "programs" / f"{file}.py").read_text(encoding="utf-8"))
    assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    for key in scenario.config:
        if "knobs" in key:
            assert all(knob.startswith(KNOBS) for knob in scenario.config[key])


def test_scenarios_have_names_of_their_own_and_are_found_by_them() -> None:
    assert len({scenario.id for scenario in SCENARIOS}) == len(SCENARIOS)
    assert by_id("lost.three").world_size == 3
    with pytest.raises(KeyError):
        by_id("lost.nothing")


def test_every_ending_is_covered_and_so_is_every_defect() -> None:
    assert set(ENDINGS) == {"unset", "aeh0", "aeh1", "aeh2", "aeh3"}
    assert {defect for scenario in SCENARIOS for defect in scenario.shows} == {
        defect.id for defect in DEFECTS
    }
    for defect in DEFECTS:
        able = [
            (scenario.id, mode)
            for scenario in SCENARIOS
            if scenario.id.startswith(defect.scenarios)
            for mode in scenario.modes
            if mode in (defect.modes or CLEAN_UP)
        ]
        assert able, defect.id


def test_a_scenario_shows_what_a_predicate_can_see_in_it() -> None:
    for scenario in SCENARIOS:
        for name in scenario.shows:
            (defect,) = [each for each in DEFECTS if each.id == name]
            assert scenario.id.startswith(defect.scenarios), (scenario.id, name)
