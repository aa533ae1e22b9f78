from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from kits.fakewheel import record_of

from m8d_build import proc
from m8d_build.environments import venvs as envs
from m8d_build.environments.venvs import (
    Environment,
    Environments,
    Recipe,
    interpreter_for,
    names_to_link,
    pip_check,
    surplus,
)
from m8d_build.errors import (
    BuildBusy,
    CommandFailed,
    DiskFull,
    PrerequisiteMissing,
    WheelMismatch,
    WheelUnreachable,
)
from m8d_build.files.lock import hold

TAG = f"cp{sys.version_info.major}{sys.version_info.minor}"
SHA_A, SHA_B = "a" * 64, "b" * 64


def make_wheel(folder: Path, version: str, text: str, *, requires: str = "", name: str = "torch") -> Path:
    import zipfile

    dist = f"{name}-{version}.dist-info"
    files = {
        f"{name}/__init__.py": text.encode(),
        f"{name}/lib/libtorch_cuda.so": text.encode(),
        f"{dist}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{requires}\n".encode(),
        f"{dist}/WHEEL": f"Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: {TAG}-none-any\n".encode(),
    }
    files[f"{dist}/RECORD"] = record_of(files, dist)
    path = folder / f"{name}-{version}-{TAG}-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for entry, data in files.items():
            archive.writestr(entry, data)
    return path


def recipe_of(wheel: Path, sha256: str) -> Recipe:
    return Recipe("2.6.0", sha256, TAG, str(wheel), brings=("torch", "torch-2.6.0+p.dist-info"))


def snapshot(folder: Path) -> dict[str, object]:
    found: dict[str, object] = {}
    for path in sorted(folder.rglob("*")):
        if "__pycache__" not in path.parts:
            found[str(path)] = path.read_bytes() if path.is_file() else "folder"
    return found


@pytest.fixture(scope="module")
def stage(tmp_path_factory) -> SimpleNamespace:
    """A whole environment of a small official wheel, which lives beside a package of its own."""
    root = tmp_path_factory.mktemp("envs")
    official = make_wheel(root, "2.6.0", "official = True")
    patched = make_wheel(root, "2.6.0+p", "official = False")
    environments = Environments(root / "envs")
    log = root / "log"
    recipe = recipe_of(official, SHA_A)
    with environments.kept(recipe, log=log) as base:
        (base.site / "nvidia").mkdir()
        (base.site / "nvidia" / "mark").write_text("here")
    return SimpleNamespace(
        root=root, environments=environments, base=base, recipe=recipe, patched=patched, log=log
    )


def test_whole_environment_holds_the_wheel(stage):
    assert stage.base.name == f"torch-2.6.0-{'a' * 12}-{TAG}"
    assert (stage.base.torch / "__init__.py").read_text() == "official = True"
    said = proc.run(
        [stage.base.python, "-I", "-c", "import torch; print(torch.official)"], what="import"
    ).stdout
    assert said.strip() == "True"


def test_whole_environment_is_reused(stage, monkeypatch):
    monkeypatch.setattr(envs.proc, "run", lambda *_a, **_k: pytest.fail("a program was run"))
    os.utime(stage.base.root, (0, 0))
    with stage.environments.kept(stage.recipe, log=stage.log) as again:
        assert again == stage.base
    assert stage.base.root.stat().st_mtime > 0  # it is in use, whatever the file system notes of reading


def test_thin_environment_has_its_own_torch_and_the_rest_of_the_whole_one(stage):
    before = snapshot(stage.base.root)
    recipe = recipe_of(stage.patched, SHA_B)
    with stage.environments.fresh(recipe, base=stage.base, log=stage.log) as thin:
        assert (thin.torch / "__init__.py").read_text() == "official = False"
        assert not thin.torch.is_symlink()
        assert (thin.site / "nvidia" / "mark").read_text() == "here"
        assert (thin.site / "nvidia").is_symlink()
        said = proc.run(
            [thin.python, "-I", "-c", "import torch; print(torch.official)"], what="import"
        ).stdout
        assert said.strip() == "False"
        assert not list(thin.site.glob("torch-2.6.0.dist-info"))
        assert pip_check(thin) == "clean"
    assert not thin.python.exists()
    assert not (stage.environments.root / recipe.name).exists()
    assert snapshot(stage.base.root) == before


