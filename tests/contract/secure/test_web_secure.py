"""The page and the numbers in secure mode, of real processes, asked by curl, by Prometheus and by members."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from urllib.parse import parse_qs, urlsplit
from urllib.request import urlopen

import pytest
from kits.contract.runkit import PATIENCE, ROOT, launched
from kits.contract.worldkit import free_port
from kits.httpskit import fetch
from kits.tlskit import Files, authority

for package in ("starlette", "uvicorn", "prometheus_client"):
    pytest.importorskip(package, reason=f"the page and the numbers need {package}")

pytestmark = [pytest.mark.everyday, pytest.mark.timeout(300)]

CURL, PROMETHEUS = shutil.which("curl"), shutil.which("prometheus")
EXAMPLE = ROOT / "deploy" / "prometheus" / "secure.yml"
LOOPBACK = ("127.0.0.1",)
WORLD = "confidential"
FILE = f"""
[roles]
worker = 2

[worlds."{WORLD}"]
members = ["worker:0", "worker:1"]
timeout = 60
"""
SCRIPT = """
import multiworld as mw
world = mw.join_all()
tell("joined")
hold()
"""


@pytest.fixture
def ours():
    return authority("job")


@pytest.fixture
def files(tmp_path, ours):
    return Files(tmp_path / "files", ours, name="member", addresses=LOOPBACK)


@pytest.fixture
def runtime(files):
    folder = tempfile.mkdtemp(prefix="m8dw")
    yield {"XDG_RUNTIME_DIR": folder, "PYTHONPATH": str(ROOT), **files.environment}
    shutil.rmtree(folder)


@pytest.fixture
def run(tmp_path, runtime):
    (tmp_path / "worlds.toml").write_text(FILE)
    options = ["--web", "--worlds", str(tmp_path / "worlds.toml")]
    with launched(tmp_path, SCRIPT, options=options, env=runtime) as run:
        run.wait_told("joined", 2)
        yield run


def link_in(line: str) -> str:
    return re.search(r"https://[^\s\"]+", line)[0]


def curl(link: str, path: str, *arguments: str, curl: str | None = CURL) -> subprocess.CompletedProcess[str]:
    where = urlsplit(link)
    return subprocess.run(
        [curl, "-sS", "--max-time", "60", "-w", "\n%{http_code}", *arguments, f"https://{where.netloc}{path}"],
        capture_output=True, text=True, timeout=PATIENCE, check=False,
    )  # fmt: skip


@pytest.mark.skipif(CURL is None, reason="there is no curl here")
def test_the_page_of_a_run_for_curl(tmp_path, run, files, ours):
    (line,) = run.wait_line("page: https")
    link = link_in(line)
    assert f"curl --cacert {files.ca}" in line
    trust = ("--cacert", str(files.ca))
    member = Files(tmp_path / "operator", ours, name="operator")
    shown = ("--cert", str(member.cert), "--key", str(member.key))
    token = ("-H", f"Authorization: Bearer {parse_qs(urlsplit(link).query)['token'][0]}")

    assert curl(link, "/live").returncode == 60, "a certificate of an authority that it does not know"
    for path in ("/live", "/ready"):  # as a kubelet asks, which looks at no certificate and has none
        assert curl(link, path, "-k").stdout == "ok\n\n200"
    assert curl(link, "/live", *trust).stdout == "ok\n\n200"
    assert curl(link, "/ready", *trust).stdout == "ok\n\n200"
    for path in ("/api/v1/view", "/openapi.json", "/metrics", "/"):
        asked = curl(link, path, *trust)
        assert asked.stdout.endswith("401")
        assert WORLD not in asked.stdout
        assert curl(link, path, *trust, *token).stdout.endswith("\n200")
        assert curl(link, path, *trust, *shown).stdout.endswith("\n200")
    assert WORLD in curl(link, "/api/v1/view", *trust, *shown).stdout
    assert (
        f'multiworld_run_world_active{{world="{WORLD}"}} 1.0' in curl(link, "/metrics", *trust, *token).stdout
    )

    other = Files(tmp_path / "other", ours.load("other", ours.pem))
    refused = curl(link, "/live", *trust, *token, "--cert", str(other.cert), "--key", str(other.key))
    assert refused.returncode != 0
    plain = subprocess.run(
        [CURL, "-sS", "--max-time", "60", link.replace("https", "http")], capture_output=True, text=True,
        timeout=PATIENCE, check=False,
    )  # fmt: skip
    assert (plain.returncode != 0, plain.stdout) == (True, "")


def test_new_files_and_a_page_that_is_served_anew(run, files, ours):
    link = urlsplit(link_in(run.wait_line("page: https")[0]))
    files.replace(ours, name="renewed")
    deadline = time.monotonic() + PATIENCE
    while fetch((link.hostname, link.port), "/live", ca=files.ca).server != "renewed":
        assert time.monotonic() < deadline
        time.sleep(0.05)
    (victim,) = [pid for pid in run.alive() if b"\0web\0" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    os.kill(victim, signal.SIGKILL)
    link = urlsplit(link_in(run.wait_line("page: https", count=2)[-1]))
    answer = fetch((link.hostname, link.port), "/api/v1/view", ca=files.ca, shown=files)
    assert [each["name"] for each in json.loads(answer.body)["worlds"]] == [WORLD]


@contextlib.contextmanager
def page_begun_later(run, env: dict[str, str]):
    """``m8d-run web`` of that run (others are at work here), without M8D_TLS_* of its own."""
    env = {name: value for name, value in {**os.environ, **env}.items() if not name.startswith("M8D_TLS_")}
    (line,) = run.wait_line("event=run-started")
    command = [sys.executable, "-m", "multiworld.run", "web", re.search(r" run=(\S+)", line)[1]]
    with subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as served:
        try:
            yield served
        finally:
            served.send_signal(signal.SIGINT)


def test_a_page_of_a_secure_run_that_was_started_without(tmp_path, runtime):
    runtime = {name: value for name, value in runtime.items() if not name.startswith("M8D_TLS_")}
    (tmp_path / "worlds.toml").write_text(FILE)
    options = ["--secure", "--worlds", str(tmp_path / "worlds.toml")]
    with launched(tmp_path, SCRIPT, options=options, env=runtime) as run:
        run.wait_told("joined", 2)
        with page_begun_later(run, runtime) as served:
            line = served.stdout.readline()
            link, ca = urlsplit(link_in(line)), re.search(r"curl --cacert (\S+)\)", line)[1]
            headers = {"Authorization": f"Bearer {parse_qs(link.query)['token'][0]}"}
            answer = fetch((link.hostname, link.port), "/api/v1/view", ca=ca, headers=headers)
            assert [each["name"] for each in json.loads(answer.body)["worlds"]] == [WORLD]
            assert fetch((link.hostname, link.port), "/api/v1/view", ca=ca).status == 401
        assert served.returncode == 0


def test_a_page_of_a_secure_run_is_not_served_in_plain_text(run, runtime):
    with page_begun_later(run, runtime) as served:
        assert served.stdout.read() == ""
        assert "a secure run, and no certificate for its page" in served.stderr.read()
        assert served.wait(PATIENCE) == 2


def serving(me, environ):
    """A world of one, with its numbers and its page, in secure mode."""
    import multiworld as mw

    os.environ.update(environ)
    with mw.serve_metrics() as numbers, mw.serve_page() as page:
        world = mw.join(WORLD, 0, 1, store=me.store, timeout=PATIENCE)
        me.emit("serves", numbers=numbers.port, page=page.port, token=page.token)
        me.hear()
        world.close()


@pytest.mark.skipif(PROMETHEUS is None, reason="there is no prometheus here")
def test_prometheus_with_the_example(tmp_path, cast, files):
    served = cast.start(serving, 0, environ=files.environment, store=f"tcp://127.0.0.1:{free_port()}")
    told = served.expect("serves")
    token = tmp_path / "token"
    token.write_text(told.token)
    text = EXAMPLE.read_text().replace("rule_files: [", f"rule_files: [{EXAMPLE.parent}/")
    for name, path in {
        "ca.pem": files.ca,
        "cert.pem": files.cert,
        "key.pem": files.key,
        "token": token,
    }.items():
        text = text.replace(f"/etc/prometheus/m8d/{name}", str(path))
    text = text.replace('"alpha:9400", "beta:9400"', f'"127.0.0.1:{told.numbers}"')
    text = text.replace('"alpha:8080", "beta:8080"', f'"127.0.0.1:{told.page}"')
    # And one that shows nothing.
    text = text.replace("scrape_interval: 15s", "scrape_interval: 1s").replace(
        "scrape_configs:\n",
        "scrape_configs:\n  - job_name: stranger\n    scheme: https\n"
        f"    tls_config: {{ca_file: {files.ca}}}\n    static_configs: [{{targets: ['127.0.0.1:{told.numbers}']}}]\n",
    )
    config = tmp_path / "prometheus.yml"
    config.write_text(text)
    port = free_port()
    command = [
        PROMETHEUS, f"--config.file={config}", f"--storage.tsdb.path={tmp_path / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}", "--log.level=error",
    ]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as program:
        try:
            wanted = {"workers": "up", "pages": "up", "stranger": "down"}
            found = health(port, program, wanted)
            query = f"http://127.0.0.1:{port}/api/v1/query?query=multiworld_world_active"
            with urlopen(query, timeout=PATIENCE) as answer:
                series = json.load(answer)["data"]["result"]
        finally:
            program.kill()
    assert found == wanted
    assert {(each["metric"]["job"], each["metric"]["world"]) for each in series} == {
        ("workers", WORLD), ("pages", WORLD),
    }  # fmt: skip
    served.say("end")
    assert served.finish() == 0


def health(port: int, program: subprocess.Popen[str], wanted: dict[str, str]) -> dict[str, str]:
    """How Prometheus's targets are, once they are as `wanted`: one that is late by a second is down until the next."""
    found: dict[str, str] = {}
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        assert program.poll() is None, program.stderr.read()
        try:
            with urlopen(f"http://127.0.0.1:{port}/api/v1/targets", timeout=PATIENCE) as answer:
                targets = json.load(answer)["data"]["activeTargets"]
        except OSError:
            targets = []
        found = {each["labels"]["job"]: each["health"] for each in targets}
        if found == wanted:
            break
        time.sleep(0.1)
    return found
