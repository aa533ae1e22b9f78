"""deploy/kubernetes: its manifests against the published schemas and against what m8d-run does, and their pods as containers."""

from __future__ import annotations

import os
import re
import shlex
import signal
import time
from functools import partial

import pytest

pytest.importorskip("yaml", reason="manifests are YAML: pip install pyyaml")

import containerkit
from containerkit import PATIENCE, Container, Security, scratch
from kits.netkit import Network
from podkit import (
    MANIFESTS,
    NAMESPACE,
    PROGRAMS,
    TOKEN,
    Cluster,
    documents,
    environment,
    identity,
    of_kind,
    template,
)

from multiworld.run.clusters.filling import fill
from multiworld.run.configuration import configure
from multiworld.run.options import parse
from multiworld.run.worldsfile.load import load

pytestmark = [pytest.mark.everyday, pytest.mark.timeout(600)]

RUNS = ["job.yaml", "jobset.yaml", "leaderworkerset.yaml", "statefulset.yaml"]
NAMES = sorted(path.name for path in MANIFESTS.glob("*.yaml"))
SCHEMAS = ("1.30", "1.37")
"""Versions of Kubernetes, the oldest and the newest that the pages name."""
PODS = 3


def container(name):
    (found,) = template(name)["spec"]["containers"]
    return found


