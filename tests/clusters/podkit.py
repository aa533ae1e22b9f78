"""Pods of the shipped manifests as containers on hosts of a network of this test, and what a kubelet does with them.

Of a pod the manifest says everything but what controllers add: the index, host name and subdomain, and the
variables of a LeaderWorkerSet.
"""

from __future__ import annotations

import ctypes
import http.client
import os
import re
import sys
import threading
import time
from pathlib import Path

import yaml
from containerkit import PATIENCE, ROOT, Container, Security, bind, default_profile

MANIFESTS = ROOT / "deploy" / "kubernetes"
PROGRAMS = {"pipeline": ROOT / "examples" / "elastic_pipeline", "fleet": MANIFESTS / "fleet"}
"""Folders that the manifests' ConfigMaps are made from."""
TOKEN = "0123456789abcdef"  # noqa: S105  (of a page that ends with the test)
NAMESPACE = "m8d"
NEW_NET = 0x40000000


def documents(name):
    return list(yaml.safe_load_all((MANIFESTS / name).read_text()))


def of_kind(name, kind):
    (found,) = [each for each in documents(name) if each["kind"] == kind]
    return found


def template(name):
    """The pod template of a manifest's workload."""
    for each in documents(name):
        match each["kind"]:
            case "Job" | "StatefulSet":
                return each["spec"]["template"]
            case "JobSet":
                return each["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
            case "LeaderWorkerSet":
                return each["spec"]["leaderWorkerTemplate"]["workerTemplate"]
    raise AssertionError(f"{name} has no pods")


def identity(name, index):
    """Host name, subdomain, and what controllers add to the labels and the variables of the pod of an index."""
    (found,) = [
        each
        for each in documents(name)
        if each["kind"] in {"Job", "JobSet", "LeaderWorkerSet", "StatefulSet"}
    ]
    own, spec = found["metadata"]["name"], found["spec"]
    of_job = {"batch.kubernetes.io/controller-uid": f"uid-of-{own}"}
    match found["kind"]:
        case "Job":
            return (
                f"{own}-{index}",
                spec["template"]["spec"]["subdomain"],
                of_job,
                {"JOB_COMPLETION_INDEX": str(index)},
            )
        case "JobSet":
            job = spec["replicatedJobs"][0]["name"]
            domain = spec["network"]["subdomain"]
            return f"{own}-{job}-0-{index}", domain, of_job, {"JOB_COMPLETION_INDEX": str(index)}
        case "StatefulSet":
            return f"{own}-{index}", spec["serviceName"], {"apps.kubernetes.io/pod-index": str(index)}, {}
    size = spec["leaderWorkerTemplate"]["size"]
    told = {
        "LWS_LEADER_ADDRESS": f"{own}-0.{own}.{NAMESPACE}",
        "LWS_GROUP_SIZE": str(size),
        "LWS_WORKER_INDEX": str(index),
    }
    labels = {"leaderworkerset.sigs.k8s.io/name": own}
    return f"{own}-0" + (f"-{index}" if index else ""), own, labels, told


def environment(name, index, address):
    """The variables of the container, as a kubelet has them from the manifest."""
    _, _, labels, env = identity(name, index)
    (container,) = template(name)["spec"]["containers"]
    for each in container.get("env", ()):
        source = each.get("valueFrom")
        if source is None:
            env[each["name"]] = each["value"]
        elif "secretKeyRef" in source:
            env[each["name"]] = TOKEN
        elif (path := source["fieldRef"]["fieldPath"]) == "status.podIP":
            env[each["name"]] = address
        else:
            env[each["name"]] = labels[re.fullmatch(r"metadata\.labels\['(.+)'\]", path)[1]]
    return env


class Pod(Container):
    """A pod of a manifest, on the host `number` of a network."""

    def __init__(self, cluster, name, index, number):
        self.address = cluster.network.address(number)
        self.host, self.domain, _, _ = identity(name, index)
        spec = template(name)["spec"]
        (self.spec,) = spec["containers"]
        rights = spec["securityContext"]
        assert self.spec["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        security = Security(
            user=rights["runAsUser"],
            read_only=self.spec["securityContext"]["readOnlyRootFilesystem"],
            # what the filters of Docker and containerd refuse, and that of CRI-O allows.
            seccomp=default_profile("unshare"),
        )
        volumes = {each["name"]: each for each in spec["volumes"]}
        mounts = [
            bind(PROGRAMS[volumes[each["name"]]["configMap"]["name"]], each["mountPath"])
            for each in self.spec["volumeMounts"]
            if "configMap" in volumes[each["name"]]
        ]
        super().__init__(
            cluster.folder,
            [sys.executable, "-m", "multiworld.run", *cluster.changed(self.spec["args"])],
            {**environment(name, index, self.address), "PET_VERBOSE": "1", "M8D_HANG_TIMEOUT": "30"},
            name=self.host,
            security=security,
            netns=cluster.network.hosts[number - 1],
            hosts=cluster.hosts(),
            mounts=mounts,
        )

    @property
    def names(self):
        """By which others find it, the full one first."""
        short = f"{self.host}.{self.domain}"
        return f"{short}.{NAMESPACE}.svc.cluster.local", f"{short}.{NAMESPACE}", short, self.host


class Cluster:
    """Pods that find each other by their names; they end with the test.

    Args:
        folder: of the test.
        network: a `kits.netkit.Network` whose last host is the machine that probes.
        changes: for arguments of the manifest, by what they begin with.
    """

    def __init__(self, folder, network, **changes):
        self.folder = folder
        self.network = network
        self.pods = []
        self.others = {}
        self._changes = changes

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for pod in self.pods:
            pod.close()

    def changed(self, arguments):
        made = {f"--{name.replace('_', '-')}": value for name, value in self._changes.items()}
        return [
            f"{each.partition('=')[0]}={made[each.partition('=')[0]]}"
            if each.partition("=")[0] in made
            else each
            for each in arguments
        ]

    def start(self, name, index, number=None):
        """Start the pod of an index, on a host; a new pod of a name takes it over."""
        pod = Pod(self, name, index, index + 1 if number is None else number)
        self.pods = [*self.pods, pod]
        text = self.hosts()
        for each in self.pods:
            each.hosts.write_text(text)  # as a name server's answer changes
        return pod

    def hosts(self):
        found = {each.host: each for each in self.pods}
        lines = [f"{each.address} {' '.join(each.names)}" for each in found.values()]
        lines += [f"{address} {name}" for name, address in self.others.items()]
        return "\n".join(["127.0.0.1 localhost", *lines, ""])

    def probe(self, pod, kind):
        """Probe a pod from its machine, as a kubelet does; return the status, 0 where there is no answer."""
        get = pod.spec[f"{kind}Probe"]["httpGet"]
        (port,) = [each["containerPort"] for each in pod.spec["ports"] if each["name"] == get["port"]]
        return self.get(pod, port, get["path"], pod.spec[f"{kind}Probe"].get("timeoutSeconds", 1))

    def get(self, pod, port, path, timeout=5.0, **headers):
        def ask():
            link = http.client.HTTPConnection(pod.address, port, timeout=timeout)
            try:
                link.request(
                    "GET", path, headers={"User-Agent": "kube-probe/1.36", "Connection": "close", **headers}
                )
                return link.getresponse().status
            except OSError:
                return 0
            finally:
                link.close()

        return within(self.network.hosts[-1], ask)

    def until(self, pod, kind, status):
        """Probe until this status comes.

        Where a worker takes half a minute to start, the others' joins time out, and theirs begin anew.
        """
        end = time.monotonic() + 2 * PATIENCE
        while (found := self.probe(pod, kind)) != status:
            assert pod.process.poll() is None, pod.report()
            assert time.monotonic() < end, f"{kind}: {found}\n{pod.report()}"
            time.sleep(0.1)


def within(netns, function):
    """Call a function in a network namespace; return what it returns."""
    found = []

    def enter():
        handle = os.open(Path("/run/netns") / netns, os.O_RDONLY)
        try:
            assert ctypes.CDLL(None, use_errno=True).setns(handle, NEW_NET) == 0
        finally:
            os.close(handle)
        found.append(function())

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    return found[0]
