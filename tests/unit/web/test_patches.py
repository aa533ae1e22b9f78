"""A patch, applied to the view before, is the view after."""

from __future__ import annotations

import copy

from hypothesis import given
from hypothesis import strategies as st

from multiworld.web.patches import patch

BASE = {
    "version": 1, "now": 1.0, "kind": "run", "title": "run a", "note": "", "run": {"seat": 0}, "totals": {},
    "processes": [{"id": "h/1", "state": "up"}], "worlds": [{"name": "w0", "state": "active"}],
    "faults": [{"id": "w0/1/1", "healed": False}], "events": [{"id": 1, "text": "a"}],
}  # fmt: skip


def merged(view: dict, change: dict) -> dict:
    """What the page does with a patch; lists without their order."""
    found = {**copy.deepcopy(view), **change.get("set", {}), "now": change["now"]}
    for name, key in (("processes", "id"), ("worlds", "name"), ("faults", "id"), ("events", "id")):
        rows = {each[key]: each for each in found[name]}
        for each in change.get(f"{name}_gone", ()):
            del rows[each]
        rows |= {each[key]: each for each in change.get(name, ())}
        found[name] = sorted(rows.values(), key=lambda each, key=key: str(each[key]))
    return found


names = st.sampled_from(["w0", "w1", "w2", "w3"])
views = st.builds(
    lambda worlds, processes, faults, head, events: {
        **BASE,
        "now": 2.0,
        **head,
        "worlds": [{"name": name, "state": state} for name, state in worlds.items()],
        "processes": [{"id": name, "state": state} for name, state in processes.items()],
        "faults": [{"id": f"{name}/1", "healed": healed} for name, healed in faults.items()],
        "events": [{"id": number, "text": str(number)} for number in range(1, events + 2)],
    },
    st.dictionaries(names, st.sampled_from(["active", "broken"])),
    st.dictionaries(names, st.sampled_from(["up", "failed"])),
    st.dictionaries(names, st.booleans()),
    st.fixed_dictionaries({}, optional={"title": st.text(max_size=3), "note": st.text(max_size=3)}),
    st.integers(0, 3),
)


@given(before=views, after=views)
def test_a_patch_makes_the_next_view(before, after):
    after = {
        **after,
        "events": before["events"] + [e for e in after["events"] if e["id"] > len(before["events"])],
    }
    found = merged(before, patch(before, after))
    wanted = copy.deepcopy(after)
    for name, key in (("processes", "id"), ("worlds", "name"), ("faults", "id"), ("events", "id")):
        wanted[name] = sorted(wanted[name], key=lambda each, key=key: str(each[key]))
    assert found == wanted


def test_nothing_new_is_only_the_time():
    assert patch(BASE, {**BASE, "now": 5.0}) == {"now": 5.0}


def test_only_what_changed_is_in_it():
    after = {
        **BASE,
        "now": 2.0,
        "worlds": [*BASE["worlds"], {"name": "w1", "state": "joining"}],
        "processes": [],
    }
    after["faults"] = [{"id": "w0/1/1", "healed": True}]
    assert patch(BASE, after) == {
        "now": 2.0,
        "worlds": [{"name": "w1", "state": "joining"}],
        "processes_gone": ["h/1"],
        "faults": [{"id": "w0/1/1", "healed": True}],
    }
