from __future__ import annotations

import json
import zipfile
from dataclasses import replace
from types import ModuleType

import pytest
from kits.provenancekit import patched_wheel

from multiworld._c10d import capabilities
from multiworld._c10d.capabilities import BackendAbility, Build
from multiworld._core.nccl_policy import Implementation, NcclFacts, decide
from multiworld.cli import doctor, post_setup
from multiworld.cli.main import COMMANDS, main
from multiworld.errors import MultiworldError, ShimError
from multiworld.shim import report, torchsite
from multiworld.shim.install import Inspection, LoaderState
from multiworld.shim.marker import read_marker
from multiworld.shim.report import Patched, Status

LOADER = Inspection(
    "/t", "2.6.0", LoaderState.ABSENT, None, 1, False, "it is not installed", "Run m8d-post-setup"
)
STOCK = NcclFacts("nccl", Implementation.LEGACY, remote_error=True, groups=1)


def status_of(facts=STOCK, *, patched=None, loader=LOADER, environ=None, cuda="12.4") -> Status:
    return Status(
        multiworld="0.1",
        torch=Build(
            "2.6.0+cu124", "2236df177080" * 3, cuda, None, "2.21.5" if cuda else None, True, "/t/torch"
        ),
        patched=patched or Patched(marked=False),
        nccl=decide(facts, environ or {}),
        backends=(
            BackendAbility("gloo", True, "ProcessGroupGloo", True, "sockets", "yes", False),
            BackendAbility("odd", True),
            BackendAbility("mpi", False),
        ),
        loader=loader,
        router=False,
    )


def run(monkeypatch, capsys, found, *arguments):
    def status():
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(doctor, "status", status)
    code = main(["doctor", *arguments])
    return code, capsys.readouterr()


def test_it_tells_the_build_the_mode_what_remains_and_the_next_step(monkeypatch, capsys):
    code, said = run(monkeypatch, capsys, status_of())
    assert code == 0
    assert said.err == ""
    for text in (
        "torch      2.6.0+cu124 (CUDA 12.4, NCCL 2.21.5), commit 2236df177080",
        "patches    none: an official build",
        "namespace  it is not installed. Run m8d-post-setup",
        "gloo     ProcessGroupGloo  yes           sockets  yes       no",
        "odd      ?                 ?             -        ?         ?",
        "not in this build: mpi",
        "NCCL fault management: guarded: this torch is not patched.",
        "    TORCH_NCCL_ASYNC_ERROR_HANDLING=0",
        "1 NCCL group(s)",
        "    D5  a failing call",
        "build-torch",
    ):
        assert text in said.out
    assert max(map(len, said.out.splitlines())) <= 100


def test_a_patched_build_and_one_that_contradicts_itself(monkeypatch, capsys):
    topics = ("group-guard", "cleanup-only", "abort-offload")
    facts = NcclFacts("nccl", Implementation.LEGACY, patched=True, topics=topics)
    patched = Patched(marked=True, topics=facts.topics, mode="overlay", version="2.6.0+cu124.m8d1")
    code, said = run(monkeypatch, capsys, status_of(facts, patched=patched))
    assert code == 0
    assert "patches    group-guard, cleanup-only, abort-offload (overlay build 2.6.0+cu124.m8d1)" in said.out
    assert "NCCL fault management: on:" in said.out
    assert "what remains, and ends no process:" in said.out
    assert "its wheel has no provenance statement" in said.out
    _, said = run(monkeypatch, capsys, status_of(facts, patched=replace(patched, built_files=9)))
    assert "its 9 changed files are as built" in said.out
    ported = replace(patched, ported_from="2.5.1")
    _, said = run(monkeypatch, capsys, status_of(facts, patched=ported))
    assert "PORTED from 2.5.1's series, not proven by hand" in said.out
    broken = Patched(marked=True, disagreements=("nccl.so.2 says nothing of patches",))
    code, said = run(monkeypatch, capsys, status_of(patched=broken))
    assert code == doctor.UNSOUND == 1
    assert "CONTRADICTS ITSELF" in said.out
    assert "nccl.so.2 says nothing of patches" in said.out


@pytest.mark.parametrize("damage", ["second", "stripped"])
def test_a_patched_build_whose_files_cannot_be_compared_says_why(monkeypatch, capsys, tmp_path, damage):
    site = tmp_path / "site"
    with zipfile.ZipFile(patched_wheel(tmp_path).path) as archive:
        archive.extractall(site)
    marker = read_marker(site / "torch", check_library=False)
    monkeypatch.setattr(report, "marker_of_build", lambda: marker)
    monkeypatch.setattr(torchsite, "find_torch", lambda: site / "torch")
    assert report._patched().disagreements == ()
    if damage == "second":
        left = site / "torch-2.5.1.dist-info"
        left.mkdir()
        (left / "METADATA").write_text("Name: torch\nVersion: 2.5.1\n\n")
        why = "has torch-2.5.1.dist-info and torch-2.6.0"
    else:
        next(site.glob("torch-*/RECORD")).unlink()
        why = "has no RECORD"
    code, said = run(monkeypatch, capsys, status_of(patched=report._patched()))
    assert code == doctor.UNSOUND
    assert why in " ".join(said.out.split())
    assert "an older toolchain" not in said.out


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        ("second", "has torch-2.5.1.dist-info and torch-2.6.0"),
        ("stripped", "has no RECORD"),
        ("source", "torch was not installed from a wheel"),
    ],
)
def test_an_installation_that_cannot_be_looked_at_is_no_source_tree(
    monkeypatch, capsys, tmp_path, damage, why
):
    site = tmp_path / "site"
    with zipfile.ZipFile(patched_wheel(tmp_path).path) as archive:
        archive.extractall(site)
    monkeypatch.setattr(torchsite, "find_torch", lambda: site / "torch")
    [own] = site.glob("torch-*.dist-info")
    if damage == "second":
        left = site / "torch-2.5.1.dist-info"
        left.mkdir()
        (left / "METADATA").write_text("Name: torch\nVersion: 2.5.1\n\n")
    elif damage == "stripped":
        (own / "RECORD").unlink()
    else:
        own.rename(tmp_path / "elsewhere")
    loader, error = report._loader()
    assert loader is None
    _, said = run(monkeypatch, capsys, replace(status_of(loader=None), loader_error=error))
    assert why in " ".join(said.out.split())
    assert ("not installed from a wheel" in said.out) is (damage == "source")


