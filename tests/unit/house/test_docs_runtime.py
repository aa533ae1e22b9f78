"""What the documents say of the runtime (settings, errors, events, states, methods, samples) is what the code has."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import re
from pathlib import Path

import pytest
import statespage

from multiworld import errors, events, settings
from multiworld._core import nccl_policy
from multiworld.events import State

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
WITH_SAMPLES = [ROOT / "README.md", *PAGES]
CONFIG = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
MARK = re.compile(r"<!-- (run|sample|output): (.*?) -->")


def text(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def rows(page: str) -> list[list[str]]:
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in page.splitlines()
        if line.startswith("| ")
    ]


def bare(cell: str) -> str:
    return cell.strip("`")


def test_the_table_of_settings_is_that_of_the_module() -> None:
    def shown(page: str) -> list[list[str]]:
        return [[c.replace("``", "`") for c in row] for row in rows(page) if "M8D_" in row[0]]

    assert settings.__doc__
    there = shown(settings.__doc__)
    assert [row for row in shown(text("settings.md")) if len(row) == 3] == there
    defaults = settings.load({})
    said = {bare(name): default for name, _, default in there}
    assert float(said.pop("M8D_HANG_TIMEOUT")) == defaults.hang_timeout
    assert float(said.pop("M8D_BUSY_TIMEOUT")) == defaults.busy_timeout
    assert float(said.pop("M8D_JOIN_TIMEOUT")) == defaults.join_timeout
    assert float(said.pop("M8D_CLOSE_TIMEOUT")) == defaults.close_timeout
    assert float(said.pop("M8D_STUCK_AFTER")) == defaults.stuck_after
    assert said.pop("M8D_SHIM") == defaults.shim
    assert bool(int(said.pop("M8D_REQUIRE_PATCH"))) == defaults.require_patch
    assert bool(int(said.pop("M8D_EARLY_CLOSE"))) == defaults.early_close
    assert bool(int(said.pop("M8D_LANE"))) == defaults.lane == defaults.lane_collectives
    assert bool(int(said.pop("M8D_CHECK"))) == defaults.check
    assert int(said.pop("M8D_GLOO_THREADS")) == defaults.gloo_threads
    # What is not set leaves it to the next one.
    assert said.pop("M8D_HOST") == "by `M8D_IFNAME`"
    assert said.pop("M8D_IFNAME").startswith("what leads to the store")
    assert (defaults.host, defaults.ifname) == ("", "")
    assert (said.pop("M8D_REPORTS"), defaults.reports) == ("none", "")
    assert {said.pop(f"M8D_TLS_{each}") for each in ("CERT", "KEY", "CA", "PLAIN")} == {"none"}
    assert (defaults.tls_cert, defaults.tls_key, defaults.tls_ca, defaults.tls_plain) == (
        "",
        "",
        "",
        frozenset(),
    )
    assert (said.pop("M8D_WEB_TOKEN"), said.pop("M8D_WEB_HOSTS")) == ("drawn", "none")
    assert {said.pop("M8D_LOG_LEVEL"), said.pop("M8D_LOG_FORMAT")} == {"by the program"}
    assert said.pop("M8D_RUN_ID") == "`TORCHELASTIC_RUN_ID`"
    assert settings.run_id({"TORCHELASTIC_RUN_ID": "a"}) == "a"
    assert said == {}


def test_each_variable_that_the_library_reads_is_named() -> None:
    page, shim = text("settings.md"), text("shim.md")
    for path in sorted((ROOT / "multiworld").rglob("*.py")):
        if "run" not in path.relative_to(ROOT).parts:  # the launcher: docs/launching.md
            for name in re.findall(r'\benvironment\("(\w+)"\)', path.read_text(encoding="utf-8")):
                assert name in page, (path, name)
    debugging = [name for name in nccl_policy.VARIABLES if name.startswith("TORCH_") and "DEBUG" in name]
    assert debugging == ["TORCH_DISTRIBUTED_DEBUG", "TORCH_NCCL_DESYNC_DEBUG"]
    for name in debugging:
        assert f"`{name}`" in page
        assert name in shim


def test_the_least_hang_timeout_is_said_everywhere() -> None:
    for page in ("settings.md", "faults.md"):
        assert f"at least {settings.MIN_HANG_TIMEOUT}" in text(page)


def test_the_table_of_errors_is_the_tree() -> None:
    shown = {
        bare(row[0]): row[1:] for row in rows(text("errors.md")) if row[0].endswith(("Error`", "Exception`"))
    }
    assert set(shown) == set(errors.__all__)
    meant = {}
    for line in (errors.__doc__ or "").splitlines():
        if match := re.search(r"(\w+(?:Error|Exception))  +(.*)", line):
            meant[match.group(1)] = re.sub(r" \(an? \w+ too\)", "", match.group(2)).replace("``", "`")
    for name, (also, when) in shown.items():
        kind = getattr(errors, name)
        builtin = [base.__name__ for base in kind.__bases__ if not issubclass(base, errors.MultiworldError)]
        assert also == ("" if builtin in ([], ["Exception"]) else f"`{builtin[0]}`"), name
        if name in meant:
            assert when.replace("`", "") == meant[name].replace("`", ""), name


def test_the_tree_of_errors_is_drawn_whole() -> None:
    (drawn,) = re.findall(r"```\n(MultiworldError\n.*?)```", text("errors.md"), re.DOTALL)
    assert sorted(re.findall(r"\w+", drawn)) == sorted(errors.__all__)


def test_the_table_of_events_is_that_of_the_module() -> None:
    kinds = {
        kind.__name__: [f.name for f in dataclasses.fields(kind)]
        for kind in vars(events).values()
        if isinstance(kind, type) and issubclass(kind, events.Event) and kind is not events.Event
    }
    common = [f.name for f in dataclasses.fields(events.Event)]
    found = rows(text("events.md"))
    (header,) = [row[2] for row in found if row[0] == "event"]
    assert header == f"fields beside `{', '.join(common)}`"
    shown = {
        bare(row[0]): re.findall(r"\w+", row[2]) for row in found if row[0].startswith(("`World", "`Member"))
    }
    assert shown == {name: [f for f in fields if f not in common] for name, fields in kinds.items()}


def test_states_and_causes_are_all_explained() -> None:
    page = rows(text("concepts.md"))
    explained = [bare(row[0]) for row in page if len(row) == 2 and row[0].startswith("`")]
    assert explained == [*(s.name for s in State), *(c.value for c in events.Cause)]
    for name in ("faults.md", "index.md", "../README.md"):
        named = [row[1] for row in rows(text(name)) if len(row) > 2 and re.fullmatch(r"`[a-z]+`", row[1])]
        assert set(map(bare, named)) == {c.value for c in events.Cause}


def test_the_state_machine_on_the_page_is_that_of_the_code() -> None:
    assert statespage.current() == statespage.generated(), "python tests/statespage.py writes it"


def methods(module: str, owner: str) -> set[str]:
    tree = ast.parse((ROOT / "multiworld" / module).read_text(encoding="utf-8"))
    (found,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == owner]
    return {
        node.name
        for node in found.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_")
    }


def test_every_collective_is_named_and_can_be_awaited() -> None:
    kinds = {"point to point", "one and all", "all and all", "objects"}
    page = rows(text("from-torch-distributed.md"))
    named = {n for row in page if row[0] in kinds for n in re.findall(r"\w+", row[1])}
    blocking = methods("collectives.py", "Collectives") | methods("objects.py", "ObjectCollectives")
    assert named == blocking == methods("aio.py", "Aio")


def test_pymultiworlds_operations_are_named() -> None:
    page = text("from-pymultiworld.md")
    internal = {"add_world", "set_world", "remove_world"}
    for name in methods("communicator.py", "WorldCommunicator") - internal | methods(
        "manager.py", "WorldManager"
    ):
        assert f"`{name}`" in page, name


def test_every_module_has_its_layer() -> None:
    package = ROOT / "multiworld"
    modules = {path.stem for path in package.glob("*.py") if not path.stem.startswith("__")}
    folders = {f"{path.parent.name}/" for path in package.glob("*/__init__.py")}
    named = {
        n for row in rows(text("development.md")) if len(row) == 3 for n in re.findall(r"`([\w/]+)`", row[1])
    }
    assert modules | folders <= named


def test_every_example_is_named() -> None:
    programs = {path.name for path in (ROOT / "examples").glob("*.py") if not path.name.startswith("_")}
    named = {n for row in rows(text("examples.md")) for n in re.findall(r"`(\w+\.py)`", row[0])}
    assert named == programs


# -- the site -------------------------------------------------------------------------------------------------------


def test_every_page_is_in_the_navigation() -> None:
    listed = re.findall(r": ([\w/-]+\.md)$", CONFIG, re.MULTILINE)
    assert len(listed) == len(set(listed))
    # The issue texts are reached from their index.
    pages = {page.relative_to(DOCS).as_posix() for page in PAGES}
    assert set(listed) == {page for page in pages if not re.fullmatch(r"upstream/(?!README).*", page)}


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=lambda page: page.name)
def test_tables_render(page: Path) -> None:
    """A blank line within a table ends it: what follows is shown as text with bars."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        lines = table.splitlines()
        assert len(lines) > 2, table
        assert re.fullmatch(r"\|(?: ?:?-+:? ?\|)+", lines[1]), f"no row of dashes below: {lines[0]}"


