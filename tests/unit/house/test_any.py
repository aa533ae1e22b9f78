"""No `Any` on the way of a send, a receive, a collective or a break: mypy has to see what goes through there."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
LIBRARY = ROOT / "multiworld"

WAYS = (
    "aio.py",
    "collectives.py",
    "communicator.py",
    "objects.py",
    "operation_table.py",
    "turns.py",
    "uninterrupted.py",
    "work.py",
    "_c10d/groups.py",
    "_c10d/late_group.py",
    "_c10d/logged_calls.py",
    "_c10d/waiter_pool.py",
    "_c10d/gloo/await_work.py",
    "_c10d/gloo/backend.py",
    "_c10d/gloo/devices.py",
    "_c10d/gloo/fast_path.py",
    "_c10d/gloo/part_sizes.py",
    "_c10d/gloo/sockets.py",
    "_c10d/gloo/unblocking.py",
    "_c10d/lane/buffers.py",
    "_c10d/lane/collective.py",
    "_c10d/lane/collective_dispatch.py",
    "_c10d/lane/collective_work.py",
    "_c10d/lane/collectives.py",
    "_c10d/lane/comparing.py",
    "_c10d/lane/messages.py",
    "_c10d/lane/p2p_dispatch.py",
    "_c10d/lane/records.py",
    "_c10d/lane/reducing.py",
    "_c10d/lane/tensors.py",
    "_c10d/lane/work.py",
    "_c10d/routing/state_types.py",
    *(
        path.relative_to(LIBRARY).as_posix()
        for folder in ("_generation", "_core/lane")
        for path in sorted((LIBRARY / folder).glob("*.py"))
    ),
)
"""Modules on these ways, below multiworld/."""

_OBJECTS = "its objects are of any types, and a list[object] would refuse a program's list[int]"
_RESULT = "torch has a tensor, a list, or a list of lists there, by the kind of collective"
EXCEPTIONS = {
    "aio.py": {
        f"Aio.{name}": _OBJECTS
        for name in (
            "send_object_list", "recv_object_list", "broadcast_object_list", "all_gather_object",
            "gather_object", "scatter_object_list",
        )
    },
    "objects.py": {
        **{
            f"ObjectCollectives.{name}": _OBJECTS
            for name in (
                "send_object_list", "recv_object_list", "broadcast_object_list", "all_gather_object",
                "gather_object", "scatter_object_list",
            )
        },
        "OneGeneration.send_objects": _OBJECTS,
        "ComingList.__init__": _OBJECTS,
    },
    "operation_table.py": {"inside": "torch's functions, found by their names, have no types"},
    "turns.py": {"posted": "arguments of a method that is found by its name; torch judges them"},
    "work.py": {"WorldWork.__getattr__": "whatever else torch's Work has, with the types it has there"},
    "_c10d/gloo/backend.py": {
        "_Routed.__call__": "stands for torch's constructor, in all the forms that versions of torch give it"
    },
    "_c10d/lane/collective.py": {"Collective.__init__": _RESULT},
    "_c10d/lane/collective_dispatch.py": {"GroupCollectives._new": _RESULT},
    "_c10d/lane/collective_work.py": {"CollectiveWork.result": _RESULT},
}  # fmt: skip
"""Where there is one nevertheless, and why: by module, and by function in it."""


def uses(source: str) -> set[str]:
    """Return the functions, classes and modules ("") whose annotations, bases or casts name `Any`."""
    found: set[str] = set()

    def walk(node: ast.AST, inside: str) -> None:
        for child in ast.iter_child_nodes(node):
            name = getattr(child, "name", None)
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and name:
                walk(child, f"{inside}.{name}".lstrip("."))
                continue
            if isinstance(child, (ast.Name, ast.Attribute)) and _name(child) == "Any":
                found.add(inside)
            if isinstance(child, ast.Constant) and _says_any(child.value):
                found.add(inside)
            walk(child, inside)

    walk(ast.parse(source), "")
    return found


def _name(node: ast.Name | ast.Attribute) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr


def _says_any(value: object) -> bool:
    """Whether a text is a type that names `Any`, as in ``cast("list[Any]", x)``, and no sentence."""
    if not isinstance(value, str) or "Any" not in value:
        return False
    try:
        tree = ast.parse(value, mode="eval")
    except SyntaxError:
        return False
    return any(isinstance(each, ast.Name) and each.id == "Any" for each in ast.walk(tree))


@pytest.mark.parametrize("module", WAYS)
def test_a_module_on_these_ways_has_no_any(module: str) -> None:
    found = uses((LIBRARY / module).read_text(encoding="utf-8"))
    assert found - EXCEPTIONS.get(module, {}).keys() == set(), "say what it is, or why it is anything"


def test_every_exception_is_one() -> None:
    for module, excepted in EXCEPTIONS.items():
        assert module in WAYS
        assert excepted.keys() == uses((LIBRARY / module).read_text(encoding="utf-8")) & excepted.keys()
        assert all(excepted.values())


@pytest.mark.parametrize(
    ("source", "where"),
    [
        ("def f(x: Any): pass", {"f"}),
        ("class A:\n  async def f(self) -> list[Any]: pass", {"A.f"}),
        ("x: typing.Any = 1", {""}),
        ("def f():\n  def g(*a: Any): pass", {"f.g"}),
        ("def f(): return cast('list[Any]', 1)", {"f"}),
        ("class A(Any): pass", {"A"}),
        ("from typing import Any", set()),
        ("def f(x: object) -> None:\n  'Any thread.'", set()),
    ],
)
def test_it_is_found_where_it_stands(source: str, where: set[str]) -> None:
    assert uses(source) == where
