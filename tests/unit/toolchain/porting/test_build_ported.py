"""A version without a series, from its tag to the build: what is ported, told, refused, and reported."""

from __future__ import annotations

import io
import json
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from kits.patchkit import GROUP, NCCL, TOPICS, small_states, snapshot, write_tree
from kits.unportedkit import NEXT, PortKit, git, make_port_kit, official_wheel
from rich.console import Console

from m8d_build.cli import main
from m8d_build.errors import (
    BlobMismatch,
    BuildBusy,
    CheckFailed,
    PortConflict,
    PrerequisiteMissing,
    UnknownVersion,
    WheelMismatch,
)
from m8d_build.files.lock import pruning
from m8d_build.overlay.build import Built
from m8d_build.porting import build as module
from m8d_build.porting.build import build_ported
from m8d_build.porting.report import add_behaviour
from m8d_build.progress import Silent
from m8d_build.series.read import load_series
from m8d_build.series.verify import verify
from m8d_build.targets import Status, load_targets


@pytest.fixture
def overlay(monkeypatch):
    """The build after the port, noted down instead; ``overlay.error`` is raised in its step."""
    seen = SimpleNamespace(calls=[], error=None)

    def build(request, settings, reporter):
        seen.calls.append((request, settings))
        with reporter.step("check"):
            reporter.note("12 strong symbols")
            if seen.error:
                raise seen.error
        settings.out.mkdir(exist_ok=True)
        wheel = settings.out / f"torch-{NEXT}+cu124.m8d0.ported.whl"
        wheel.write_bytes(b"wheel")
        return Built(wheel, 5, 5, "a" * 64, f"{NEXT}+cu124.m8d0.ported", tuple(TOPICS), 0, 1, 9)

    monkeypatch.setattr(module, "build_overlay", build)
    return seen


@pytest.fixture
def port(tmp_path) -> PortKit:
    return make_port_kit(tmp_path, {GROUP: small_states()[0][GROUP].replaced(20, 20, "pushed", "down")})


def conflicting(tmp_path) -> PortKit:
    return make_port_kit(tmp_path, {GROUP: small_states()[0][GROUP].changed("group line 50", "L")})


def report_of(port: PortKit) -> dict:
    return json.loads((port.settings.out / f"port-{NEXT}-cp311" / "report.json").read_text())


def test_the_tag_is_fetched_the_series_ported_and_the_build_gets_it(port, overlay):
    before = snapshot(port.kit.patches)
    made = build_ported(port.request(), port.settings, Silent())
    ((request, settings),) = overlay.calls
    assert snapshot(port.kit.patches) == before, "the checkout's patches stay as they are"
    target = load_targets(settings.patches).get(NEXT)
    assert target == request.target
    assert (target.ported_from, target.status, target.commit) == ("2.6.0", Status.APPLIES, port.commit)
    assert [unit.path for unit in target.units] == [NCCL]
    assert target.pinned_packages == ("nvidia-nccl-cu12",)
    assert target.build_packages == ("nvidia-cuda-nvcc-cu12==12.4.131",)
    assert dict(target.packages) == {"nvidia-cuda-nvcc-cu12==12.4.131": "1" * 64}
    assert dict(target.accepted) == {"_Zf": "why"}
    assert [wheel.git_version for wheel in target.wheels] == [port.commit]
    assert (request.wheel, request.unproven, request.allow_unverified) == (port.wheel, (), False)
    assert request.sources_proven
    sources = port.settings.cache / f"sources/v{NEXT}/git/tree"
    files = {path: (sources / path).read_bytes() for path in (NCCL, GROUP)}
    assert verify(target, load_series(settings.patches, NEXT), files) == []
    assert made.ported_from == "2.6.0"