def test_the_site_takes_nothing_from_elsewhere() -> None:
    assert re.search(r"^  font: false$", CONFIG, re.MULTILINE)
    assert not re.search(r"https?://", CONFIG)


@pytest.fixture(scope="module")
def hook():
    spec = importlib.util.spec_from_file_location("site_hooks", DOCS / "site_hooks.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("page", "given", "expected"),
    [
        ("a.md", "the [README](../README.md#x) and", "the README (`README.md`) and"),
        ("a.md", "[README.md](../README.md)", "README.md"),
        ("reference/b.md", "[x](../../noxfile.py)", "x (`noxfile.py`)"),
        ("reference/b.md", "[x](../a.md#y)", "[x](../a.md#y)"),
        ("a.md", "[x](b.md) [y](#z) [w](https://pytorch.org)", "[x](b.md) [y](#z) [w](https://pytorch.org)"),
    ],
)
def test_links_that_leave_the_site_become_paths(hook, page: str, given: str, expected: str) -> None:
    assert hook.without_repository_links(given, page) == expected


@pytest.mark.parametrize(
    ("html", "loaded"),
    [
        ('<script src="assets/a.js"></script><a href="https://pytorch.org">x</a>', []),
        ('<link rel="stylesheet" href="https://fonts.example/x.css">', ["https://fonts.example/x.css"]),
        ("<script async src=//cdn.example/x.js></script>", ["//cdn.example/x.js"]),
    ],
)
def test_what_a_page_takes_from_elsewhere_is_found(hook, html: str, loaded: list[str]) -> None:
    assert hook.loads_from_elsewhere(html) == loaded


