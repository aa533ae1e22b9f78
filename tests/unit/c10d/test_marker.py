import hashlib
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from m8d_build.wheel.marking import LICENCE_NAME, make_marker, make_notice
from multiworld.errors import MarkerError
from multiworld.shim.marker import (
    LibraryInfo,
    Marker,
    Overlay,
    Topic,
    compare,
    find_torch,
    library_info,
    library_info_in,
    parse_marker,
    read_marker,
)

TOPICS = (Topic("group-guard", "a" * 64), Topic("marker", "b" * 64))
ROOT = Path(__file__).parents[3]


def library(torch="2.6.0", topics=("group-guard", "marker")):
    info = json.dumps({"schema": 1, "torch": torch, "topics": list(topics)}, separators=(",", ":"))
    return b"\x7fELF" + bytes(5000) + b"m8d-patch-info:" + info.encode() + b"\0" + bytes(5000)


def marker_for(data, **changes):
    overlay = Overlay("torch/lib/nccl.so.2", hashlib.sha256(data).hexdigest())
    marker = Marker("2.6.0", "cu124.m8d1", "c" * 40, TOPICS, "overlay", "0.1.0", overlay)
    return replace(marker, **changes)


def install(folder, data=None, **changes):
    data = library() if data is None else data
    torch = folder / "torch"
    (torch / "lib").mkdir(parents=True)
    (torch / "lib/nccl.so.2").write_bytes(data)
    (torch / "m8d.json").write_bytes(make_marker(marker_for(data, **changes)))
    (torch / "__init__.py").write_text("raise RuntimeError('torch was imported')\n")
    return torch


def test_a_patched_torch_is_read_and_agrees(tmp_path):
    marker = read_marker(install(tmp_path))
    assert marker == marker_for(library())
    assert marker.agrees
    assert marker.library == "torch/lib/nccl.so.2"


@pytest.mark.parametrize(
    ("local", "number"),
    [
        ("cu124.m8d4", 4),
        ("m8d12.edited1a2b3c4d", 12),
        ("m8d0.new1a2b3c4d", 0),
        ("mine", 0),
        ("cu124.xm8d3", 0),
    ],
)
def test_a_build_has_a_number(local, number):
    assert marker_for(library(), local=local).number == number


def test_a_stock_torch_has_none(tmp_path):
    (tmp_path / "torch/lib").mkdir(parents=True)
    assert read_marker(tmp_path / "torch") is None
    (tmp_path / "torch/lib/nccl.so.2").write_bytes(b"\x7fELF somebody else's")
    assert read_marker(tmp_path / "torch") is None
    assert read_marker(tmp_path / "nothing/torch") is None


def test_the_installed_torch_is_found_without_importing_it(tmp_path):
    install(tmp_path)
    code = (
        "import sys; from multiworld.shim import marker; m = marker.read_marker();"
        "assert m.agrees and m.local == 'cu124.m8d1', m; assert 'torch' not in sys.modules; print(marker.find_torch())"
    )
    out = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": f"{tmp_path}:{ROOT}"},
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    assert Path(out.strip()) == tmp_path / "torch"


def test_importing_the_reader_loads_nothing_but_the_standard_library():
    code = (
        "import sys; import multiworld.shim.marker;"
        "own = {n.partition('.')[0] for n in sys.modules} - set(sys.stdlib_module_names);"
        "print(sorted(n for n in own if not n.startswith('_')))"
    )
    out = subprocess.run(
        [sys.executable, "-S", "-c", code],
        env={"PYTHONPATH": str(ROOT)},
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    assert out.strip() == "['multiworld']"


def test_no_torch_at_all_is_said(monkeypatch):
    monkeypatch.setattr("multiworld._c10d.marker.find_spec", lambda name: None)
    with pytest.raises(MarkerError, match="torch is not installed"):
        find_torch()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (library(torch="2.5.1"), r"is of torch 2\.5\.1, m8d\.json says 2\.6\.0"),
        (library(topics=["group-guard"]), r"has the topics group-guard; m8d\.json says group-guard, marker"),
        (library(topics=["marker", "group-guard"]), "has the topics marker, group-guard"),
        (b"\x7fELF" + bytes(100), "says nothing of patches"),
        (b"m8d-patch-info:{broken\0", "patch info is unreadable"),
        (b"", "says nothing of patches"),
    ],
    ids=["version", "topic missing", "order", "no info", "broken", "empty"],
)
def test_a_library_that_says_otherwise_is_reported(tmp_path, data, message):
    import re

    marker = read_marker(install(tmp_path, data))
    assert not marker.agrees
    assert any(re.search(message, text) for text in marker.disagreements), marker.disagreements


def test_a_library_changed_after_the_build_is_reported(tmp_path):
    torch = install(tmp_path)
    (torch / "lib/nccl.so.2").write_bytes(library() + b"more")
    (found,) = read_marker(torch).disagreements
    assert "has the SHA-256" in found


def test_a_missing_library_is_reported(tmp_path):
    torch = install(tmp_path)
    (torch / "lib/nccl.so.2").unlink()
    (found,) = read_marker(torch).disagreements
    assert "nccl.so.2 is missing" in found


def test_the_library_is_left_alone_when_not_asked_for(tmp_path):
    torch = install(tmp_path)
    (torch / "lib/nccl.so.2").unlink()
    assert read_marker(torch, check_library=False).agrees