def test_the_report_beside_the_wheel_says_what_became_of_each_topic_and_what_was_checked(port, overlay):
    made = build_ported(port.request(), port.settings, Silent())
    assert made.report == made.built.path.with_name(made.built.path.name + ".port.json")
    said = json.loads(made.report.read_text())
    assert said == report_of(port)
    assert (said["outcome"], said["ported_from"], said["error"]) == ("built", "2.6.0", None)
    assert [(topic["topic"], topic["state"]) for topic in said["topics"]] == [
        (TOPICS[0], "exact"),
        (TOPICS[1], "moved"),
        (TOPICS[2], "exact"),
    ]
    assert said["topics"][1]["moved_by_lines"] == [2]
    assert said["wheel"]["sha256"] == "a" * 64
    assert port.commit in said["official_wheel"]
    assert f"at commit {port.commit}, which the official wheel names" in said["sources"]
    assert port.repository.as_uri() in said["sources_of_series"]
    assert said["checks"][-1] == {"name": "check", "result": "passed", "notes": ["12 strong symbols"]}
    assert "this file" in said["send"]


class Pruning(Silent):
    """A reporter that tries to prune the cache when a step has ended."""

    def __init__(self, cache) -> None:
        super().__init__()
        self.cache, self.kept = cache, []

    @contextmanager
    def step(self, name):
        yield
        with pytest.raises(BuildBusy), pruning(self.cache):
            pass
        self.kept.append(name)


def test_the_cache_is_not_pruned_between_the_steps(port, overlay):
    reporter = Pruning(port.settings.cache)
    build_ported(port.request(), port.settings, reporter)
    assert reporter.kept == [module.OFFICIAL, module.SOURCES, module.PORT, "check"]


def test_a_hunk_without_a_place_stops_it_and_names_topic_file_and_report(tmp_path, overlay):
    port = conflicting(tmp_path)
    with pytest.raises(PortConflict) as caught:
        build_ported(port.request(), port.settings, Silent())
    assert overlay.calls == []
    text = str(caught.value)
    for part in (
        f"2.6.0's series cannot be ported to torch {NEXT}: 1 hunk",
        f"{TOPICS[1]} in {GROUP}",
        f"port-{NEXT}-cp311/report.json",
        "nox -s m8d -- targets",
    ):
        assert part in text
    assert "expected (2.6.0)" in caught.value.tail
    said = report_of(port)
    assert (said["outcome"], said["wheel"], said["error"]["kind"]) == ("refused", None, "PortConflict")
    (refused,) = said["topics"][1]["refused"]
    assert (refused["file"], refused["there"][1]) == (GROUP, "L")
    assert said["checks"][-1]["result"] == "stopped"
    assert not list(port.settings.out.glob("*.whl"))


def test_a_failed_check_of_the_build_is_reported_and_keeps_its_kind(port, overlay):
    overlay.error = CheckFailed("a class has another size", rule="the same", next_step="Report it")
    reporter = Silent()
    with pytest.raises(CheckFailed, match="another size"):
        build_ported(port.request(), port.settings, reporter)
    said = report_of(port)
    assert (said["outcome"], said["error"]["value"]) == ("failed", "a class has another size")
    assert said["checks"][-1]["result"] == "stopped"
    assert reporter.notes[-1].endswith(f"port-{NEXT}-cp311/report.json")


def test_sources_at_another_commit_than_the_wheels_are_refused_unless_allowed(port, overlay):
    (port.repository / "version.txt").write_text(f"{NEXT}a0+mine\n")
    for allow in (False, True):
        request = port.request(source=str(port.repository), allow_unverified=allow)
        if allow:
            build_ported(request, port.settings, Silent())
        else:
            with pytest.raises(BlobMismatch, match=f"no commit that is known.*{port.commit}"):
                build_ported(request, port.settings, Silent())
    ((made, _),) = overlay.calls
    assert (made.unproven, made.sources_proven) == ((f"sources of v{NEXT}",), False)
    assert "NOTHING shows" in report_of(port)["sources"]


def test_a_clean_checkout_is_shown_by_its_commit_and_an_unpacked_tree_is_not(port, overlay, tmp_path):
    build_ported(port.request(source=str(port.repository)), port.settings, Silent())
    assert len(overlay.calls) == 1
    write_tree(tmp_path / "plain", port.kit.states[0], NEXT)
    with pytest.raises(BlobMismatch):
        build_ported(port.request(source=str(tmp_path / "plain")), port.settings, Silent())


def test_a_wheel_of_another_commit_than_the_one_on_record_is_refused(port, overlay, tmp_path):
    wheel = official_wheel(tmp_path / "other", "e" * 40)
    with pytest.raises(WheelMismatch, match="git_version"):
        build_ported(port.request(wheel=wheel), port.settings, Silent())
    assert report_of(port)["outcome"] == "failed"