def test_reference_pages_name_things_that_exist() -> None:
    names = [n for page in PAGES for n in re.findall(r"^::: (\S+)", page.read_text("utf-8"), re.MULTILINE)]
    assert len(names) > 8
    import multiworld

    for name in names:
        parts = name.split(".")
        if len(parts) == 2 and parts[1] in multiworld.__all__:
            continue
        path = ROOT.joinpath(*parts)
        if path.with_suffix(".py").exists() or path.is_dir():
            continue
        source = ROOT.joinpath(*parts[:-1]).with_suffix(".py").read_text(encoding="utf-8")
        assert re.search(rf"^class {parts[-1]}\b", source, re.MULTILINE), name


# -- samples --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", WITH_SAMPLES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_every_complete_sample_is_marked_to_be_run(page: Path) -> None:
    """A block that imports multiworld and joins is a whole program: somebody runs it, and so does a test."""
    content = page.read_text(encoding="utf-8")
    for match in re.finditer(r"^```python\n(.*?)^```", content, re.MULTILINE | re.DOTALL):
        code = match.group(1)
        if "import multiworld" in code or "from multiworld" in code:
            before = content[: match.start()].splitlines()[-1]
            assert MARK.fullmatch(before), (
                f"{page.name}: mark this sample, or cut it to what is no program:\n{code}"
            )


def test_samples_have_names_of_their_own() -> None:
    marks = [m for page in WITH_SAMPLES for m in MARK.findall(page.read_text(encoding="utf-8"))]
    names = [what.split()[0] for kind, what in marks if kind != "output"]
    assert len(names) == len(set(names))
    assert {what.split()[0] for kind, what in marks if kind == "output"} <= set(names)
