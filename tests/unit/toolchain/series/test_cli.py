from __future__ import annotations

import errno
import fcntl
import io
import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from kits.patchkit import GROUP, NCCL, TOPICS, commit_all, snapshot, write_targets, write_tree
from rich.console import Console

from m8d_build import cli
from m8d_build.errors import (
    AlreadyApplied,
    BlobMismatch,
    BuildBusy,
    BuildError,
    CommandFailed,
    DirtyTree,
    DiskFull,
    Interrupted,
    NotApplied,
    OutputUnwritable,
    PatchRejected,
    PortConflict,
    UnknownVersion,
    WrongTree,
)
from m8d_build.series.read import load_series

ROOT = Path(__file__).parents[4]
COMMANDS = ("targets", "verify", "apply", "revert", "export", "port")


def main(kit, *words) -> tuple[int, str]:
    """Run a command line on the kit's patches; return exit code and everything printed."""
    output = io.StringIO()
    code = cli.main(
        ["--patches", str(kit.patches), *map(str, words)], console=Console(file=output, width=200)
    )
    return code, output.getvalue()


def fails(kit, error, *words) -> str:
    """Run a command line that must fail with an error's code and change nothing."""
    before = snapshot(kit.patches), snapshot(kit.tree)
    code, output = main(kit, *words)
    assert (code, error.__name__ in output) == (error.exit_code, True), output
    assert (snapshot(kit.patches), snapshot(kit.tree)) == before
    return output


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_found_by_its_name_and_loaded_alone(name):
    found = cli.commands(name)
    assert list(found) == [name]
    assert found[name].HELP.endswith(".")


def test_all_commands_together_have_distinct_names():
    modules = {path.stem for path in Path(cli.__file__).parent.glob("*.py") if not path.stem.startswith("_")}
    assert set(COMMANDS) <= modules
    assert {name.replace("-", "_") for name in cli.commands()} == modules


@pytest.mark.parametrize("words", [("verify", "--json", "2.6.0"), ("verify", "2.6.0"), ("targets",)])
def test_output_that_no_program_reads_ends_the_command_without_a_traceback(words):
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "m8d_build", *words],
            env={**os.environ, "PYTHONPATH": f"{ROOT / 'build'}:{ROOT}"},
            stdout=writer,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            timeout=60,
        )
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


@pytest.mark.parametrize("encoding", ["ascii", "iso-8859-1"])
def test_what_the_encoding_of_the_terminal_lacks_is_written_otherwise(monkeypatch, encoding):
    terminal = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", terminal)
    assert cli.main(["overlay", "--plan", "--torch", "2.6.0", "--source", "/home/łukasz/…"]) == 0
    terminal.flush()
    assert b"/home/\\u0142ukasz/\\u2026" in terminal.buffer.getvalue()


@pytest.mark.parametrize("words", [["--help"], ["verify", "--help"]])
def test_help_is_no_failure(words, capsys):
    assert cli.main(words) == 0
    assert "verify" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words", [[], ["nope"], ["apply"], ["port", "--from", "2.6.0"], ["verify", "--nope"]]
)
def test_wrong_arguments_are_2(words, capsys):
    assert cli.main(words) == 2
    assert "usage:" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["--mode", "full", "--wheel", "x.whl", "--allow-unverified"], "--wheel, --allow-unverified"),
        (["--env", "venv"], "--env"),
        (["--mode", "overlay", "--archs", "8.0", "--fresh"], "--archs, --fresh"),
        (["--resume"], "--resume"),
    ],
)
def test_options_of_the_other_mode_are_2(kit, words, shown):
    code, output = main(kit, "build", "--plan", *words)
    assert (code, f"excludes {shown}:" in output) == (2, True), output


@pytest.mark.parametrize(
    "words", [["full", "--jobs", "-3"], ["full", "--jobs", "0"], ["build", "--resume", "--fresh"]]
)
def test_arguments_that_say_nothing_are_2(words, capsys):
    assert cli.main([*words, "--plan"]) == 2
    assert "usage:" in capsys.readouterr().err


@pytest.mark.parametrize("before", [["--cache", "cache"], ["--cach", "targets"], ["--cache=check"]])
def test_a_folder_may_have_the_name_of_a_command(kit, before, monkeypatch):
    assert main(kit, *before, "verify") == main(kit, "verify")
    monkeypatch.chdir(kit.patches.parent)
    assert cli.main(["--patches", "patches", *before, "verify"]) == 0