def test_a_wheel_of_an_unknown_cuda_stops_before_the_sources_are_fetched(port, overlay, tmp_path):
    wheel = official_wheel(tmp_path / "other", port.commit, cuda="13.2")
    with pytest.raises(PrerequisiteMissing, match=r"CUDA 13\.2"):
        build_ported(port.request(wheel=wheel), port.settings, Silent())
    assert not (port.settings.cache / "sources").exists()


def test_without_the_series_own_sources_the_port_goes_on(port, overlay):
    git(port.repository, "tag", "--delete", "v2.6.0")
    reporter = Silent()
    build_ported(port.request(), port.settings, reporter)
    assert report_of(port)["sources_of_series"] == "not to be had"
    assert any("equal places are conflicts" in note for note in reporter.notes)


def test_the_next_run_begins_anew(tmp_path, overlay, port):
    for _ in range(2):
        build_ported(port.request(), port.settings, Silent())
    assert len(overlay.calls) == 2


def run(port: PortKit, monkeypatch, *more: object) -> tuple[int, str]:
    monkeypatch.setenv("M8D_PYTORCH_GIT", port.settings.git_url)
    out = io.StringIO()
    words = ["--patches", port.kit.patches, "--cache", port.settings.cache, "build", "--python", "3.11"]
    words += ["--wheel", port.wheel, "--source", "git", "--out", port.settings.out, *more]
    code = main([str(word) for word in words], console=Console(file=out, width=300))
    return code, out.getvalue()


def test_the_command_says_aloud_that_it_ports_and_where_the_report_is(port, overlay, monkeypatch):
    code, said = run(port, monkeypatch, "--torch", NEXT)
    assert code == 0, said
    for part in (
        f"torch {NEXT} HAS NO SERIES: that of 2.6.0 is PORTED to it",
        f"{TOPICS[1]}: moved: 1 hunk, 1 of them moved by +2 lines",
        "ported:   from 2.6.0's series, not proven by hand",
        ".port.json",
    ):
        assert part in said
    code, said = run(port, monkeypatch, "--torch", NEXT, "--json")
    told = json.loads(said)
    assert (code, told["ported_from"]) == (0, "2.6.0")
    assert told["report"].endswith(".port.json")


def test_the_commands_exit_code_is_that_of_a_conflict(tmp_path, overlay, monkeypatch):
    code, said = run(conflicting(tmp_path), monkeypatch, "--torch", NEXT)
    assert code == PortConflict.exit_code
    assert f"PortConflict: 2.6.0's series cannot be ported to torch {NEXT}" in said


def test_a_plan_says_what_would_be_ported_and_does_nothing(port, overlay, monkeypatch):
    code, said = run(port, monkeypatch, "--torch", NEXT, "--plan")
    assert (code, overlay.calls) == (0, [])
    assert "each hunk of 2.6.0's series where its lines stand exactly once" in said
    assert not port.settings.out.exists()
    code, said = run(port, monkeypatch, "--torch", NEXT, "--plan", "--json")
    assert json.loads(said)["ported_from"] == "2.6.0"


def test_a_version_that_is_not_listed_is_ported_to_only_if_that_is_allowed(port, overlay, monkeypatch):
    path = port.kit.patches / "targets.toml"
    path.write_text(path.read_text().partition('\n[[target]]\nversion = "2.7.0"')[0])
    code, said = run(port, monkeypatch, "--torch", NEXT)
    assert code == UnknownVersion.exit_code
    assert "--allow-unverified" in said
    code, said = run(port, monkeypatch, "--torch", NEXT, "--allow-unverified")
    assert code == 0, said
    ((request, _),) = overlay.calls
    assert request.unproven == (f"official wheel of {NEXT}",)
    assert request.target.commit == port.commit


def test_what_check_wheel_finds_is_added_to_the_report(port, overlay):
    made = build_ported(port.request(), port.settings, Silent())
    assert add_behaviour(made.built.path, {"ok": True}) == made.report
    assert json.loads(made.report.read_text())["behaviour"] == {"ok": True}
    assert add_behaviour(port.wheel, {"ok": True}) is None