def test_pip_check_tells_what_is_missing(stage, tmp_path):
    needy = make_wheel(tmp_path, "2.6.0+p", "", requires="Requires-Dist: no-such-package-here")
    with stage.environments.fresh(recipe_of(needy, SHA_B), base=stage.base, log=stage.log) as thin:
        assert "no-such-package-here" in pip_check(thin)


def test_a_fresh_environment_can_be_kept_and_is_made_anew_the_next_time(stage):
    recipe = recipe_of(stage.patched, "c" * 64)
    with stage.environments.fresh(recipe, base=stage.base, log=stage.log, keep=True) as kept:
        (kept.site / "left-behind").write_text("")
    assert kept.python.exists()
    with stage.environments.fresh(recipe, base=stage.base, log=stage.log) as again:
        assert not (again.site / "left-behind").exists()


@pytest.mark.parametrize("trouble", [KeyboardInterrupt(), CommandFailed("pip failed")])
def test_a_stopped_making_leaves_nothing(stage, monkeypatch, trouble):
    real = proc.run

    def stop(command, **options):
        if "install" in command:
            raise trouble
        return real(command, **options)

    monkeypatch.setattr(envs.proc, "run", stop)
    recipe = recipe_of(stage.patched, SHA_B)
    with pytest.raises(type(trouble)), stage.environments.fresh(recipe, base=stage.base, log=stage.log):
        pytest.fail("it was not made")
    assert not (stage.environments.root / recipe.name).exists()


def test_a_folder_without_a_record_is_made_anew(tmp_path, monkeypatch):
    recipe = recipe_of(tmp_path / "w.whl", SHA_A)
    rubbish = tmp_path / "envs" / recipe.name
    (rubbish / "bin").mkdir(parents=True)
    (rubbish / "bin" / "python").write_text("left by a killed run")
    made = []

    def make(folder, _recipe, _log):
        assert not folder.exists()
        (folder / "bin").mkdir(parents=True)
        (folder / "bin" / "python").write_text("whole")
        made.append(folder)

    monkeypatch.setattr(envs, "_make_whole", make)
    for _ in range(2):
        with Environments(tmp_path / "envs").kept(recipe, log=tmp_path / "log") as environment:
            assert environment.python.read_text() == "whole"
    assert len(made) == 1


def test_a_full_disk_is_found_before_anything_is_made(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(free=1 << 30))
    environments = Environments(tmp_path / "envs")
    recipe = recipe_of(tmp_path / "w.whl", SHA_A)
    with pytest.raises(DiskFull, match=r"1\.0 GiB free"), environments.kept(recipe, log=tmp_path / "log"):
        pytest.fail("it was not made")
    assert not (tmp_path / "envs" / recipe.name).exists()


def failing(tail: str, calls: list[object]):
    def run(command, **_options):
        if "install" in command:
            calls.append(command)
            raise CommandFailed("pip failed", tail=tail)
        return proc.Finished("", 0.0)

    return run


def test_network_failures_are_tried_again_and_then_say_so(tmp_path, monkeypatch):
    calls: list[object] = []
    monkeypatch.setattr(envs.proc, "run", failing("Max retries exceeded with url: /simple/x", calls))
    environments = Environments(tmp_path / "envs")
    with pytest.raises(WheelUnreachable, match="3 attempts"):
        environments.kept(recipe_of(tmp_path / "w.whl", SHA_A), log=tmp_path / "log").__enter__()
    assert len(calls) == 3


def test_other_pip_failures_are_not_tried_again(tmp_path, monkeypatch):
    calls: list[object] = []
    monkeypatch.setattr(envs.proc, "run", failing("is not a supported wheel on this platform", calls))
    environments = Environments(tmp_path / "envs")
    with pytest.raises(CommandFailed):
        environments.kept(recipe_of(tmp_path / "w.whl", SHA_A), log=tmp_path / "log").__enter__()
    assert len(calls) == 1


