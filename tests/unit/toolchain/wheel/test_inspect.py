import hashlib
import json
import subprocess
from io import StringIO

import pytest
from kits.fakewheel import COMMIT, contents, write_wheel
from rich.console import Console

from m8d_build.cli import main
from m8d_build.errors import (
    CheckFailed,
    WheelInvalid,
)
from m8d_build.overlay.graft import graft_edits
from m8d_build.wheel.inspect import TopicStatus, inspect_wheel
from m8d_build.wheel.marking import make_marker
from m8d_build.wheel.repack import Edit, Put, repack
from m8d_build.wheel.wheelfile import open_wheel
from multiworld.shim.marker import Marker, Overlay, Topic

pytestmark = pytest.mark.compiler

CUDA, OVERLAY = "torch/lib/libtorch_cuda.so", "torch/lib/nccl.so.2"
PATCH = b"the patch\n"
INFO = '"m8d-patch-info:{\\"schema\\":1,\\"torch\\":\\"2.6.0\\",\\"topics\\":[\\"one\\"]}"'
OLD = """
extern "C" int answer() { return 1; }
extern "C" int stays() { return 3; }
"""
NEW = f"""
static const char info[] = {INFO};
extern "C" const char* m8d_patch_info() {{ return info + 15; }}
extern "C" int answer() {{ return 2; }}
"""


def link(path, source, *flags):
    text = path.with_suffix(".cpp")
    text.write_text(source)
    subprocess.run(
        ["g++", "-shared", "-fPIC", "-nostdlib", f"-Wl,-soname,{path.name}", "-Wl,-rpath,$ORIGIN",
         "-Wl,--hash-style=gnu", "-Wl,--no-as-needed", "-o", path, text, *flags],
        check=True,
    )  # fmt: skip


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("libs")
    # The graft writes the overlay's name over the end of a name that is there: the CUDA build has libnccl.so.2.
    link(folder / "libnccl.so.2", 'extern "C" int nccl() { return 0; }\n')
    link(folder / "libtorch_cuda.so", OLD, f"-L{folder}", "-l:libnccl.so.2")
    link(folder / "nccl.so.2", NEW, f"-L{folder}", "-l:libtorch_cuda.so")
    return folder


def marker_of(built, **changes):
    digest = hashlib.sha256((built / "nccl.so.2").read_bytes()).hexdigest()
    fields = {
        "torch": "2.6.0", "local": "cu124.m8d1", "commit": COMMIT,
        "topics": (Topic("one", hashlib.sha256(PATCH).hexdigest()),),
        "mode": "overlay", "builder": "0.1.0", "overlay": Overlay(OVERLAY, digest),
    }  # fmt: skip
    return Marker(**{**fields, **changes})


def official(tmp_path, built):
    return write_wheel(tmp_path / "official", contents(**{CUDA: (built / "libtorch_cuda.so").read_bytes()}))


def patched(tmp_path, built, *, graft=True, marker=None, put=()):
    changes = [
        Put(OVERLAY, built / "nccl.so.2", executable=True),
        Put("torch/m8d.json", make_marker(marker or marker_of(built))),
        *put,
    ]
    if graft:
        edits = graft_edits(built / "libtorch_cuda.so", built / "nccl.so.2").edits
        changes.append(Edit(CUDA, tuple((edit.offset, edit.new) for edit in edits)))
    names = [change.name for change in changes]
    kept = [change for number, change in enumerate(changes) if change.name not in names[number + 1 :]]
    wheel = open_wheel(official(tmp_path, built))
    return repack(wheel, tmp_path / "out", kept, local="cu124.m8d1", platform="manylinux_2_17_x86_64").path


@pytest.fixture
def patches(tmp_path):
    folder = tmp_path / "patches/v2.6.0"
    folder.mkdir(parents=True)
    (folder / "series").write_text("")
    return folder.parent


def test_a_patched_wheel_agrees_with_itself(tmp_path, built, patches):
    found = inspect_wheel(patched(tmp_path, built), patches, deep=True, scratch=tmp_path)
    assert found.consistent, found.disagreements
    assert found.marker == marker_of(built)
    assert found.library.topics == ("one",)
    assert found.bindings.needed
    assert found.bindings.moved == ("answer",)
    assert found.bindings.added == ("m8d_patch_info",)
    assert found.bindings.shared == found.bindings.lost == ()
    assert not list(tmp_path.glob("inspect-*"))


def test_symbols_are_left_out_when_not_asked_for(tmp_path, built, patches):
    found = inspect_wheel(patched(tmp_path, built), patches, symbols=False)
    assert found.consistent
    assert found.bindings is None


def test_topics_are_compared_with_the_patches_here(tmp_path, built, patches, monkeypatch):
    from m8d_build.wheel import inspect as module

    class Patch:
        sha256 = hashlib.sha256(PATCH).hexdigest()

    class Series:
        def patch(self, topic):
            return Patch() if topic in {"one", "two"} else None

    monkeypatch.setattr(module, "load_series", lambda patches, version: Series())
    topics = (*marker_of(built).topics, Topic("two", "0" * 64), Topic("three", "0" * 64))
    states = module._topics(topics, "2.6.0", patches)
    assert [state.status for state in states] == [TopicStatus.SAME, TopicStatus.DIFFERS, TopicStatus.UNKNOWN]
    assert module._topics(topics[:1], "1.0.0", patches)[0].status is TopicStatus.UNKNOWN