def test_a_word_that_is_no_command_is_told_all_of_them(capsys):
    assert cli.main(["nope", "verify"]) == 2
    said = capsys.readouterr().err
    assert all(name in said for name in COMMANDS)


def test_a_wrong_setting_is_2(kit, monkeypatch):
    monkeypatch.setenv("M8D_JOBS", "many")
    code, output = main(kit, "verify")
    assert code == 2
    assert "M8D_JOBS" in output


def test_the_whole_way_round(kit):
    before = snapshot(kit.tree), snapshot(kit.patches)
    assert main(kit, "verify")[0] == 0
    assert main(kit, "verify", "2.6.0", "--source", kit.tree)[0] == 0
    code, output = main(kit, "apply", "--source", kit.tree, "--dry-run")
    assert (code, snapshot(kit.tree)) == (0, before[0])
    assert "would apply first-topic, second-topic, third of 2.6.0" in output
    assert main(kit, "apply", "--torch", "2.6.0", "--source", kit.tree)[0] == 0
    assert main(kit, "verify", "--source", kit.tree)[0] == 0
    code, output = main(kit, "export", "--source", kit.tree)
    assert (code, "all the same" in output) == (0, True)
    assert main(kit, "export", "--source", kit.tree, "--folder", kit.tree.parent / "copy")[0] == 0
    assert snapshot(kit.tree.parent / "copy") == snapshot(kit.folder)
    assert main(kit, "revert", "--torch", "2.6.0", "--source", kit.tree)[0] == 0
    assert (snapshot(kit.tree), snapshot(kit.patches)) == before


def test_targets_as_a_table_and_as_json(kit):
    code, output = main(kit, "targets")
    assert code == 0
    assert "2.6.0" in output
    assert "applies" in output
    code, output = main(kit, "targets", "--json")
    (target,) = json.loads(output)
    assert (code, target["version"], target["topics"], target["defects"]) == (
        0,
        "2.6.0",
        TOPICS,
        ["D5", "D6"],
    )
    assert set(target["files"]) == {NCCL, GROUP}


def test_verify_says_how_a_wheel_with_these_patches_is_labelled(kit):
    digest = load_series(kit.patches, "2.6.0").digest
    code, output = main(kit, "verify")
    assert (code, f"labelled m8d0.new{digest[:8]}" in output) == (0, True)
    write_targets(kit.patches, kit.states[0], TOPICS, build=2, series=digest)
    assert main(kit, "verify") == (0, "2.6.0: ok\n")
    write_targets(kit.patches, kit.states[0], TOPICS, build=2, series="0" * 12)
    code, output = main(kit, "verify")
    assert (code, f"labelled m8d2.edited{digest[:8]}" in output) == (0, True)


def test_verify_shows_every_finding_and_says_so_in_its_code(kit):
    patch = kit.folder / f"0002-{TOPICS[1]}.patch"
    patch.write_bytes(patch.read_bytes().replace(b"\n", b"\r\n"))
    (kit.folder / "stray.txt").write_text("x")
    code, output = main(kit, "verify")
    assert code == PatchRejected.exit_code
    assert f"{patch.name}:1: there are carriage returns; lines end with LF only [crlf]" in output
    assert "stray.txt: it is in the folder" in output
    code, output = main(kit, "verify", "--json")
    assert code == PatchRejected.exit_code
    (target,) = json.loads(output)["targets"]
    assert {finding["code"] for finding in target["findings"]} >= {"crlf", "orphan"}


def test_verify_finds_folders_without_a_target(kit):
    (kit.patches / "v9.9.9").mkdir()
    code, output = main(kit, "verify")
    assert code == PatchRejected.exit_code
    assert "v9.9.9: this folder has no entry" in output
    assert main(kit, "verify", "2.6.0")[0] == 0


def test_verify_reads_sources_only_when_they_are_named(kit):
    (kit.tree / GROUP).write_bytes(b"other\n" * 60)
    assert main(kit, "verify")[0] == 0
    code, output = main(kit, "verify", "--source", kit.tree)
    assert code == PatchRejected.exit_code
    assert "[fuzz]" in output
    assert "[blob]" in output


