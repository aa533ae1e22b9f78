"""The alert rules and the dashboard: they parse, and name only what the collector gives."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from fakeworlds import collected
from unit.web.test_views import run_views

from multiworld.web.run_metrics import families

ROOT = Path(__file__).parents[3]
RULES = ROOT / "deploy" / "prometheus" / "multiworld.rules.yml"
TESTS = RULES.with_name("multiworld.rules.test.yml")
DASHBOARD = ROOT / "deploy" / "grafana" / "multiworld.json"
PROMTOOL = shutil.which("promtool")
NAME = re.compile(r"\bmultiworld_\w+")

needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="there is no promtool here")


def promtool(*arguments):
    done = subprocess.run(
        [PROMTOOL, *map(str, arguments)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def series(process):
    """Names of samples, and the labels that each may have beside what Prometheus adds."""
    world = process.add("w")
    process.joins("w")
    world.log.totals.message("send", 1, 1)
    world.log.totals.collective("all_reduce", 1)
    found: dict[str, set[str]] = {}
    with collected(process) as made:
        for family in made.collect():
            for sample in family.samples:
                found.setdefault(sample.name, {"job", "instance"}).update(sample.labels)
    for family in families(run_views()[0]):
        for sample in family.samples:
            found.setdefault(sample.name, {"job", "instance"}).update(sample.labels)
    return found


def used_well(expression, series):
    for name in NAME.findall(expression):
        assert name in series, f"{name} is no metric of the collector"
    for name, matchers in re.findall(r"(multiworld_\w+)\{(.*?)\}", expression):
        assert set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", matchers)) <= series[name], expression
    for labels in re.findall(r"\bby \((.*?)\)", expression):
        (name, *_) = NAME.findall(expression)
        assert set(labels.split(", ")) <= series[name], expression


# -- alerts --------------------------------------------------------------------------------------------------


def alerts():
    return re.split(r"^ +- alert: ", RULES.read_text(), flags=re.MULTILINE)[1:]


@needs_promtool
def test_the_rules_are_checked_and_their_tests_pass():
    assert f"{len(alerts())} rules found" in promtool("check", "rules", RULES)
    assert "SUCCESS" in promtool("test", "rules", TESTS)


def test_every_alert_has_a_test_that_fires_and_one_that_does_not():
    tests = TESTS.read_text()
    for alert in alerts():
        name = alert.split()[0]
        assert re.search(rf"alertname: {name}\n +exp_alerts:", tests), name
        assert f"alertname: {name}}}" in tests, name


def test_what_is_shipped_scrapes_and_evaluates_as_often_as_the_alerts_need():
    """A member is busy, and an operation stuck, for less than a minute, which is Prometheus's default."""
    page = (ROOT / "docs" / "metrics.md").read_text()
    samples = [
        each
        for each in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
        if "\nscrape_configs:" in f"\n{each}"
    ]
    assert len(samples) == 2
    for text in [RULES.with_name("secure.yml").read_text(), *samples]:
        for name in ("scrape_interval", "evaluation_interval"):
            assert re.findall(rf"\b{name}: (\w+)", text) == ["15s"], text


@needs_promtool
def test_the_shipped_configuration_is_checked(tmp_path):
    text = RULES.with_name("secure.yml").read_text()
    (tmp_path / "prometheus.yml").write_text(text)
    (tmp_path / RULES.name).write_text(RULES.read_text())
    promtool("check", "config", "--syntax-only", tmp_path / "prometheus.yml")


def test_every_alert_says_value_meaning_and_next_step():
    for alert in alerts():
        name = alert.split()[0]
        assert re.search(r"severity: (critical|warning)$", alert, re.MULTILINE), name
        description = " ".join(alert.split("description: >-")[1].split())
        assert re.fullmatch(r"Value: .+\. Meaning: .+\. Next step: .+\.", description), name
        assert "m8d-run status" in description, name
        of = "instance" if "multiworld_run_worker_" in alert else "world"
        assert f"{{{{ $labels.{of} }}}}" in alert.split("summary:")[1].splitlines()[0], name


def test_the_alerts_name_metrics_that_there_are(series):
    for alert in alerts():
        used_well(alert.split("expr:")[1].split("labels:")[0], series)


# -- the dashboard -------------------------------------------------------------------------------------------


@pytest.fixture
def dashboard():
    return json.loads(DASHBOARD.read_text())


def queries(dashboard):
    return [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]


def test_the_dashboard_has_the_form_that_grafana_documents(dashboard):
    assert dashboard["schemaVersion"] >= 36
    assert "id" not in dashboard, "Grafana gives it; with one an import would replace another dashboard"
    for key, kind in {
        "uid": str, "title": str, "tags": list, "panels": list, "templating": dict, "time": dict, "annotations": dict,
        "refresh": str, "editable": bool, "version": int,
    }.items():  # fmt: skip
        assert isinstance(dashboard[key], kind), key
    assert len(dashboard["uid"]) <= 40
    numbers = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(numbers)) == len(numbers)
    for panel in dashboard["panels"]:
        assert panel["type"] in {"timeseries", "stat", "heatmap"}
        assert panel["title"]
        assert panel["description"].endswith(".")
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        refs = [target["refId"] for target in panel["targets"]]
        assert refs == sorted(set(refs))
        assert "unit" in panel["fieldConfig"]["defaults"]


def test_the_panels_fill_the_grid_and_do_not_overlap(dashboard):
    taken = set()
    for panel in dashboard["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        taken |= cells
    assert len(taken) == 24 * (max(y for _, y in taken) + 1)


def test_its_variables_choose_among_what_there_is(dashboard, series):
    variables = {each["name"]: each for each in dashboard["templating"]["list"]}
    assert list(variables) == ["datasource", "job", "instance", "world"]
    assert variables["datasource"]["type"] == "datasource"
    for name in ("job", "instance", "world"):
        query = variables[name]["query"]["query"]
        assert query == variables[name]["definition"]
        used_well(query, series)
        metric, label = re.fullmatch(r"label_values\((multiworld_\w+)(?:\{.*\})?, (\w+)\)", query).groups()
        assert label == name
        assert label in series[metric]
    for query in queries(dashboard):
        assert set(re.findall(r"\$(\w+)", query)) <= {*variables, "__rate_interval"}
        assert 'job=~"$job", instance=~"$instance"' in query


def test_its_queries_name_metrics_that_there_are(dashboard, series):
    for query in queries(dashboard):
        used_well(query, series)
    shown = {name for query in queries(dashboard) for name in NAME.findall(query)}
    subjects = ("worlds", "breakages_total", "recovery_duration_seconds_bucket", "world_pending_seconds")
    assert {f"multiworld_{name}" for name in subjects} <= shown


@needs_promtool
def test_its_queries_are_promql(dashboard, tmp_path):
    rules = tmp_path / "rules.yml"
    found = [query.replace("$__rate_interval", "1m") for query in queries(dashboard)]
    lines = [
        f"      - {{record: 'q:{number}', expr: {json.dumps(query)}}}" for number, query in enumerate(found)
    ]
    rules.write_text("groups:\n  - name: g\n    rules:\n" + "\n".join(lines) + "\n")
    assert f"{len(found)} rules found" in promtool("check", "rules", rules)