def test_other_builds_in_words(monkeypatch, capsys):
    facts = NcclFacts("nccl", Implementation.NONE)
    code, said = run(monkeypatch, capsys, status_of(facts, cuda=None, loader=None))
    assert code == 0
    assert "(CPU only)" in said.out
    assert "not installed from a wheel" in said.out
    assert "NCCL fault management: off: this torch has no backend 'nccl'." in said.out
    environ = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "3"}
    assert "=3 is set: only with 0" in run(monkeypatch, capsys, status_of(environ=environ))[1].out


@pytest.mark.parametrize("arguments", [(), ("--json",)])
def test_a_torch_that_is_missing_or_broken(monkeypatch, capsys, arguments):
    code, said = run(
        monkeypatch, capsys, ShimError("torch cannot be imported: why", next_step="Install it"), *arguments
    )
    assert code == 1
    assert "torch cannot be imported: why. Install it." in said.out
    if arguments:
        assert json.loads(said.out)["sound"] is False


@pytest.mark.parametrize("name", ["torch", "torch.distributed"])
@pytest.mark.parametrize("arguments", [(), ("--json",)])
@pytest.mark.parametrize(
    ("error", "says"),
    [
        (ImportError("libcudnn.so.9: no such file"), "libcudnn.so.9: no such file"),
        (ValueError("numpy.dtype size changed"), "ValueError: numpy.dtype size changed"),
        (RuntimeError("already loaded"), "RuntimeError: already loaded"),
        (AttributeError("no attribute"), "AttributeError: no attribute"),
        (SystemError("initialization failed"), "SystemError: initialization failed"),
    ],
)
def test_whatever_importing_torch_raises_is_told(monkeypatch, capsys, name, arguments, error, says):
    fake = ModuleType("torch")
    fake.version = fake  # type: ignore[attr-defined]

    def importing(asked):
        if asked == name:
            raise error
        return fake

    monkeypatch.setattr(capabilities, "import_module", importing)
    assert main(["doctor", *arguments]) == doctor.UNSOUND
    said = capsys.readouterr()
    told = json.loads(said.out)["error"] if arguments else said.out
    assert told.removeprefix("torch cannot be used: ").startswith(f"{name} cannot be imported: {says}")
    assert said.err == ""


@pytest.mark.parametrize("arguments", [(), ("--json",)])
def test_a_torch_of_which_only_the_folder_is_left_is_told(monkeypatch, capsys, arguments):
    empty = ModuleType("torch")
    empty.__path__ = ["/t/torch"]
    monkeypatch.setattr(capabilities, "import_module", lambda _: empty)
    assert main(["doctor", *arguments]) == doctor.UNSOUND
    assert "/t/torch holds no torch" in capsys.readouterr().out


def test_json_has_everything_in_plain_values(monkeypatch, capsys):
    code, said = run(monkeypatch, capsys, status_of(), "--json")
    told = json.loads(said.out)
    assert code == 0
    assert told["sound"] is True
    assert told["nccl"]["mode"] == "guarded"
    assert told["nccl"]["environment"]["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
    assert told["loader"]["state"] == "absent"
    assert told["backends"][0]["reconfigure"] is False
    assert set(told) == {
        "multiworld",
        "torch",
        "patched",
        "nccl",
        "backends",
        "clash",
        "loader",
        "loader_error",
        "router",
        "sound",
    }


def test_a_wrong_setting_is_an_error_with_an_exit_code(monkeypatch, capsys):
    code, said = run(monkeypatch, capsys, MultiworldError("M8D_SHIM='x'"))
    assert code == 9
    assert said.err == "multiworld doctor: M8D_SHIM='x'.\n"


def test_the_commands_are_listed(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    said = capsys.readouterr().out
    for name, command in COMMANDS.items():
        assert name in said
        assert command.SUMMARY.split()[0] in said
    with pytest.raises(SystemExit) as caught:
        main([])
    assert caught.value.code == 2


def test_post_setup_is_a_command_too(capsys, tmp_path):
    assert main(["post-setup", "--check", "--torch", str(tmp_path)]) == 3
    assert "there is no torch in" in capsys.readouterr().err
    assert COMMANDS["post-setup"] is post_setup
