"""Which tests `nox -s tests` leaves out, what is said of its progress, and that CI runs every test once."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import partskit
import pytest
from hypothesis import given
from hypothesis import strategies as st

ROOT = Path(__file__).parents[3]
LONG = partskit.read_long(partskit.LONG.read_text())
MOST = 10 * 60
"""Seconds of `nox -s tests` on two cores as recorded; README's are those of a machine with other work."""


def functions(path: Path) -> set[str]:
    name = path.relative_to(ROOT).as_posix()
    tree = ast.parse(path.read_text())
    found = set()
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            found |= {
                f"{name}::{node.name}::{each.name}" for each in node.body if isinstance(each, ast.FunctionDef)
            }
        elif isinstance(node, ast.FunctionDef):
            found.add(f"{name}::{node.name}")
    return found


@pytest.fixture(scope="module")
def tests():
    return {each for path in (ROOT / "tests").rglob("test_*.py") for each in functions(path)}


def test_what_is_listed_as_long_exists(tests):
    files = {each.partition("::")[0] for each in tests}
    assert LONG - tests - files == set()


def test_the_record_names_tests_that_exist(tests):
    recorded = json.loads(partskit.SECONDS.read_text())
    assert recorded
    gone = set(recorded) - tests
    assert len(gone) < len(recorded) / 10, (
        f"record anew with --record-seconds tests/seconds.json: {sorted(gone)}"
    )


def test_soaks_examples_and_runs_of_many_nodes_are_long():
    everyday = {path.name for path in (ROOT / "tests" / "contract").rglob("test_*.py")} - {
        Path(each).name for each in LONG
    }
    for word in ("soak", "example", "run_nodes", "run_hosts", "run_etcd", "elastic_pipeline"):
        assert [name for name in everyday if word in name] == []


def test_the_everyday_form_ends_in_time():
    """As recorded."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "not long", "-p", "no:cacheprovider"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=900,  # half a minute alone; CI runs it beside the contract tests
        check=False,
    )
    nodes = [line for line in done.stdout.splitlines() if "::" in line and line.startswith("tests/")]
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert {"unit", "integration", "contract"} <= {node.split("/")[1] for node in nodes}
    recorded = json.loads(partskit.SECONDS.read_text())
    expected = sum(recorded.get(partskit.function_of(node), partskit.UNKNOWN) for node in nodes)
    assert expected < MOST, "move the slowest to tests/long.txt"


def test_ci_runs_every_test_once():
    text = (ROOT / ".ci" / "run").read_text()
    calls = re.findall(r"^ *run tests-all (.*?)(?: \|\| .*)?$", text, re.MULTILINE)
    assert sorted(calls) == [
        '"-- ${2:-tests} --ignore=tests/contract --but-covered --share $1/3"',
        '"-- tests/contract --ignore=tests/contract/examples/test_llm_serving.py --share $1/3"',
        '"-- tests/contract/examples/test_llm_serving.py"',
    ]  # fmt: skip
    assert re.search(r"^checks=\(.*\bcoverage\b.*\)$", text, re.MULTILINE), "it runs the others"
    for function, shares in (
        ("contract", ["1", "2", "3"]),
        ("others_of", ["1", "2", '3 "tests/unit --timeout=1800"']),
    ):
        assert sorted(re.findall(rf"^ *{function} (.*?) \|\|", text, re.MULTILINE)) == shares
    assert re.findall(r'^ *run clusters "(.*?)"', text, re.MULTILINE) == ["-- --share $1/2"]
    assert sorted(re.findall(r"^ *large (\d) \|\|", text, re.MULTILINE)) == ["1", "2"]
    # The third share divides unit tests alone: without claims it leaves out, or repeats, what the two others have.
    claims = re.findall(r'^(\w+)\(\).*\n *local -x M8D_SHARE_CLAIMS="\$tools/([\w-]+)"', text, re.MULTILINE)
    assert sorted(claims) == [
        ("clusters", "claims-clusters"), ("contract", "claims"), ("others_of", "claims-others"),
    ]  # fmt: skip
    body = re.search(r"def tests_all\(.*?\n\n\n", (ROOT / "noxfile.py").read_text(), re.DOTALL)
    assert body
    assert "not long" not in body[0]


@given(st.dictionaries(st.text(max_size=3), st.floats(0, 100), max_size=20), st.integers(1, 4))
def test_each_file_is_in_one_share_and_none_is_much_longer(seconds, of):
    shares = [partskit.share_of(seconds, number, of) for number in range(1, of + 1)]
    assert sorted(file for share in shares for file in share) == sorted(seconds)
    sums = [sum(seconds[file] for file in share) for share in shares]
    assert max(sums) - min(sums) <= max(seconds.values(), default=0) + 1e-6


PLUGIN = """
from partskit import Parts