def test_an_official_wheel_is_not_patched_and_its_renaming_is_a_note(tmp_path, built, patches):
    found = inspect_wheel(official(tmp_path, built), patches)
    assert found.consistent
    assert found.marker is None
    assert "linux_x86_64" in found.notes[0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"local": "cu124.m8d9"},
            r"torch/version\.py says 2\.6\.0\+cu124\.m8d1, .* says 2\.6\.0\+cu124\.m8d9",
        ),
        ({"commit": "0" * 40}, "says commit"),
        ({"topics": ()}, "has the topics one"),
        ({"overlay": Overlay(OVERLAY, "0" * 64)}, "has the SHA-256"),
        ({"overlay": Overlay("torch/lib/other.so", "0" * 64)}, r"there is no torch/lib/other\.so"),
        ({"mode": "full", "overlay": None}, "says nothing of patches"),
    ],
)
def test_a_marker_that_says_otherwise_is_reported(tmp_path, built, patches, changes, message):
    import re

    found = inspect_wheel(patched(tmp_path, built, marker=marker_of(built, **changes)), patches)
    assert not found.consistent
    assert any(re.search(message, text) for text in found.disagreements), found.disagreements


def test_an_overlay_that_nobody_asks_for_is_reported(tmp_path, built, patches):
    found = inspect_wheel(patched(tmp_path, built, graft=False), patches)
    assert found.bindings.ambiguous == ("answer",)
    assert any("does not ask for nccl.so.2" in text for text in found.disagreements)
    assert any("still finds its own answer" in text for text in found.disagreements)


def test_names_that_lead_nowhere_are_reported(tmp_path, built, patches):
    bare = tmp_path / "bare"
    bare.mkdir()
    link(bare / "nccl.so.2", NEW.replace("int answer()", "int other()"), f"-L{built}", "-l:libtorch_cuda.so")
    digest = hashlib.sha256((bare / "nccl.so.2").read_bytes()).hexdigest()
    marker = marker_of(built, overlay=Overlay(OVERLAY, digest))
    path = patched(tmp_path, built, marker=marker, put=[Put(OVERLAY, bare / "nccl.so.2")])
    found = inspect_wheel(path, patches)
    assert found.disagreements == ("nothing defines answer any more",)


def test_a_broken_marker_is_a_disagreement(tmp_path, built, patches):
    found = inspect_wheel(patched(tmp_path, built, put=[Put("torch/m8d.json", b"{")]), patches)
    assert any("no JSON" in text for text in found.disagreements)


def test_an_overlay_without_a_marker_is_a_disagreement(tmp_path, built, patches):
    path = write_wheel(tmp_path, contents(**{OVERLAY: b"x"}))
    assert inspect_wheel(path, patches).disagreements == (f"there is {OVERLAY}, but no torch/m8d.json",)


def test_tags_that_differ_are_a_disagreement_in_a_patched_wheel(tmp_path, built, patches):
    path = patched(tmp_path, built)
    other = path.rename(path.with_name(path.name.replace("2_17", "2_28")))
    assert any(
        "WHEEL says cp311-cp311-manylinux_2_17" in text
        for text in inspect_wheel(other, patches).disagreements
    )


def run(*arguments):
    out = StringIO()
    code = main([str(a) for a in arguments], console=Console(file=out, width=200, highlight=False))
    return code, out.getvalue()


def test_the_command_prints_what_was_found(tmp_path, built, patches):
    code, text = run("--patches", patches, "inspect", patched(tmp_path, built))
    assert code == 0
    for part in (
        "2.6.0+cu124.m8d1",
        "topic one",
        "asks for nccl.so.2",
        "1 symbols bind to nccl.so.2",
        "agrees",
    ):
        assert part in text


def test_the_command_says_whose_patches_were_ported(tmp_path, built, patches):
    path = patched(tmp_path, built, marker=marker_of(built, ported_from="2.5.1"))
    assert "ported from 2.5.1's series, not proven by hand" in run("--patches", patches, "inspect", path)[1]
    said = json.loads(run("--patches", patches, "inspect", "--json", path)[1])
    assert said["marker"]["ported_from"] == "2.5.1"


def test_the_command_prints_json(tmp_path, built, patches):
    code, text = run("--patches", patches, "inspect", "--json", patched(tmp_path, built))
    said = json.loads(text)
    assert code == 0
    assert said["consistent"] is True
    assert said["patched"] is True
    assert said["bindings"]["moved"] == ["answer"]
    assert said["marker"]["overlay"]["file"] == OVERLAY


def test_the_commands_exit_code_says_that_something_disagrees(tmp_path, built, patches):
    path = patched(tmp_path, built, graft=False)
    code, text = run("--patches", patches, "inspect", path)
    assert code == CheckFailed.exit_code
    assert "DISAGREES: torch/lib/libtorch_cuda.so does not ask" in text
    code, text = run("--patches", patches, "inspect", "--json", path)
    assert code == CheckFailed.exit_code
    assert json.loads(text)["consistent"] is False


def test_the_command_on_something_that_is_no_wheel(tmp_path, patches):
    (tmp_path / "torch-2.6.0-cp311-cp311-linux_x86_64.whl").write_bytes(b"PK")
    code, text = run("--patches", patches, "inspect", tmp_path / "torch-2.6.0-cp311-cp311-linux_x86_64.whl")
    assert code == WheelInvalid.exit_code
    assert "no whole zip archive" in text