def test_unknown_versions(kit):
    for words in (
        ("verify", "1.0.0"),
        ("apply", "--torch", "1.0.0", "--source", kit.tree),
        ("revert", "--torch", "1.0.0", "--source", kit.tree),
        ("export", "--torch", "1.0.0", "--source", kit.tree),
        ("port", "--from", "1.0.0", "--to", "2.7.0", "--source", kit.tree),
        ("port", "--from", "2.6.0", "--to", "next", "--source", kit.tree),
    ):
        assert "1.0.0" in fails(kit, UnknownVersion, *words) or words[0] == "port"


def test_a_blob_id_that_differs(kit):
    (kit.tree / GROUP).write_bytes(kit.states[0][GROUP].changed("group line 30", "x").data)
    output = fails(kit, BlobMismatch, "apply", "--source", kit.tree)
    assert "--allow-unverified" in output
    assert main(kit, "apply", "--source", kit.tree, "--allow-unverified")[0] == 0


def test_fuzz_overlap_and_crlf_are_refused_by_apply(kit):
    (kit.tree / GROUP).write_bytes(b"down\n" + kit.states[0][GROUP].data)
    assert "[fuzz]" in fails(kit, PatchRejected, "apply", "--source", kit.tree, "--allow-unverified")
    patch = kit.folder / f"0001-{TOPICS[0]}.patch"
    good = patch.read_bytes()
    patch.write_bytes(good.replace(b"\n", b"\r\n"))
    assert "[crlf]" in fails(kit, PatchRejected, "apply", "--source", kit.tree)
    patch.write_bytes(good.replace(b" nccl line 11\n", b" nccl line XI\n"))
    second = kit.folder / f"0003-{TOPICS[2]}.patch"
    second.write_bytes(second.read_bytes().replace(b"@@ -40,2 +40,3 @@", b"@@ -11,2 +11,3 @@"))
    assert "[context]" in fails(kit, PatchRejected, "apply", "--source", kit.tree)


def test_a_dirty_tree(kit):
    commit_all(kit.tree)
    (kit.tree / GROUP).write_bytes(kit.states[0][GROUP].changed("group line 30", "x").data)
    fails(kit, DirtyTree, "apply", "--source", kit.tree)


def test_a_wrong_tree(kit):
    fails(kit, WrongTree, "apply", "--source", kit.patches)
    fails(kit, WrongTree, "verify", "--source", kit.patches)
    other = kit.tree.parent / "other"
    write_tree(other, kit.states[0], "2.5.0")
    fails(kit, WrongTree, "apply", "--torch", "2.6.0", "--source", other)
    fails(kit, WrongTree, "verify", "2.6.0", "--source", other)


def test_twice_and_not_at_all(kit):
    fails(kit, NotApplied, "revert", "--source", kit.tree)
    fails(kit, NotApplied, "export", "--source", kit.tree)
    assert main(kit, "apply", "--source", kit.tree)[0] == 0
    fails(kit, AlreadyApplied, "apply", "--source", kit.tree)


def test_a_port_conflict_shows_both_sides(kit):
    other = kit.tree.parent / "other"
    write_tree(other, {**kit.states[0], GROUP: kit.states[0][GROUP].changed("group line 50", "L")}, "2.7.0")
    words = ("port", "--from", "2.6.0", "--to", "2.7.0", "--source", other)
    output = fails(kit, PortConflict, *words)
    assert "expected (2.6.0), line 49" in output
    assert "there (2.7.0), line 49" in output
    code, output = main(kit, *words, "--drop", "second-topic")
    assert (code, "4 hunks in place, 0 moved" in output) == (0, True)
    assert main(kit, "verify")[0] == 0
    assert main(kit, "verify", "--source", other)[0] == 0