@pytest.fixture
def clean(monkeypatch):
    for name in list(os.environ):
        if name.startswith(("PET_", "TORCHELASTIC_", "SLURM")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def parsed(name):
    """The options of the container's arguments; ConfigMaps are the folders that they are made from."""
    volume = container(name)["volumeMounts"][-1]
    (source,) = [each for each in template(name)["spec"]["volumes"] if each["name"] == volume["name"]]
    folder = str(PROGRAMS[source["configMap"]["name"]])
    return parse([each.replace(volume["mountPath"], folder) for each in container(name)["args"]])


# -- what is written ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", SCHEMAS)
@pytest.mark.parametrize("name", NAMES)
def test_manifests_are_valid_by_the_published_schemas(name, version):
    """Also the Jobs and pods within JobSets and LeaderWorkerSets, whose own schemas no package has."""
    validate = pytest.importorskip(
        "kubernetes_validate", reason="the schemas: pip install kubernetes-validate"
    ).validate
    for each in documents(name):
        spec = each["spec"]
        match each["kind"]:
            case "JobSet":
                for job in spec["replicatedJobs"]:
                    meta = {"name": job["name"]}
                    validate(
                        {"apiVersion": "batch/v1", "kind": "Job", "metadata": meta, **job["template"]},
                        version,
                        strict=True,
                    )
            case "LeaderWorkerSet":
                inner = spec["leaderWorkerTemplate"]["workerTemplate"]
                pods = {
                    "apiVersion": "v1",
                    "kind": "PodTemplate",
                    "metadata": {"name": "worker"},
                    "template": inner,
                }
                validate(pods, version, strict=True)
            case _:
                validate(each, version, strict=True)


@pytest.mark.parametrize("name", RUNS)
def test_arguments_are_those_of_m8d_run_and_give_all_pods_one_run(name, clean):
    found = []
    for index in range(PODS):
        host, domain, _, _ = identity(name, index)
        options = parsed(name)
        full_name = f"{host}.{domain}.{NAMESPACE}.svc.cluster.local"
        said = fill(options, environment(name, index, f"10.0.0.{index}"), partial(str, full_name))
        plan = load(options.worlds)
        config = configure(options, plan)[0]
        assert f"--local-addr 10.0.0.{index}" in said
        found.append((config.rdzv_endpoint, config.run_id, config.rdzv_backend))
        if config.rdzv_backend == "c10d":
            assert config.rdzv_configs["is_host"] == str(int(index == 0))
            first, first_domain, _, _ = identity(name, 0)
            assert config.rdzv_endpoint.startswith(f"{first}.{first_domain}.{NAMESPACE}")
            assert config.min_nodes == config.max_nodes == PODS
    assert len(set(found)) == 1


@pytest.mark.parametrize("name", ["job.yaml", "jobset.yaml"])
def test_each_job_is_a_run_of_its_own(name):
    """In an etcd torch keeps the rendezvous of a run that is over closed for two hours."""
    assert environment(name, 0, "10.0.0.1")["PET_RDZV_ID"].startswith("uid-of-")
    assert "--rdzv-id" not in (MANIFESTS / name).read_text()


def test_a_job_fails_with_the_first_index_that_has_no_pods_left():
    """Else its other pods go on without that one's ranks, and a JobSet does not start the run again."""
    (nodes,) = of_kind("jobset.yaml", "JobSet")["spec"]["replicatedJobs"]
    for spec in (of_kind("job.yaml", "Job")["spec"], nodes["template"]["spec"]):
        assert spec["backoffLimitPerIndex"] > 0
        assert spec["maxFailedIndexes"] == 0


@pytest.mark.parametrize("name", RUNS)
def test_probes_ask_the_page_at_its_port(name):
    pod, spec = container(name), template(name)["spec"]
    port = parsed(name).web.rpartition(":")[2]
    assert parsed(name).web.startswith("0.0.0.0:")
    (web,) = [each for each in pod["ports"] if each["name"] == "web"]
    assert (
        str(web["containerPort"]) == port == template(name)["metadata"]["annotations"]["prometheus.io/port"]
    )
    assert {kind: pod[f"{kind}Probe"]["httpGet"] for kind in ("startup", "liveness", "readiness")} == {
        "startup": {"path": "/live", "port": "web"},
        "liveness": {"path": "/live", "port": "web"},
        "readiness": {"path": "/ready", "port": "web"},
    }
    assert pod["livenessProbe"]["timeoutSeconds"] > 2, "the page waits so long for its launcher"
    assert "serviceAccountName" not in spec


@pytest.mark.parametrize("name", RUNS)
def test_the_grace_period_is_longer_than_what_m8d_run_takes(name):
    options = parsed(name)
    assert template(name)["spec"]["terminationGracePeriodSeconds"] >= options.drain + options.grace + 5


@pytest.mark.parametrize("name", [*RUNS, "etcd.yaml"])
def test_pods_run_without_rights(name):
    pod = container(name)
    assert template(name)["spec"]["securityContext"].items() >= {
        "runAsNonRoot": True, "runAsUser": containerkit.USER, "seccompProfile": {"type": "RuntimeDefault"},
    }.items()  # fmt: skip
    assert pod["securityContext"] == {
        "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
    }  # fmt: skip
    assert template(name)["spec"]["automountServiceAccountToken"] is False


@pytest.mark.parametrize("name", ["job.yaml", "statefulset.yaml"])
def test_headless_services_name_pods_before_they_are_ready(name):
    service = of_kind(name, "Service")
    spec = of_kind(name, "Job" if name == "job.yaml" else "StatefulSet")["spec"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    subdomain = spec["serviceName"] if "serviceName" in spec else spec["template"]["spec"]["subdomain"]
    assert service["metadata"]["name"] == subdomain
    assert service["spec"]["selector"].items() <= spec["template"]["metadata"]["labels"].items()


def test_what_meets_before_it_is_ready_is_not_started_one_by_one():
    assert of_kind("statefulset.yaml", "StatefulSet")["spec"]["podManagementPolicy"] == "Parallel"
    assert of_kind("leaderworkerset.yaml", "LeaderWorkerSet")["spec"]["startupPolicy"] == "LeaderCreated"
    assert of_kind("jobset.yaml", "JobSet")["spec"]["network"]["publishNotReadyAddresses"] is True


# -- what runs ------------------------------------------------------------------------------------------------------


@pytest.fixture
def cluster(tmp_path, need):
    containerkit.check(need)
    with Network(PODS + 3) as network, Cluster(tmp_path, network) as made:
        yield made


def all_ready(cluster, pods):
    for pod in pods:
        cluster.until(pod, "readiness", 200)
    assert [cluster.probe(pod, "liveness") for pod in pods] == [200] * len(pods)


@pytest.mark.parametrize("name", ["jobset.yaml", "leaderworkerset.yaml"])
def test_pods_meet(cluster, name):
    pods = [cluster.start(name, index) for index in range(PODS)]
    all_ready(cluster, pods)
    starts = sum(len(pod.wait_line('"event": "started"')) for pod in pods)
    assert starts == 7, "workers of the worlds file"


def test_a_job_loses_a_pod_and_gets_another(cluster):
    name = "job.yaml"
    pods = [cluster.start(name, 0), cluster.start(name, 1)]
    cluster.until(pods[0], "startup", 200)
    assert cluster.probe(pods[0], "readiness") == 503, "it waits for the third"
    pods.append(cluster.start(name, 2))
    all_ready(cluster, pods)
    assert cluster.get(pods[0], 8080, "/metrics") == 401
    assert cluster.get(pods[0], 8080, "/metrics", Authorization=f"Bearer {TOKEN}") == 200
    assert cluster.get(pods[0], 8080, "/ready", Host="pipeline-0.pipeline:8080") == 421, (
        "a name that it was not told"
    )
    workers = {pod.host: sorted(pod.inside("/app/pipeline.py")) for pod in pods}
    pods[1].kill()
    cluster.until(pods[0], "readiness", 503)
    assert cluster.probe(pods[0], "liveness") == 200
    pods[1] = cluster.start(name, 1, PODS + 1)  # another address, the same name
    all_ready(cluster, pods)
    for pod in (pods[0], pods[2]):
        assert sorted(pod.inside("/app/pipeline.py")) == workers[pod.host], "what was healthy has gone on"
    began = time.monotonic()
    pods[2].tell(signal.SIGTERM)
    assert pods[2].ended() == 128 + signal.SIGTERM
    assert time.monotonic() - began < template(name)["spec"]["terminationGracePeriodSeconds"]
    cluster.until(pods[0], "readiness", 503)


def etcd(cluster, tmp_path, need):
    """The pod of etcd.yaml, on the host before the machine's."""
    need("etcd", "apt-get install etcd-server")
    spec, number = container("etcd.yaml"), PODS + 2
    cluster.others["etcd"] = cluster.network.address(number)
    made = Container(
        tmp_path, [*spec["command"], *spec["args"]], {}, name="etcd-0", security=Security(),
        netns=cluster.network.hosts[number - 1], hosts=f"127.0.0.1 localhost\n{cluster.others['etcd']} etcd\n",
        mounts=[scratch("/data")],
    )  # fmt: skip
    made.wait_line("ready to serve client requests")
    return made


def members(pod):
    """How many members the workers of a pod say that their world has, one after the other."""
    said = [shlex.split(line) for line in pod.lines("out") if " members, step " in line]
    return [int(words[words.index("members,") - 1]) for words in said]


def until_members(pods, count):
    end = time.monotonic() + PATIENCE
    while any(members(pod)[-1:] != [count] for pod in pods):
        assert time.monotonic() < end, "\n".join(pod.report() for pod in pods)
        time.sleep(0.05)


def test_a_fleet_is_scaled_and_a_pod_that_ends_leaves_first(cluster, tmp_path, need):
    pytest.importorskip("etcd", reason="torch's etcd rendezvous needs python-etcd")
    name, store = "statefulset.yaml", etcd(cluster, tmp_path, need)
    try:
        pods = [cluster.start(name, index) for index in range(2)]
        until_members(pods, 2)
        pods.append(cluster.start(name, 2))  # kubectl scale statefulset fleet --replicas 3
        until_members(pods, 3)
        all_ready(cluster, pods)
        pods[0].tell(signal.SIGTERM)
        assert pods[0].ended() == 128 + signal.SIGTERM
        assert re.search(
            r"^worker [01] has left after step", pods[0].text("out"), re.MULTILINE
        )  # who came first is 0
        until_members(pods[1:], 2)
        assert not any('"state": "broken"' in line for pod in pods[1:] for line in pod.lines())
        all_ready(cluster, pods[1:])
        pods[0] = cluster.start(name, 0, PODS + 1)  # no pod is special
        until_members(pods, 3)
        all_ready(cluster, pods)
    finally:
        store.close()