def pytest_addoption(parser):
    parser.addoption("--parts", action="store_true")
    parser.addoption("--record-seconds")
    parser.addoption("--share")
    parser.addoption("--soak", type=float)

def pytest_configure(config):
    config.pluginmanager.register(Parts(config), "m8d-parts")
"""


@pytest.fixture
def shared(tmp_path):
    """Runs a share of files of two tests each: returns what passed, in its order, and all that was said."""
    folder = tmp_path / "tests"
    folder.mkdir()
    (folder / "partsplugin.py").write_text(PLUGIN)

    def run(share, names, claims):
        for name in names:
            text = "def test_one():\n    pass\n\n\ndef test_two():\n    pass\n"
            file = (folder / name).with_name(f"test_{Path(name).name}.py")
            file.parent.mkdir(exist_ok=True)
            file.write_text(text)
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-rA", "-p", "partsplugin", "-p", "no:cacheprovider", "--share", share],
            cwd=folder, capture_output=True, text=True, timeout=120, check=False,
            env={**os.environ, "PYTHONPATH": f"{ROOT / 'tests'}{os.pathsep}{folder}", "M8D_SHARE_CLAIMS": str(claims)},
        )  # fmt: skip
        return re.findall(r"^PASSED test_(\S+)", done.stdout, re.MULTILINE), done.stdout

    return run


def both(names):
    return [f"{name}.py::test_{which}" for name in names for which in ("one", "two")]


def test_a_share_takes_what_the_other_has_not_begun(tmp_path, shared):
    """The first has its own file and one of the other's; the second, which comes late, finds nothing."""
    claims = tmp_path / "claims"
    partskit.Claims(claims).mine("test_b.py")  # begun elsewhere
    found, text = shared("1/2", "abc", claims)
    assert sorted(found) == both("ac"), text
    found, text = shared("2/2", "abc", claims)
    assert found == [], text
    assert "6 items" in text
    assert "error" not in text.lower()


def test_a_file_that_another_share_has_is_not_what_its_folder_is_kept_for(tmp_path, shared):
    """pytest tears down what the next test does not need: the next one of this share."""
    claims = tmp_path / "claims"
    partskit.Claims(claims).mine("one/test_b.py")  # begun elsewhere
    _, text = shared("1/1", ["one/a", "one/b", "two/c"], claims)
    assert "not torn down" not in text
    assert re.findall(r"^PASSED (\S+)", text, re.MULTILINE) == [
        f"{file}::test_{which}" for file in ("one/test_a.py", "two/test_c.py") for which in ("one", "two")
    ], text


@pytest.mark.parametrize(("share", "order"), [("1/2", "acdb"), ("2/2", "bdca")])
def test_a_share_comes_last_to_what_the_other_begins_with(tmp_path, shared, share, order):
    """The first one's files are a and c, the second one's b and d: each comes last to what the other begins with."""
    found, text = shared(share, "abcd", tmp_path / "claims")
    assert found == both(order), text


def test_second_looks_do_not_lead_a_run_beyond_its_tests():
    progress = partskit.Progress([("unit", 1.0), ("unit", 1.0)], 0.0)
    for now in (1.0, 2.0):
        progress.ends(now)
    progress.elsewhere(1)
    assert progress.starts(3.0) == ""


def test_what_other_runs_have_begun_is_not_left():
    progress = partskit.Progress([("unit", 100.0)] * 6, 0.0, among=2)
    assert progress.starts(0.0).endswith("to the end about 5 min")
    progress.ends(100.0)
    assert progress.due(200.0)
    progress.begun_elsewhere([0, 4, 5])  # the first has run here
    assert progress.ends(200.0) == "unit: 2 of 6 tests; to the end about 2 min"


