"""deploy/kubernetes: whom its policies let in, and how many pods its budgets let a drain of machines take."""

from __future__ import annotations

import pytest

pytest.importorskip("yaml", reason="manifests are YAML: pip install pyyaml")

from podkit import MANIFESTS, documents, identity, template

pytestmark = [pytest.mark.everyday]

RUNS = ["job.yaml", "jobset.yaml", "leaderworkerset.yaml", "statefulset.yaml"]
FOUND = {"Exists": True, "DoesNotExist": False}


def labels(name):
    """The labels of a manifest's pods, those that their controller adds too."""
    added = {} if name == "etcd.yaml" else identity(name, 0)[2]
    return {**template(name)["metadata"]["labels"], **added}


def selects(selector, of):
    return selector.get("matchLabels", {}).items() <= of.items() and all(
        (each["key"] in of) is FOUND[each["operator"]] for each in selector.get("matchExpressions", ())
    )


def selected(file, name, selector):
    return [each for each in documents(file) if selects(each["spec"][selector], labels(name))]


def pods(name):
    """How many pods a manifest makes."""
    for each in documents(name):
        spec = each["spec"]
        match each["kind"]:
            case "Job":
                return spec["completions"]
            case "StatefulSet":
                return spec["replicas"]
            case "JobSet":
                return sum(
                    job["replicas"] * job["template"]["spec"]["completions"] for job in spec["replicatedJobs"]
                )
            case "LeaderWorkerSet":
                return spec["replicas"] * spec["leaderWorkerTemplate"]["size"]
    raise AssertionError(f"{name} has no pods")


@pytest.mark.parametrize("name", ["networkpolicy.yaml", "poddisruptionbudget.yaml"])
def test_policies_select_the_pods_of_a_run(name):
    for each in documents(name):
        selector = each["spec"].get("podSelector") or each["spec"]["selector"]
        assert any(selects(selector, labels(of)) for of in [*RUNS, "etcd.yaml"])


@pytest.mark.parametrize("name", RUNS)
def test_a_drain_takes_one_pod_at_a_time(name):
    """By one budget: the API server evicts no pod that two budgets select."""
    (budget,) = selected("poddisruptionbudget.yaml", name, "selector")
    spec = budget["spec"]
    away = spec["maxUnavailable"] if "maxUnavailable" in spec else pods(name) - spec["minAvailable"]
    assert away == 1


@pytest.mark.parametrize("name", RUNS)
def test_pods_of_a_broken_world_are_not_evicted_past_the_budget(name):
    """They run and are not ready; `AlwaysAllow` would let the API server evict all of them at once."""
    (budget,) = selected("poddisruptionbudget.yaml", name, "selector")
    assert budget["spec"].get("unhealthyPodEvictionPolicy", "IfHealthyBudget") == "IfHealthyBudget"


@pytest.mark.parametrize("name", [each for each in RUNS if "etcd:2379" in (MANIFESTS / each).read_text()])
def test_etcd_lets_in_the_pods_that_a_manifest_leads_to_it(name):
    """As a comment as well, which is there to be taken."""
    (policy,) = selected("networkpolicy.yaml", "etcd.yaml", "podSelector")
    let_in = [peer["podSelector"] for rule in policy["spec"]["ingress"] for peer in rule["from"]]
    assert any(selects(each, labels(name)) for each in let_in)


def test_the_manifests_with_an_etcd_are_known():
    named = [each for each in RUNS if "etcd:2379" in (MANIFESTS / each).read_text()]
    assert named == ["job.yaml", "jobset.yaml", "statefulset.yaml"]
