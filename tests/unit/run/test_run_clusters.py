"""m8d-run takes the nodes of a run from the scheduler, where no option says otherwise."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="the launcher takes torch's own options")

from multiworld.run.clusters import slurm
from multiworld.run.clusters.filling import fill
from multiworld.run.configuration import configure
from multiworld.run.errors import ArgumentsError
from multiworld.run.options import parse

STEP = {
    "SLURM_JOB_ID": "12", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "3", "SLURM_STEP_NODELIST": "n[07-09]",
    "SLURM_STEP_TASKS_PER_NODE": "1(x3)", "SLURM_NODEID": "0", "SLURMD_NODENAME": "n07",
}  # fmt: skip
GROUP = {
    "LWS_LEADER_ADDRESS": "lws-0.lws.prod", "LWS_GROUP_SIZE": "4", "LWS_WORKER_INDEX": "2", "POD_IP": "10.0.0.9"
}  # fmt: skip
POD = {"JOB_COMPLETION_INDEX": "3", "POD_IP": "10.0.0.7"}
POD_NAME = "train-3.train.prod.svc.cluster.local"


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    import os

    for name in list(os.environ):
        if name.startswith(("PET_", "TORCHELASTIC_", "OMP_NUM_THREADS")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def filled(environment, *words, name="host"):
    options = parse([*words, "script.py"])
    said = fill(options, environment, lambda: name)
    return configure(options)[0], said


def nodes_of(config):
    return config.min_nodes, config.max_nodes


def test_a_step_of_several_nodes_is_one_run():
    config, said = filled(STEP)
    assert nodes_of(config) == (3, 3)
    assert (config.rdzv_backend, config.rdzv_endpoint, config.run_id) == ("c10d", "n07:15012", "slurm-12.0")
    assert config.rdzv_configs["is_host"] == "1"
    assert said == "Slurm gives --nnodes 3 --rdzv-id slurm-12.0 --rdzv-endpoint n07:15012"


def test_the_other_nodes_of_a_step_do_not_serve_the_rendezvous():
    config, _ = filled({**STEP, "SLURM_NODEID": "1", "SLURMD_NODENAME": "n08"})
    assert config.rdzv_endpoint == "n07:15012"
    assert config.rdzv_configs["is_host"] == "0"


def test_a_step_without_node_names_goes_by_its_numbers():
    without = {name: value for name, value in STEP.items() if name != "SLURMD_NODENAME"}
    assert filled(without)[0].rdzv_configs["is_host"] == "1"
    assert filled({**without, "SLURM_NODEID": "2"})[0].rdzv_configs["is_host"] == "0"


def test_a_job_that_was_requeued_is_another_run():
    assert filled({**STEP, "SLURM_RESTART_COUNT": "0"})[0].run_id == "slurm-12.0"
    assert filled({**STEP, "SLURM_RESTART_COUNT": "2"})[0].run_id == "slurm-12.0-r2"


def test_reserved_ports_come_first_and_steps_differ_in_theirs():
    assert filled({**STEP, "SLURM_STEP_RESV_PORTS": "12003-12005"})[0].rdzv_endpoint == "n07:12003"
    ports = {
        filled({**STEP, "SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)})[0].rdzv_endpoint
        for job in range(100, 150)
        for step in range(4)
    }
    assert len(ports) == 200


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("n1", "n1"), ("n1,n2", "n1"), ("n[003-005,7],gpu1", "n003"), ("n[3,5]", "n3"), ("a[1-2]b[04-09]-x", "a1b04-x"),
        ("rack2-gpu[12-15]", "rack2-gpu12"), ("", ""),
    ],
)  # fmt: skip
def test_the_first_host_of_a_list(nodes, first):
    assert slurm.first_host(nodes) == first


@pytest.mark.parametrize(
    "changed",
    [
        {"SLURM_STEP_ID": ""},  # an sbatch script itself, without srun
        {"SLURM_STEP_NUM_NODES": "1"},
        {"SLURM_STEP_NODELIST": ""},
        {"SLURM_HET_SIZE": "2"},
    ],
)
def test_what_is_no_step_of_several_nodes_stays_a_run_of_one_node(changed):
    config, said = filled({**STEP, **changed})
    assert said == ""
    assert nodes_of(config) == (1, 1)
    assert config.rdzv_endpoint == "localhost:0"


@pytest.mark.parametrize("tasks", ["2(x3)", "1(x2),2", "12"])
def test_several_launchers_on_a_node_are_refused(tasks):
    with pytest.raises(ArgumentsError, match="--ntasks-per-node=1"):
        filled({**STEP, "SLURM_STEP_TASKS_PER_NODE": tasks})
    assert filled({**STEP, "SLURM_STEP_TASKS_PER_NODE": tasks}, "--standalone")[1] == ""


@pytest.mark.parametrize("words", [["--rdzv-id", ""], []], ids=["by an option", "by a variable"])
def test_an_id_of_nothing_is_not_given(words, monkeypatch):
    if not words:
        monkeypatch.setenv("PET_RDZV_ID", "")
    assert filled(STEP, *words)[0].run_id == "slurm-12.0"
    assert filled({}, "--nnodes", "2", "--rdzv-endpoint", "h:1", *words)[0].run_id == "none"


def test_options_win_each_for_itself():
    config, said = filled(STEP, "--nnodes", "2:3", "--rdzv-id", "mine")
    assert nodes_of(config) == (2, 3)
    assert config.run_id == "mine"
    assert config.rdzv_endpoint == "n07:15012"
    assert said == "Slurm gives --rdzv-endpoint n07:15012"
    config, said = filled(STEP, "--rdzv-endpoint", "other:1234")
    assert config.rdzv_endpoint == "other:1234"
    assert "is_host" not in config.rdzv_configs
    assert said == "Slurm gives --nnodes 3 --rdzv-id slurm-12.0"
    config, _ = filled(STEP, "--rdzv-conf", "is_host=0,join_timeout=9")
    assert config.rdzv_configs["is_host"] == "0"
    assert config.rdzv_configs["join_timeout"] == 9 or config.rdzv_configs["join_timeout"] == "9"


@pytest.mark.parametrize(
    "words",
    [
        ["--nnodes", "1"],
        ["--standalone"],
        ["--rdzv-backend", "static", "--nnodes", "2", "--master-addr", "h", "--master-port", "1"],
        ["--nnodes", "2", "--node-rank", "1", "--master-addr", "h", "--master-port", "1"],
    ],
)
def test_runs_of_one_node_and_static_ones_stay_as_they_are(words):
    config, said = filled(STEP, *words)
    assert said == ""
    assert not config.run_id.startswith("slurm")


def test_an_etcd_gets_no_endpoint_of_the_scheduler():
    options = parse(["--rdzv-backend", "etcd", "script.py"])
    assert fill(options, STEP, lambda: "host") == "Slurm gives --nnodes 3 --rdzv-id slurm-12.0"
    assert options.torch.rdzv_endpoint == ""


def test_a_variable_of_torchrun_counts_as_given(monkeypatch):
    monkeypatch.setenv("PET_NNODES", "2:4")
    assert nodes_of(filled(STEP)[0]) == (2, 4)


def test_pods_of_a_leader_worker_set():
    config, said = filled(GROUP)
    assert nodes_of(config) == (4, 4)
    assert config.rdzv_endpoint == "lws-0.lws.prod:29400"
    assert (config.run_id, config.local_addr) == ("lws-0.lws.prod", "10.0.0.9")
    assert config.rdzv_configs["is_host"] == "0"
    assert said.startswith("Kubernetes gives --nnodes 4 ")
    assert filled({**GROUP, "LWS_WORKER_INDEX": "0"})[0].rdzv_configs["is_host"] == "1"
    assert filled({**GROUP, "LWS_GROUP_SIZE": "1"})[1] == ""


def test_pods_of_a_job_find_the_first_by_their_names():
    config, said = filled(POD, "--nnodes", "4", name=POD_NAME)
    assert config.rdzv_endpoint == "train-0.train.prod.svc.cluster.local:29400"
    assert (config.run_id, config.local_addr) == ("train.train.prod", "10.0.0.7")
    assert config.rdzv_configs["is_host"] == "0"
    assert "--local-addr 10.0.0.7" in said
    first = filled({**POD, "JOB_COMPLETION_INDEX": "0"}, "--nnodes", "4", name="train-0.train.prod")[0]
    assert first.rdzv_configs["is_host"] == "1"


def test_a_job_without_a_number_of_nodes_is_one_run_per_pod():
    assert filled(POD, name=POD_NAME)[1] == ""
    assert filled(POD, "--nnodes", "1", name=POD_NAME)[1] == ""


@pytest.mark.parametrize("name", ["train-3", "train-2.train.prod", "train3.train.prod"])
def test_a_pod_whose_name_does_not_tell_the_others_says_what_to_do(name):
    with pytest.raises(ArgumentsError, match="headless service"):
        filled(POD, "--nnodes", "4", name=name)
    config, said = filled(POD, "--nnodes", "4", "--rdzv-endpoint", "h:1", name=name)
    assert (config.rdzv_endpoint, config.local_addr) == ("h:1", "10.0.0.7")
    assert said == "Kubernetes gives --local-addr 10.0.0.7"


def test_without_a_scheduler_nothing_is_set():
    assert filled({})[1] == ""
    assert filled({}, "--nnodes", "2", "--rdzv-endpoint", "h:1")[1] == ""
