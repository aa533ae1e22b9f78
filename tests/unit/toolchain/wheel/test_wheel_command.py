import json
from io import StringIO
from types import SimpleNamespace

import pytest
from kits.fakewheel import contents, target_of, write_wheel
from rich.console import Console
from test_facts import C10, compile_library
from test_inspect import CUDA, NEW, OVERLAY, PATCH, built, link  # noqa: F401  (built is a fixture)

from m8d_build.cli import main
from m8d_build.cli import wheel as module
from m8d_build.errors import (
    BuildBusy,
    CheckFailed,
    PrerequisiteMissing,
    WheelAlreadyPatched,
    WheelInvalid,
    WheelMismatch,
)
from m8d_build.files.lock import LOCK_NAME, hold
from m8d_build.wheel.inspect import inspect_wheel
from m8d_build.wheel.wheelfile import open_wheel

pytestmark = pytest.mark.compiler


@pytest.fixture
def official(tmp_path, built):  # noqa: F811
    files = {
        CUDA: (built / "libtorch_cuda.so").read_bytes(),
        "torch/lib/libc10.so": compile_library(
            tmp_path / "c10", "libc10.so", C10, "-D_GLIBCXX_USE_CXX11_ABI=0"
        ),
        "torch/lib/libtorch_cpu.so": compile_library(
            tmp_path / "cpu",
            "cpu.so",
            'const char* c = "-D_GLIBCXX_USE_CXX11_ABI=0 -fabi-version=11";',
        ),
    }
    return write_wheel(tmp_path / "official", contents(**files))


@pytest.fixture
def call(tmp_path, built, official, monkeypatch):  # noqa: F811
    """Run the command; the series has one topic, and the wheel is on record."""
    from hashlib import sha256

    patch = SimpleNamespace(name="0001-one.patch", topic="one", sha256=sha256(PATCH).hexdigest())
    target = target_of(official)
    series = SimpleNamespace(
        topics=("one",), patches=(patch,), digest="0123456789ab", paths=["torch/csrc/a.cpp"]
    )
    monkeypatch.setattr(module, "load_series", lambda patches, version: series)
    monkeypatch.setattr(module, "load_targets", lambda patches: SimpleNamespace(get=lambda version: target))

    def run(wheel=official, overlay=built / "nccl.so.2", *more):
        out = StringIO()
        arguments = ["--cache", tmp_path / "cache", "wheel", "--wheel", wheel, "--overlay", overlay]
        arguments += ["--out", tmp_path / "out", *more]
        code = main([str(a) for a in arguments], console=Console(file=out, width=300, highlight=False))
        return code, out.getvalue()

    run.series = series
    return run


def test_an_overlay_goes_into_an_official_wheel(tmp_path, call):
    code, text = call()
    assert code == 0, text
    (path,) = (tmp_path / "out").glob("*.whl")
    assert str(path) in text
    found = inspect_wheel(path, tmp_path)
    assert found.consistent, found.disagreements
    assert found.bindings.moved == ("answer",)
    assert found.marker.overlay.file == OVERLAY
    # The library says of which topics it is, and not of which patches.
    assert open_wheel(path).version.local.endswith(".unverified")
    assert found.notes == (f"made from inputs that are not those on record: {OVERLAY.rpartition('/')[2]}",)
    left = {p.name for p in (tmp_path / "out").iterdir() if not p.name.startswith(".m8d")}
    assert left == {path.name, f"{path.name}.provenance.json", f"{path.name}.cdx.json"}


def test_json_has_path_size_and_digest(tmp_path, call, official, built):  # noqa: F811
    from hashlib import sha256

    said = json.loads(call(official, built / "nccl.so.2", "--json")[1])
    (path,) = (tmp_path / "out").glob("*.whl")
    data = path.read_bytes()
    assert said == {"path": str(path), "size": len(data), "sha256": sha256(data).hexdigest()}


def test_a_patched_wheel_is_refused(tmp_path, call):
    call()
    (path,) = (tmp_path / "out").glob("*.whl")
    assert call(path)[0] == WheelAlreadyPatched.exit_code


def test_a_wheel_that_is_not_on_record_is_refused_unless_allowed(tmp_path, call, official, built):  # noqa: F811
    import zipfile

    with zipfile.ZipFile(official, "a") as archive:
        archive.comment = b"changed"
    assert call()[0] == WheelMismatch.exit_code
    assert call(official, built / "nccl.so.2", "--allow-unverified")[0] == 0
    (path,) = (tmp_path / "out").glob("*.whl")
    assert open_wheel(path).version.local.endswith(".unverified")
    found = inspect_wheel(path, tmp_path, symbols=False)
    assert found.consistent, found.disagreements
    assert found.notes == (
        f"made from inputs that are not those on record: {official.name}, {OVERLAY.rpartition('/')[2]}",
    )


def test_a_wheel_that_is_none_is_refused(tmp_path, call):
    assert call(tmp_path / "torch-2.6.0-cp311-cp311-linux_x86_64.whl")[0] == WheelInvalid.exit_code


def test_an_overlay_that_is_not_there_or_no_overlay_is_refused(tmp_path, call, official, built):  # noqa: F811
    code, text = call(official, tmp_path / "nccl.so.2")
    assert code == PrerequisiteMissing.exit_code
    assert "is missing" in text
    code, text = call(official, built / "libtorch_cuda.so")
    assert code == PrerequisiteMissing.exit_code
    assert "says nothing of patches" in text


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ('\\"one\\"', '\\"two\\"', CheckFailed),
        ("2.6.0", "2.5.1", PrerequisiteMissing),
        ('\\"schema\\":1', '\\"schema\\":7', CheckFailed),
    ],
    ids=["topics", "version", "schema"],
)
def test_an_overlay_of_other_patches_is_refused(tmp_path, call, official, built, old, new, expected):  # noqa: F811
    assert old in NEW
    (tmp_path / "other").mkdir()
    link(tmp_path / "other/nccl.so.2", NEW.replace(old, new), f"-L{built}", "-l:libtorch_cuda.so")
    assert call(official, tmp_path / "other/nccl.so.2")[0] == expected.exit_code
    assert list((tmp_path / "out").glob("*.whl")) == []


def test_a_series_that_changes_python_files_is_refused(tmp_path, call):
    """The wheel would say that it has them."""
    call.series.paths.append("torch/distributed/distributed_c10d.py")
    code, out = call()
    assert code == CheckFailed.exit_code
    assert "torch/distributed/distributed_c10d.py as well" in out
    assert "python -m m8d_build overlay" in out
    assert not list((tmp_path / "out").glob("*.whl"))


def test_what_killed_runs_left_there_goes_away(tmp_path, call):
    for name in (".wheel-abc", ".torch-2.5.0+cu124.m8d1-cp311-cp311-linux_x86_64.part"):
        (tmp_path / "out" / name / "torch").mkdir(parents=True)
    assert call()[0] == 0
    assert not [path.name for path in (tmp_path / "out").glob(".*") if not path.name.startswith(LOCK_NAME)]


def test_a_folder_in_use_is_left_alone(tmp_path, call):
    with hold(tmp_path / "out", what="test"):
        assert call()[0] == BuildBusy.exit_code