def test_claims_of_others_are_files_that_this_run_has_not(tmp_path):
    ours, theirs = partskit.Claims(tmp_path), partskit.Claims(tmp_path)
    assert ours.mine("tests/unit/test_a.py")
    assert theirs.mine("tests/unit/test_b.py")
    assert not ours.mine("tests/unit/test_b.py")
    assert theirs.mine("tests/unit/test_c.py")
    assert ours.others() == {"tests/unit/test_b.py", "tests/unit/test_c.py"}
    assert theirs.others() == {"tests/unit/test_a.py"}


SHOWS_TIMEOUTS = """
def pytest_collection_finish(session):
    for item in session.items:
        print(item.name, [mark.args for mark in item.iter_markers("timeout")][:1])
"""


def test_the_timeout_of_a_soak_follows_how_long_it_lasts(tmp_path):
    (tmp_path / "partsplugin.py").write_text(PLUGIN + SHOWS_TIMEOUTS)
    (tmp_path / "pytest.ini").write_text(
        "[pytest]\ntimeout = 300\nmarkers =\n    soak: long\n    long: long\n"
    )
    marks = {"none": "", "own": "@pytest.mark.timeout(900)\n", "soak": "@pytest.mark.soak\n"}
    marks["both"] = marks["own"] + marks["soak"]
    tests = "".join(f"{mark}def test_{name}(): pass\n" for name, mark in marks.items())
    (tmp_path / "test_one.py").write_text(f"import pytest\n{tests}")
    whole = f"import pytest\npytestmark = [pytest.mark.timeout(60), pytest.mark.soak]\n{tests}"
    (tmp_path / "test_whole.py").write_text(whole)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "partsplugin",
        "-p",
        "no:cacheprovider",
        "--collect-only",
        "-s",
    ]
    done = subprocess.run(
        [*command, "--soak", "3600"], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'tests'}{os.pathsep}{tmp_path}"},
    )  # fmt: skip
    assert re.findall(r"^test_(\w+) \[(.*)\]", done.stdout, re.MULTILINE) == [
        ("none", ""), ("own", "(900,)"), ("soak", "(3900.0,)"), ("both", "(4500.0,)"),
        ("none", "(3660.0,)"), ("own", "(4500.0,)"), ("soak", "(3660.0,)"), ("both", "(4500.0,)"),
    ], done.stdout + done.stderr  # fmt: skip


@pytest.mark.parametrize("failing", [False, True])
def test_two_processes_run_each_test_once_and_show_what_failed(tmp_path, failing):
    (tmp_path / "partsplugin.py").write_text(PLUGIN)
    for name in "abcd":
        wrong = failing and name == "c"
        (tmp_path / f"test_{name}.py").write_text(
            f"def test_{name}():\n    assert not {wrong}, 'it is wrong'\n"
        )
    done = subprocess.run(
        [sys.executable, ROOT / "tests/shares.py", "-p", "partsplugin", "-p", "no:cacheprovider", "--parts"],
        cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'tests'}{os.pathsep}{tmp_path}"},
    )  # fmt: skip
    assert done.returncode == int(failing), done.stdout + done.stderr
    assert sum(map(int, re.findall(r"(\d+) (?:passed|failed)", done.stdout))) == 4
    assert ("FAILED test_c.py::test_c - AssertionError: it is wrong" in done.stdout) is failing
    assert re.search(r"^[12]: part 1 of 1: ", done.stdout, re.MULTILINE)


