"""The reproducers of docs/upstream: each shows, on a build, what its issue says of that build.

They know nothing of the test bed: it is preloaded, and stands for the GPU.
"""

from __future__ import annotations

import ast
import os
import re
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
UPSTREAM = ROOT / "docs" / "upstream"
LEGACY, NCCL2 = "ProcessGroupNCCL", "ProcessGroupNCCL2"
AT_ONCE = 3
DEADLINE = 240.0
SOUND, DEFECT, UNTOLD = 0, 1, 2
TRIES = 3  # that a machine is too busy for its measure, a reproducer says of itself


ON_GLOO = {"repro_gloo_half_sent.py"}
"""Those that need no NCCL: tests/contract/faults/test_faults_running.py runs them."""


@dataclass(frozen=True)
class Case:
    """A reproducer with one of torch's classes; the patch that ends what it shows ("": none does)."""

    name: str
    kind: str
    topic: str = ""

    def __str__(self) -> str:
        return f"{self.name}-{'nccl2' if self.kind == NCCL2 else 'legacy'}"


CASES = (
    # The slow ones first.
    Case("hung_abort", LEGACY, "abort-offload"),
    Case("hung_abort", NCCL2),
    Case("slow_abort", LEGACY, "abort-offload"),
    Case("dump_signal", LEGACY, "world-scope"),
    Case("killed_by_monitor", LEGACY, "cleanup-only"),
    Case("dump_before_abort", LEGACY, "cleanup-only"),
    Case("blocking_wait", NCCL2),
    Case("stale_after_abort", LEGACY, "work-error"),
    Case("stale_after_abort", NCCL2),
    Case("coalescing_manager", LEGACY, "coalescing-block"),
    Case("coalescing_manager", NCCL2),
    Case("stack_at_exit", LEGACY),
    Case("open_group", LEGACY, "group-guard"),
    Case("coalesced_terminate", LEGACY, "group-guard"),
    Case("error_type", NCCL2),
    Case("work_outlives_group", NCCL2),
)


@pytest.fixture(scope="session")
def finished(build, library, request):
    """What a reproducer told, by case; all of the tests chosen begin when the first is asked for, some at a time.

    Who asks a second time gets a second run.
    """
    mine = [item for item in request.session.items if item.path == Path(__file__)]
    wanted = {
        item.callspec.params["case"]
        for item in mine
        if "case" in getattr(item, "fixturenames", ()) and item.callspec.params["bed_name"] == build.name
    }
    with ThreadPoolExecutor(AT_ONCE) as pool:

        def begin(case):
            return pool.submit(until_told, build, library, case)

        begun = {case: begin(case) for case in CASES if case in wanted and case.kind in backends_of(build)}
        yield lambda case: (begun.pop(case, None) or begin(case)).result()


def until_told(build, library, case):
    """Run a reproducer, again where it could not tell, and where a defect that must be there did not show in time."""
    for _ in range(TRIES):
        code, out, errors = run(build.python, library, case.name, backends_of(build)[case.kind])
        if code == DEFECT or code == expected(build, case):
            break
    return code, out, errors


def expected(build, case):
    """What a build's reproducer says: sound where one of its patches ends the defect."""
    return SOUND if case.topic in build.topics else DEFECT


def backends_of(build):
    """The name of a backend of each of torch's classes."""
    return {kind: name for name, kind in reversed(build.backends.items())}


def run(python, library, name, backend):
    """Run a reproducer on the test bed; whatever it leaves is ended with it."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("TORCH_", "NCCL_", "M8D_BED_"))}
    process = subprocess.Popen(
        [python, f"repro_{name}.py", "--backend", backend],
        cwd=UPSTREAM,
        env={**environment, "LD_PRELOAD": str(library), "PYTHONDONTWRITEBYTECODE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, errors = process.communicate(timeout=DEADLINE)
    finally:
        with_all_of(process)
    return process.returncode, out, errors


def with_all_of(process):
    """Kill the session that a process leads, and wait for it."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    finally:
        process.wait()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_defect_shows_unless_a_patch_ends_it(finished, build, case):
    if case.kind not in backends_of(build):
        pytest.skip(f"{build.name} has no {case.kind}")
    code, out, errors = finished(case)
    assert code == expected(build, case), out + errors
    assert re.fullmatch(rf"torch {re.escape(build.torch)}: (sound|DEFECT): .*\n", out)
    assert "m8d-bed" not in "".join(
        line for line in errors.splitlines() if "STUB" in line or "KERNEL" in line
    )


REPRODUCERS = sorted(UPSTREAM.glob("repro_*.py"))


class TestEachReproducer:
    @pytest.mark.parametrize("path", REPRODUCERS, ids=lambda path: path.stem)
    def test_has_an_issue_and_a_test(self, path):
        issues = [page.read_text() for page in UPSTREAM.glob("*.md") if page.stem != "README"]
        assert any(f"python {path.name}" in text for text in issues)
        if path.name not in ON_GLOO:
            assert any(f"repro_{case.name}.py" == path.name for case in CASES)

    @pytest.mark.parametrize(
        "path", [path for path in REPRODUCERS if path.name not in ON_GLOO], ids=lambda path: path.stem
    )
    def test_can_be_sent_as_one_file(self, path, monkeypatch):
        monkeypatch.syspath_prepend(str(UPSTREAM))
        from one_file import one_file

        text = one_file(path.name)
        ast.parse(text)
        assert "from ranks import" not in text
        assert ("ncclCommAbort(void *comm)" in text) == ("with_faults" in path.read_text())


def test_the_index_names_every_issue():
    index = (UPSTREAM / "README.md").read_text()
    for page in UPSTREAM.glob("*.md"):
        assert page.stem == "README" or f"({page.name})" in index, page.name
