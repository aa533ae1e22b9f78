"""deploy/systemd: the units are right, and a real systemd, process 1 of namespaces, runs them."""

from __future__ import annotations

import logging
import re
import subprocess
import time
from pathlib import Path

import pytest
from clusterworker import WORLDS, told
from systemdkit import Systemd, installed

ROOT = Path(__file__).parents[2]
UNITS = {each.name: each for each in sorted((ROOT / "deploy" / "systemd").glob("*.service"))}
WORKER = "/opt/m8d/source/tests/clusters/clusterworker.py"
PATIENCE = 120.0
"""Seconds, of workers that import torch on two cores with other work."""

log = logging.getLogger("measured")

pytestmark = [pytest.mark.everyday, pytest.mark.timeout(400)]

IN_A_HOME = """
[Service]
# This Python may be in a home.
ProtectHome=read-only
StandardOutput=append:/var/log/m8d.log
StandardError=append:/var/log/m8d.log
Environment=OMP_NUM_THREADS=1
"""

NODE = """
PET_NNODES=2
PET_NPROC_PER_NODE=1
PET_RDZV_ENDPOINT=127.0.0.1:29400
PET_RDZV_ID=train
PET_RDZV_CONF=is_host={serves}
PET_LOCAL_ADDR=127.0.0.1
PET_WORLDS=/etc/m8d/worlds.toml
M8D_RUN={worker} /var/lib/m8d-{name}
"""


def test_there_are_two_units():
    assert list(UNITS) == ["m8d-run.service", "m8d-run@.service"]


@pytest.mark.parametrize("name", UNITS)
def test_a_unit_is_correct_and_not_exposed(need, tmp_path, name):
    analyze = need("systemd-analyze", "apt-get install systemd")
    unit = tmp_path / name
    unit.write_text(UNITS[name].read_text().replace("/opt/m8d/bin/m8d-run", "/bin/true"))
    for words in (["verify", "--man=no"], ["security", "--offline=true", "--threshold=20", "--no-pager"]):
        done = subprocess.run(
            [analyze, *words, str(unit)], capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        if words[0] == "verify":
            assert done.stderr == ""


@pytest.mark.parametrize("name", UNITS)
def test_no_exit_code_keeps_a_unit_from_being_started_again(name):
    """`m8d-run` ends with a failed worker's code, whichever that is; the burst bounds the attempts."""
    unit = UNITS[name].read_text()
    assert "\nRestart=on-failure\n" in unit
    assert "\nRestartPreventExitStatus=" not in unit
    assert re.findall(r"^StartLimit\w+=\d+$", unit, re.MULTILINE) == [
        "StartLimitIntervalSec=600",
        "StartLimitBurst=5",
    ]


@pytest.fixture(scope="module")
def system(tmp_path_factory):
    if not installed():
        pytest.skip("there is no systemd here: apt-get install systemd")
    units = {name: path.read_text() for name, path in UNITS.items()}
    units |= {f"{name}.d/test.conf": IN_A_HOME for name in UNITS}
    files = {
        "/etc/m8d/worlds.toml": WORLDS.format(workers=1),
        "/etc/m8d/run.env": f"M8D_RUN={WORKER} /var/lib/m8d\n",
        "/etc/m8d/n1.env": NODE.format(serves=1, worker=WORKER, name="n1"),
        "/etc/m8d/n2.env": NODE.format(serves=0, worker=WORKER, name="n2"),
    }
    with Systemd(tmp_path_factory.mktemp("systemd"), units, files) as made:
        yield made


class Units:
    """Units that run clusterworker.py."""

    def __init__(self, system, *names):
        self.system, self.names = system, names
        self.folders = ["/var/lib/" + name.replace("-run", "").replace("@", "-") for name in names]

    def told(self, name, **match):
        folders = [self.system.path(each) for each in self.folders]
        return [each for folder in folders for each in told(folder, name, **match)]

    def wait(self, count, name, **match):
        def enough():
            return len(found := self.told(name, **match)) >= count and found

        try:
            return self.system.wait(enough, f"{count} x {name} {match}", PATIENCE)
        except AssertionError as error:
            log_file = self.system.path("/var/log/m8d.log")
            raise AssertionError(f"{error}\n{log_file.read_text() if log_file.exists() else ''}") from None


def may_read_memory():
    scope = Path("/proc/sys/kernel/yama/ptrace_scope")
    return not scope.exists() or scope.read_text().strip() == "0"


def test_workers_and_the_launcher_are_restarted_and_a_stop_ends_all(system):
    unit = Units(system, "m8d-run")
    system.ctl("enable", "--now", "m8d-run")
    active = unit.wait(2, "active", generation=1)
    if may_read_memory():  # the unit does not forbid it
        assert [each["reads"] for each in sorted(active, key=lambda each: each["rank"])] == [[1], [0]]
    launcher = system.main("m8d-run")

    status = ("env", "XDG_RUNTIME_DIR=/run/m8d", "/opt/m8d/bin/m8d-run", "status")
    assert "1 world: 1 active" in system.run("runuser", "-u", "m8d", "--", *status)

    (worker,) = unit.told("born", rank=1)
    system.run("kill", "-9", str(worker["pid"]))
    unit.wait(2, "active", generation=2)
    assert len(unit.told("born", rank=0)) == 1
    assert system.main("m8d-run") == launcher
    assert system.show("m8d-run", "NRestarts") == "0"

    before = set(system.pids("m8d-run"))
    system.run("kill", "-9", str(launcher))
    unit.wait(4, "active", generation=1)
    assert system.show("m8d-run", "NRestarts") == "1"
    assert before.isdisjoint(system.pids("m8d-run"))

    at = time.monotonic()
    system.ctl("stop", "m8d-run")
    log.info("systemctl stop took %.1f s", time.monotonic() - at)
    assert system.show("m8d-run", "ActiveState") == "inactive"
    assert system.show("m8d-run", "Result") == "success"
    assert system.pids("m8d-run") == []


def test_wrong_arguments_are_tried_as_often_as_the_unit_says(system):
    """A worker's 2, as Python ends with where it cannot open its program, is `m8d-run`'s, too: both are tried again."""
    system.path("/etc/m8d/run.env").write_text("M8D_RUN=--no-such-option\n")
    try:
        system.ctl("start", "m8d-run", check=False)
        system.wait(lambda: system.show("m8d-run", "ActiveState") == "failed", "the unit fails", PATIENCE)
        assert system.show("m8d-run", "ExecMainStatus") == "2"
        assert system.show("m8d-run", "NRestarts") == "5"
    finally:
        system.ctl("reset-failed", "m8d-run", check=False)


def test_nodes_of_a_run_are_instances(system):
    """Two on one machine; the launchers meet by what their files say."""
    units = Units(system, "m8d-run@n1", "m8d-run@n2")
    system.ctl("start", *units.names)
    units.wait(2, "active", generation=1)
    assert {each["run"] for each in units.told("born")} == {"train"}
    assert [len(told(system.path(each), "born")) for each in units.folders] == [1, 1]
    for folder in units.folders:
        system.path(f"{folder}/go").touch()
    for name in units.names:
        system.wait(
            lambda name=name: system.show(name, "ActiveState") == "inactive", f"{name} ends", PATIENCE
        )
        assert system.show(name, "Result") == "success"
        assert system.show(name, "ExecMainStatus") == "0"