def test_pip_without_room_is_a_full_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(envs.proc, "run", failing("OSError: [Errno 28] No space left on device", []))
    environments = Environments(tmp_path / "envs")
    with pytest.raises(DiskFull):
        environments.kept(recipe_of(tmp_path / "w.whl", SHA_A), log=tmp_path / "log").__enter__()


def test_pip_works_on_the_disk_of_the_environment(tmp_path, monkeypatch):
    """A full /tmp was reported as a full disk of the environment."""
    folder, places = tmp_path / "env", []

    def run(command, *, env, **_options):
        places.append(Path(env["TMPDIR"]))
        (places[-1] / "unpacked").touch()
        return proc.Finished("", 0.0)

    monkeypatch.setattr(envs.proc, "run", run)
    envs._pip_install(folder, "torch==2.6.0", [], tmp_path / "log")
    (place,) = places
    assert folder in place.parents
    assert list(folder.iterdir()) == []


def test_prune_removes_this_versions_others_but_none_in_use(tmp_path):
    names = [f"torch-2.6.0-{letter * 12}-{TAG}" for letter in "abc"] + [f"torch-2.7.0-{'d' * 12}-{TAG}"]
    for name in names:
        (tmp_path / name / "bin").mkdir(parents=True)
    environments = Environments(tmp_path)
    # flock is per open file, so a second holder in this process stands for another process.
    with hold(tmp_path / ".locks" / names[1], what="test"):
        removed = environments.prune({names[0]}, torch="2.6.0")
        assert removed == (names[2],)
        assert sorted(path.name for path in tmp_path.glob("torch-*")) == sorted(
            [names[0], names[1], names[3]]
        )
    assert environments.prune({names[0]}) == (names[1], names[3])


def test_an_environment_in_use_cannot_be_had(tmp_path, monkeypatch):
    monkeypatch.setattr(envs, "_WAIT", 0)
    recipe = recipe_of(tmp_path / "w.whl", SHA_A)
    with (
        hold(tmp_path / ".locks" / recipe.name, what="test"),
        pytest.raises(BuildBusy),
        Environments(tmp_path).kept(recipe, log=tmp_path / "log"),
    ):
        pytest.fail("two at once")


def test_nothing_to_prune_where_nothing_was_made(tmp_path):
    assert Environments(tmp_path / "absent").prune(()) == ()


def test_surplus_tells_versions_apart():
    names = ["torch-2.6.0-x-cp311", "torch-2.6.0-y-cp311", "torch-2.6.01-z-cp311"]
    assert surplus(names, {"torch-2.6.0-x-cp311"}, torch="2.6.0") == ("torch-2.6.0-y-cp311",)
    assert surplus(names, ()) == tuple(names)


def test_nothing_the_wheel_brings_is_linked():
    present = [
        "nvidia",
        "torch",
        "torchgen",
        "torch-2.6.0.dist-info",
        "torchvision-1.dist-info",
        "__pycache__",
        "pip",
    ]
    assert names_to_link(present, {"torch", "torchgen"}) == ("nvidia", "pip", "torchvision-1.dist-info")


def test_interpreter_is_this_one_if_it_fits():
    assert interpreter_for([TAG, "cp999"]) == Path(sys.executable)


def test_interpreter_of_another_version_is_looked_for_on_the_path(monkeypatch):
    monkeypatch.setattr(proc.shutil, "which", lambda program: f"/somewhere/{program}")
    assert interpreter_for(["cp399"]) == Path("/somewhere/python3.99")
    monkeypatch.setattr(proc.shutil, "which", lambda _program: None)
    with pytest.raises(PrerequisiteMissing, match=r"python3\.99"):
        interpreter_for(["cp399"])


def test_interpreter_for_no_cpython_is_refused():
    with pytest.raises(WheelMismatch, match="pp310"):
        interpreter_for(["pp310"])


def test_an_environment_of_ours_or_theirs_must_have_torch(stage, tmp_path):
    theirs = Environment.of(stage.base.python)
    assert theirs.site == stage.base.site
    assert theirs.root is None
    proc.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "empty"], what="make one", timeout=60)
    with pytest.raises(WheelMismatch, match="no torch"):
        Environment.of(tmp_path / "empty" / "bin" / "python")
