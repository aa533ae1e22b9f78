"""Rendezvous handlers that a package registers: found by m8d-run as by torchrun, through torch's registry."""

from __future__ import annotations

import os

import pytest
from kits.contract.runkit import ROOT, launched

pytestmark = pytest.mark.everyday

# A rendezvous of one's own: torch's c10d under another name, which writes down that it was asked.
MODULE = """
import os
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

def handler(params):
    with open(os.environ["OWN_RENDEZVOUS"], "a") as file:
        file.write(f"{params.backend} {params.min_nodes} {params.config.get('colour')}\\n")
    backend, store = create_backend(params)
    made = create_handler(store, backend, params)
    made.get_backend = lambda: "own"  # torch wants to hear the name that it was registered under
    return made
"""


@pytest.mark.parametrize("restart", ["worker", "group"])
def test_a_handler_that_a_package_registers_is_used(tmp_path, restart):
    packages = tmp_path / "packages"
    info = packages / "own_rendezvous-1.0.dist-info"
    info.mkdir(parents=True)
    (packages / "own_rendezvous.py").write_text(MODULE)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: own-rendezvous\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[torchrun.handlers]\nown = own_rendezvous:handler_of\n")
    # The entry point gives torch the function that makes a handler.
    (packages / "own_rendezvous.py").write_text(MODULE + "\ndef handler_of():\n    return handler\n")
    asked = tmp_path / "asked"
    with launched(
        tmp_path,
        "tell('up')\n",
        options=[
            "--rdzv-backend", "own", "--rdzv-endpoint", "localhost:0", "--rdzv-conf", "colour=red",
            "--nproc-per-node", "2", "--restart", restart,
        ],
        env={"PYTHONPATH": f"{ROOT}{os.pathsep}{packages}", "OWN_RENDEZVOUS": str(asked)},
    ) as run:  # fmt: skip
        assert run.ended() == 0, run.report()
        assert len(run.told("up")) == 2
        assert run.leftovers() == []
    assert asked.read_text() == "own 1 red\n"


def test_an_unknown_handler_is_named_with_those_there_are(tmp_path):
    with launched(
        tmp_path, "tell('up')\n", options=["--rdzv-backend", "owm", "--rdzv-endpoint", "localhost:0"]
    ) as run:
        assert run.ended() == 2, run.report()
        assert "owm" in run.text("err")
        assert "c10d" in run.text("err")
        assert "Traceback" not in run.text()
        assert run.told() == []
