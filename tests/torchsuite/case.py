"""Run the suite in this process, and tell of each test as a line of JSON: ``python -m torchsuite.case stock|world FILE``.

Its ranks are forked from here. In a world they join one instead of calling `init_process_group`, and run the test in
its block; nothing else differs. The environment says how many ranks (WORLD_SIZE); `tests`, which ones (default: all).
"""

from __future__ import annotations

import importlib
import json
import sys
import time
import unittest
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal import common_distributed
from torch.testing._internal.distributed import distributed_test

MOST = 120
"""Seconds for one test; the slowest takes 10 on a quiet machine."""


class _Forked(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):  # type: ignore[misc]
    def setUp(self) -> None:
        super().setUp()
        self._start_processes(torch.multiprocessing.get_context("fork").Process)
        torch.backends.cudnn.flags(enabled=True, allow_tf32=False).__enter__()


class Stock(_Forked):
    """As torch runs it."""


class World(_Forked):
    """The same tests, in the block of a world."""

    @classmethod
    def _run(cls, rank: int, test_name: str, file_name: str, pipe: Any, **_more: Any) -> None:
        import multiworld as mw

        self = cls(test_name)
        self.rank, self.file_name = rank, file_name
        timeout = distributed_test.CUSTOM_PG_TIMEOUT.get(test_name, distributed_test.default_pg_timeout)
        world = mw.join(
            "suite",
            rank,
            int(self.world_size),
            store=f"file://{file_name}",
            backend=distributed_test.BACKEND,
            timeout=timeout,
            hang_timeout=60,
        )
        with world:
            self._barrier()
            self.run_test(test_name, pipe)
            self._barrier()
            dist.destroy_process_group()
        sys.exit(0)


class _Telling(unittest.TestResult):
    def __init__(self, out: Path) -> None:
        super().__init__()
        self._out = out
        self._began = 0.0

    def startTest(self, test: unittest.TestCase) -> None:  # noqa: N802  (unittest's name)
        super().startTest(test)
        self._began = time.monotonic()

    def _tell(self, test: unittest.TestCase, ended: str, said: str) -> None:
        line = {
            "test": test.id().rpartition(".")[2],
            "ended": ended,
            "said": said,
            "seconds": round(time.monotonic() - self._began, 2),
        }
        with self._out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def addSuccess(self, test: unittest.TestCase) -> None:  # noqa: N802  (unittest's name)
        self._tell(test, "passed", "")

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:  # noqa: N802  (unittest's name)
        self._tell(test, "skipped", reason)

    def addError(self, test: unittest.TestCase, err: Any) -> None:  # noqa: N802  (unittest's name)
        self._tell(test, "failed", self._exc_info_to_string(err, test))  # type: ignore[attr-defined]

    addFailure = addError  # noqa: N815  (the same)


def main(argv: list[str]) -> None:
    """Run the tests that `argv` names, or all.

    Args:
        argv: "stock" or "world", the file to tell in, names of tests.
    """
    mode, out, *names = argv
    common_distributed.TIMEOUT_DEFAULT = MOST
    kind = {"stock": Stock, "world": World}[mode]
    if kind is World:
        # Here, once: the ranks of each test are forked from this process.
        importlib.import_module("multiworld._join.join")
        importlib.import_module("multiworld._c10d.groups")
        importlib.import_module("multiworld._c10d.routing.router")
    chosen = names or unittest.TestLoader().getTestCaseNames(kind)
    result = _Telling(Path(out))
    for name in chosen:
        kind(name).run(result)


if __name__ == "__main__":
    main(sys.argv[1:])