def test_what_keeps_pytest_from_a_start_is_shown(tmp_path):
    done = subprocess.run(
        [sys.executable, ROOT / "tests/shares.py", "--no-such-option"],
        cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 4
    assert "unrecognized arguments: --no-such-option" in done.stdout


TIMEOUT = """
import os

def test_it(capfd):
    with capfd.disabled():
        print("+++ Timeout +++", "ValueError: in a stack", sep="\\n", flush=True)
    os._exit(1)
"""
"""What pytest-timeout does by its thread."""


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("test_a", "import os\ndef test_it(): os.abort()\n", "Fatal Python error: Aborted"),
        ("test_a", TIMEOUT, "+++ Timeout +++"),
        (
            "conftest",
            "def pytest_runtest_logstart(): raise ValueError('no')\n",
            "INTERNALERROR> ValueError: no",
        ),
    ],
    ids=["crash", "timeout", "internal"],
)
def test_what_ends_a_process_before_pytest_sums_up_is_shown(tmp_path, file, text, said):
    (tmp_path / "partsplugin.py").write_text(PLUGIN)
    (tmp_path / "test_a.py").write_text("def test_it(): pass\n")
    (tmp_path / f"{file}.py").write_text(text)
    done = subprocess.run(
        [sys.executable, ROOT / "tests/shares.py", "-p", "partsplugin", "-p", "no:cacheprovider", "--parts"],
        cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'tests'}{os.pathsep}{tmp_path}"},
    )  # fmt: skip
    assert said in done.stdout, done.stdout + done.stderr
    (code,) = {int(each) for each in re.findall(r"exit code (-?\d+):", done.stdout)} - {0, 5}
    assert done.returncode == code % 256


def test_a_share_is_a_number_of_how_many():
    assert partskit.read_share("2/3") == (2, 3)
    for wrong in ("", "1", "0/2", "3/2", "1/0", "-1/2", "a/b"):
        with pytest.raises(pytest.UsageError, match="as in 1/2"):
            partskit.read_share(wrong)


def test_the_shares_of_the_contract_tests_are_about_as_long():
    """As recorded: the longest file decides how equal they can be."""
    recorded = json.loads(partskit.SECONDS.read_text())
    seconds: dict[str, float] = {}
    for name, each in recorded.items():
        if name.startswith("tests/contract/"):
            file = name.partition("::")[0]
            seconds[file] = seconds.get(file, 0.0) + each
    sums = [sum(seconds[each] for each in partskit.share_of(seconds, n, 3)) for n in (1, 2, 3)]
    assert max(sums) - min(sums) < 0.1 * sum(sums)


def test_the_list_is_read_with_its_reasons():
    text = "# why\n\ntests/a.py  # soak\ntests/b.py::test_x\n"
    long = partskit.read_long(text)
    assert long == {"tests/a.py", "tests/b.py::test_x"}
    assert partskit.is_long("tests/a.py::test_y[1]", long)
    assert partskit.is_long("tests/b.py::test_x[a::b]", long)
    assert not partskit.is_long("tests/b.py::test_z", long)


def test_each_part_has_a_line_and_long_ones_more():
    tests = [("unit", 1.0)] * 20 + [("contract", 10.0)] * 10
    progress, now, said = partskit.Progress(tests, 0.0), 0.0, []
    for _, seconds in tests:
        said.append((now, progress.starts(now)))
        now += 2 * seconds  # a machine half as fast
        said.append((now, progress.ends(now)))
    lines = [(at, line) for at, line in said if line]
    assert lines[0] == (0.0, "part 1 of 2: unit, 20 tests, about 20 s; to the end about 2 min")
    assert lines[1] == (30.0, "unit: 15 of 20 tests; to the end about 2 min")
    assert lines[2] == (40.0, "part 2 of 2: contract, 10 tests, about 2 min; to the end about 2 min")
    assert lines[3] == (80.0, "contract: 2 of 10 tests; to the end about 3 min")
    assert now == 240.0


@given(
    st.lists(st.tuples(st.sampled_from(["a", "b", "c"]), st.floats(0, 100)), max_size=40), st.floats(0.01, 10)
)
def test_any_run_is_told_to_its_end(tests, pace):
    progress, now = partskit.Progress(tests, 5.0), 5.0
    for _, seconds in tests:
        progress.starts(now)
        now += seconds * pace
        progress.ends(now)
    assert progress.ends(now) == ""


def test_a_record_keeps_what_did_not_run_and_leaves_out_what_is_quick(tmp_path):
    path = tmp_path / "seconds.json"
    partskit.record(path, {"t.py::a[1]": 1.0, "t.py::a[2]": 2.0, "t.py::b": 0.01, "t.py::c": 9.0})
    assert json.loads(path.read_text()) == {"t.py::a": 1.5, "t.py::c": 9.0}
    partskit.record(path, {"t.py::a[1]": 0.01, "t.py::d": 3.0})
    assert json.loads(path.read_text()) == {"t.py::c": 9.0, "t.py::d": 3.0}