def test_two_at_once(kit):
    fd = os.open(kit.tree, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        fails(kit, BuildBusy, "apply", "--source", kit.tree)
    finally:
        os.close(fd)


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), DiskFull),
        (OSError(errno.EROFS, "Read-only file system"), OutputUnwritable),
        (KeyboardInterrupt(), Interrupted),
    ],
)
@pytest.mark.parametrize("command", ["apply", "port", "export"])
def test_full_disk_unwritable_folder_and_ctrl_c(kit, monkeypatch, command, fault, error):
    other = kit.tree.parent / "other"
    write_tree(other, kit.states[0], "2.7.0")
    words = {
        "apply": ("apply", "--source", kit.tree),
        "port": ("port", "--from", "2.6.0", "--to", "2.7.0", "--source", other),
        "export": ("export", "--source", kit.tree),
    }[command]
    if command == "export":
        assert main(kit, "apply", "--source", kit.tree)[0] == 0
        data = (kit.tree / GROUP).read_bytes()
        (kit.tree / GROUP).write_bytes(data.replace(b"fifty\n", b"51\n"))
    armed = [fault]

    def fsync(fd):
        if armed:
            raise armed.pop()

    monkeypatch.setattr("m8d_build.series.transaction.os.fsync", fsync)
    fails(kit, error, *words)
    assert main(kit, *words)[0] == 0  # and the next run does it


STARTS_A_CHILD = """
import signal, sys
from pathlib import Path
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored where the tests run under nohup
from m8d_build import cli, proc
import m8d_build.cli.verify as command
def execute(*_):
    proc.run(["sh", "-c", "echo $$; exec sleep 300"], what="sleep", log=Path("/dev/stdout"))
command.execute = execute
sys.exit(cli.main(["verify"]))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_program_that_was_started_ends_with_a_run_that_is_told_to_stop(number):
    environ = {**os.environ, "PYTHONPATH": f"{ROOT / 'build'}{os.pathsep}{ROOT}"}
    with subprocess.Popen(
        [sys.executable, "-c", STARTS_A_CHILD],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environ,
    ) as run:
        assert run.stdout is not None
        assert run.stdout.readline().startswith("$ sh")
        child = int(run.stdout.readline())
        run.send_signal(number)
        messages = run.communicate(timeout=60)[1]
        assert (run.returncode, messages.startswith("Interrupted: stopped by SIG")) == (128 + number, True), (
            messages
        )
        with pytest.raises(ProcessLookupError):
            os.kill(child, 0)


def test_the_handlers_of_the_program_that_calls_are_left_alone(kit):
    def theirs(*_):
        pass

    before = signal.signal(signal.SIGTERM, theirs)
    try:
        hup = signal.getsignal(signal.SIGHUP)
        assert main(kit, "verify")[0] == 0
        assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGHUP)) == (theirs, hup)
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(main, kit, "verify").result(timeout=60)[0] == 0
    finally:
        signal.signal(signal.SIGTERM, before)


def test_no_room_outside_our_own_code_is_a_full_disk_too(kit, monkeypatch):
    def execute(*_):
        raise OSError(errno.ENOSPC, "No space left on device", "/some/file")

    monkeypatch.setattr("m8d_build.cli.verify.execute", execute)
    assert "/some/file" in fails(kit, DiskFull, "verify")


def test_other_errors_of_the_system_are_not_hidden(kit, monkeypatch):
    def execute(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("m8d_build.cli.verify.execute", execute)
    with pytest.raises(OSError, match="Input/output"):
        main(kit, "verify")


def test_an_error_is_shown_with_the_end_of_its_log(kit, monkeypatch):
    def execute(*_):
        raise CommandFailed("g++ failed", next_step="Read on", log=Path("out/x.log"), tail="[1/2] last line")

    monkeypatch.setattr("m8d_build.cli.verify.execute", execute)
    output = fails(kit, CommandFailed, "verify")
    assert "CommandFailed: g++ failed." in output
    assert "  [1/2] last line" in output
    assert "Full log: out/x.log" in output


def test_messages_go_to_standard_error(kit, capsys):
    assert cli.main(["--patches", str(kit.patches), "verify", "1.0.0"]) == UnknownVersion.exit_code
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("UnknownVersion: ")


def test_it_runs_as_a_program():
    environ = {**os.environ, "PYTHONPATH": f"{ROOT / 'build'}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-m", "m8d_build", "verify", "1.0.0"]
    done = subprocess.run(command, capture_output=True, text=True, env=environ, check=False, timeout=60)
    assert done.returncode == UnknownVersion.exit_code
    assert "1.0.0" in done.stderr
    assert issubclass(UnknownVersion, BuildError)