def test_a_library_without_its_json_is_an_error(tmp_path):
    torch = install(tmp_path)
    (torch / "m8d.json").unlink()
    with pytest.raises(MarkerError, match="is a patched library, but there is no"):
        read_marker(torch)


def test_a_full_build_keeps_its_info_in_libtorch_cuda(tmp_path):
    torch = install(tmp_path, mode="full", overlay=None)
    (torch / "lib/libtorch_cuda.so").write_bytes(library())
    assert read_marker(torch).agrees
    (torch / "lib/libtorch_cuda.so").write_bytes(library(torch="2.4.0"))
    assert not read_marker(torch).agrees


def bad(**changes):
    raw = json.loads(make_marker(marker_for(b"")))
    for key, value in changes.items():
        if value is ...:
            del raw[key]
        else:
            raw[key] = value
    return json.dumps(raw).encode()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"{", "no JSON"),
        pytest.param(b"[" * 200_000 + b"]" * 200_000, "no JSON", id="nested too deeply"),
        (b"\xff\xfe\xfd", "no JSON"),
        (b"[]", "has schema None"),
        (b"{}", "has schema None"),
        (bad(schema=2), "has schema 2.*reads schema 1"),
        (bad(torch=...), "KeyError: 'torch'"),
        (bad(overlay=...), "KeyError: 'overlay'"),
        (bad(topics="group-guard"), "breaks the schema"),
        (bad(topics=[{"name": 1, "sha256": ""}]), "name is 1, must be a string"),
        (bad(mode="other"), "mode 'other'"),
        (bad(mode="full"), "mode 'full' with overlay"),
        (bad(overlay=None), "mode 'overlay' with overlay None"),
        (bad(overlay={"file": "../../x.so", "sha256": ""}), "leaves the installation"),
        (bad(overlay={"file": "/etc/x.so", "sha256": ""}), "leaves the installation"),
    ],
)
def test_a_json_that_is_no_marker_is_an_error(data, message):
    with pytest.raises(MarkerError, match=message):
        parse_marker(data)


def test_unknown_keys_are_ignored():
    assert parse_marker(bad(later="more")) == marker_for(b"")


def test_the_same_marker_gives_the_same_bytes():
    assert make_marker(marker_for(b"x")) == make_marker(marker_for(b"x"))
    assert make_marker(marker_for(b"x")).endswith(b"}\n")
    with pytest.raises(MarkerError):
        make_marker(marker_for(b"x", mode="other"))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'm8d-patch-info:{"schema":1', "has no end"),
        (b'm8d-patch-info:{"schema":9,"torch":"1","topics":[]}\0', "schema 9"),
        (b'm8d-patch-info:{"schema":1,"topics":[]}\0', "KeyError"),
        (b'm8d-patch-info:{"schema":1,"torch":"1","topics":"ab"}\0', "must be names"),
        (library() + library(torch="2.5.1"), "2 patch infos that differ"),
        pytest.param(
            b'm8d-patch-info:{"a":' + b"[" * 30_000 + b"]" * 30_000 + b"}\0",
            "is unreadable",
            id="nested too deeply",
        ),
    ],
)
def test_an_unreadable_patch_info_is_an_error(data, message):
    with pytest.raises(MarkerError, match=message):
        library_info_in(data, where="lib")


def test_a_patch_info_may_stand_twice_and_anywhere():
    assert library_info_in(b"m8d-patch-info: no brace" + library() * 2, where="lib") == LibraryInfo(
        "2.6.0", ("group-guard", "marker")
    )


def test_a_file_that_is_not_there_or_a_folder_is_told_apart(tmp_path):
    assert library_info(tmp_path / "none.so") is None
    with pytest.raises(MarkerError, match="cannot be read"):
        library_info(tmp_path)


def test_a_compiled_library_says_the_same_by_its_bytes_and_by_its_function(tmp_path):
    import ctypes

    source = tmp_path / "a.c"
    source.write_text(
        'static const char info[] = "m8d-patch-info:{\\"schema\\":1,\\"torch\\":\\"2.6.0\\",\\"topics\\":[\\"marker\\"]}";\n'
        "const char *m8d_patch_info(void) { return info + 15; }\n"
    )
    subprocess.run(["cc", "-shared", "-fPIC", "-O2", "-o", tmp_path / "a.so", source], check=True)
    function = ctypes.CDLL(str(tmp_path / "a.so")).m8d_patch_info
    function.restype = ctypes.c_char_p
    said = json.loads(function())
    assert library_info(tmp_path / "a.so") == LibraryInfo(said["torch"], tuple(said["topics"]))


def test_comparing_without_a_digest_leaves_the_digest_out():
    marker = marker_for(b"x")
    info = LibraryInfo("2.6.0", ("group-guard", "marker"))
    assert compare(marker, info, None) == ()
    assert len(compare(marker, info, "0" * 64)) == 1


def test_the_notice_names_what_was_changed_and_by_what():
    text = make_notice(
        marker_for(b"x"), source="torch.whl", source_sha256="d" * 64, changed=("b", "a")
    ).decode()
    for part in ("2.6.0+cu124.m8d1", "torch.whl", "d" * 64, "group-guard, marker", "c" * 40, LICENCE_NAME):
        assert part in text
    assert text.index("  a\n") < text.index("  b\n")
