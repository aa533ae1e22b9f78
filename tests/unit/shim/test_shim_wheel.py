"""The probe of check-wheel that looks at torch.distributed.multiworld, on small torches with and without it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from kits import shimkit

from m8d_build.check.cases import all_cases
from m8d_build.check.native import PROBES
from multiworld.shim.loader import LOADER_ENTRY, loader_text
from multiworld.shim.marker import Marker, Topic

MARKER = Marker("2.6.0", "cu124.m8d1", "c" * 40, (Topic("marker", "0" * 64),), "full", "0", None)


@pytest.mark.parametrize("kind", ["stock", "patched"])
def test_the_probe_tells_a_wheel_with_the_loader_from_one_without(tmp_path, kind):
    case = next(case for case in all_cases(MARKER) if case.name == "namespace")
    more = {LOADER_ENTRY: loader_text()} if kind == "patched" else {}
    site = shimkit.make_site(tmp_path / "site", more=more)
    script, *arguments = case.programs[0]
    work = tmp_path / "work"
    work.mkdir()
    command = [str(PROBES / script), *(argument.replace("{work}", str(work)) for argument in arguments)]
    code = f"import runpy, sys; sys.path.insert(0, {str(site.root)!r}); sys.argv = {command!r}; runpy.run_path(sys.argv[0])"
    done = subprocess.run(
        [sys.executable, "-I", "-B", "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.removeprefix("M8D "))["outcome"] == case.expected(kind)
