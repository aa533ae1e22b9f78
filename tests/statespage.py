"""The part of docs/concepts.md that shows the state machine: ``python tests/statespage.py`` writes it."""

from __future__ import annotations

import ast
import inspect
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from multiworld._core import state_machine  # noqa: E402  (it is run as a script, too)

PAGE = ROOT / "docs" / "concepts.md"
BEGIN = "<!-- stages: begin (written by python tests/statespage.py) -->"
END = "<!-- stages: end -->"


def generated() -> str:
    """Return the part, made from the table in the code."""
    stages, actions = _meanings("Stage"), _meanings("Action")
    lines = ["| stage | `world.state` | meaning |", "|---|---|---|"]
    lines += [
        f"| `{stage.value}` | `{state_machine.STATES[stage].name}` | {stages[stage.name]} |"
        for stage in state_machine.Stage
    ]
    lines += ["", "| in stage | comes | then | what is done, in this order |", "|---|---|---|---|"]
    for (stage, kind), row in state_machine.TABLE.items():
        done = ", ".join(action.value for action in row.actions)
        lines.append(f"| `{stage.value}` | `{kind.__name__}` | `{row.to.value}` | {done} |")
    lines.append("")
    lines += [f"- `{action.value}`: {actions[action.name]}" for action in state_machine.Action]
    return "\n".join(lines)


def current() -> str:
    """Return the part as the page has it."""
    return PAGE.read_text(encoding="utf-8").partition(f"{BEGIN}\n")[2].partition(f"\n{END}")[0]


def _meanings(name: str) -> dict[str, str]:
    """Read the text below each member of an enumeration."""
    found: dict[str, str] = {}
    tree = ast.parse(inspect.getsource(state_machine))
    (kind,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    member = ""
    for node in kind.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            member = node.targets[0].id
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and member:
            text = " ".join(str(node.value.value).split()).replace("``", "`").rstrip(".")
            found[member] = text[0].lower() + text[1:]
    return found


def main() -> None:
    """Write the part."""
    page = PAGE.read_text(encoding="utf-8")
    before, _, rest = page.partition(f"{BEGIN}\n")
    PAGE.write_text(f"{before}{BEGIN}\n{generated()}\n{END}{rest.partition(END)[2]}", encoding="utf-8")


if __name__ == "__main__":
    main()
