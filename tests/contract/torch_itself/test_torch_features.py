"""Everything in the contract's list, in two worlds of one process at once, on whatever torch runs this.

Each mode is one pair of processes that goes through all features; each feature is a test of its own. What this torch
cannot do on gloo and CPU without multiworld either is skipped, with the error that plain torch gave.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

ROOT = Path(__file__).parents[3]
BATTERY = ROOT / "tests" / "kits" / "contract" / "battery"
MODES = ("interleaved", "beside", "threads", "tasks")
DEADLINE = 150.0
"""Seconds for a pair of processes; they take 10 to 40."""


def features() -> list[str]:
    """Read the features' names without importing torch's parallel libraries into this process."""
    return [
        node.name
        for name in ("features_ops.py", "features_parallel.py")
        for node in ast.parse((BATTERY / name).read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef)
        and any(isinstance(each, ast.Name) and each.id == "feature" for each in node.decorator_list)
    ]


@functools.cache
def run(mode: str) -> tuple[dict[str, list[str]], str]:
    """Run both ranks in `mode`; return each feature's errors ("" where a rank was well), and what was printed."""
    import datetime as dt

    import torch.distributed as dist

    store = dist.TCPStore(
        "127.0.0.1", 0, 3, is_master=True, wait_for_workers=False, timeout=dt.timedelta(seconds=90)
    )
    with tempfile.TemporaryDirectory() as folder:
        outs = [Path(folder) / f"{rank}.jsonl" for rank in range(2)]
        logs = [Path(folder) / f"{rank}.log" for rank in range(2)]
        processes: list[subprocess.Popen[bytes]] = []
        path = [str(ROOT), str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])]
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
        handles = [log.open("wb") for log in logs]
        try:
            for rank in range(2):
                command = [
                    sys.executable,
                    "-m",
                    "kits.contract.battery",
                    mode,
                    str(rank),
                    str(store.port),
                    str(outs[rank]),
                ]
                processes.append(
                    subprocess.Popen(command, stdout=handles[rank], stderr=subprocess.STDOUT, env=environ)
                )
            end = time.monotonic() + DEADLINE
            for process in processes:
                # Killed below if it does not come to its end.
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=max(0.1, end - time.monotonic()))
        finally:
            for process in processes:
                process.kill()
                process.wait()
            for handle in handles:
                handle.close()
        printed = "\n".join(log.read_text(errors="replace")[-4000:] for log in logs)
        found: dict[str, list[str]] = {}
        for out in outs:
            lines = out.read_text(encoding="utf-8").splitlines() if out.exists() else []
            for line in lines:
                result: dict[str, Any] = json.loads(line)
                found.setdefault(result["feature"], []).append(result["detail"])
        codes = [process.returncode for process in processes]
        return found, f"exit codes {codes}\n{printed}"


def error_of(traceback: str) -> str:
    """The line that names the error; some of torch's go on for pages after it."""
    lines = [line for line in traceback.splitlines() if re.match(r"[\w.]*(Error|Exception)\b", line)]
    return lines[-1] if lines else traceback


@pytest.mark.timeout(3 * DEADLINE)
@pytest.mark.parametrize("feature", features())
@pytest.mark.parametrize("mode", MODES)
def test_feature_in_two_worlds_at_once(mode: str, feature: str) -> None:
    plain, printed = run("stock")
    if feature not in plain:
        pytest.fail(f"plain torch did not get to {feature}: {printed}")
    reasons = [error_of(detail) for detail in plain[feature] if detail]
    if reasons:
        pytest.skip(f"plain torch cannot do it either, on gloo and CPU: {reasons[0]}")
    found, printed = run(mode)
    assert feature in found, f"the processes did not get to {feature}: {printed}"
    errors = [detail for detail in found[feature] if detail]
    assert not errors, "\n".join(errors)
    assert len(found[feature]) == 2, printed


@pytest.mark.timeout(3 * DEADLINE)
@pytest.mark.parametrize("mode", ["stock", *MODES])
def test_the_processes_end_by_themselves(mode: str) -> None:
    found, printed = run(mode)
    assert len(found.get("", [])) == 2, printed
    assert printed.startswith("exit codes [0, 0]"), printed
