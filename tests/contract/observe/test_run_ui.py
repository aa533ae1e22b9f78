"""``m8d-run --ui`` on a terminal: the whole launcher, with workers that write, one of which fails once."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from kits.terminalkit import on_a_terminal, text_of

SCRIPT = """
import os, pathlib, sys, time
rank, attempt = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
# print() writes a line and its end one after the other where PYTHONUNBUFFERED is set: others' lines come between.
sys.stdout.write(f"\\033[31mout {rank} {attempt}\\033[0m\\n")
sys.stdout.flush()
sys.stderr.write(f"err {rank} {attempt}\\n")
here = pathlib.Path(sys.argv[1])
(here / f"{rank}.{attempt}").touch()
if (rank, attempt) == ("1", "0"):
    sys.exit(3)
deadline = time.monotonic() + 120
while not (here / "1.1").exists() and time.monotonic() < deadline:
    time.sleep(0.05)
"""


def test_the_live_view_of_a_real_run(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    code, told = on_a_terminal(
        sys.executable, "-m", "multiworld.run", "--ui", "--nproc-per-node", "2", "--max-restarts", "1",
        str(script), str(tmp_path), TMPDIR=str(tmp_path), XDG_RUNTIME_DIR="", OMP_NUM_THREADS="1",
    )  # fmt: skip
    assert code == 0, told
    lines = text_of(told)
    for name in ("out", "err"):
        for who in ("0 0", "1 0", "1 1"):
            assert any(line.endswith(f":{name} {who}") for line in lines), (name, who, told)
    assert "\x1b[31mout 1 1\x1b[0m" in told  # the worker's own colour
    assert "ended with exit code 0: all workers ended with 0" in lines
    assert "2 workers: 2 ended · 1 restart" in lines
    # The view shows the last six lines: that it failed may have gone before it was drawn.
    assert any("rank 1 (default:1) started again, pid " in line for line in lines)
    assert not any("event=" in line for line in lines)  # no log beside the view
    assert told.rindex("\x1b[?25h") > told.rindex("\x1b[?25l")  # the cursor is back


LATE = """
import pathlib, sys, time, torch, multiworld as mw
world = mw.join_all()["all"]
if world.rank == 1:
    deadline = time.monotonic() + 120
    while not pathlib.Path(sys.argv[1]).exists() and time.monotonic() < deadline:
        time.sleep(0.05)
world.all_reduce(torch.ones(1))
"""


def test_the_live_view_says_who_is_missing(tmp_path):
    script, seen = tmp_path / "script.py", tmp_path / "seen"
    script.write_text(LATE)
    (tmp_path / "worlds.toml").write_text(
        '[roles]\nworker = 2\n[worlds.all]\nmembers = ["worker:*"]\ntimeout = 120\n'
    )

    def watch(told):
        if "all: all_reduce" in told:
            seen.touch()

    code, told = on_a_terminal(
        sys.executable, "-m", "multiworld.run", "--ui", "--worlds", str(tmp_path / "worlds.toml"), str(script), str(seen),
        watch=watch, columns=160, TMPDIR=str(tmp_path), XDG_RUNTIME_DIR="", OMP_NUM_THREADS="1",
    )  # fmt: skip
    assert code == 0, told
    assert seen.exists(), told
    (line, *_) = (line for line in text_of(told) if line.startswith("all: all_reduce"))
    assert "rank 0" in line
    assert "rank 1" in line


def test_without_a_terminal_there_is_the_log_and_one_note(tmp_path):
    import subprocess

    root = Path(__file__).parents[3]
    script = tmp_path / "script.py"
    script.write_text("print('hello')")
    done = subprocess.run(
        [sys.executable, "-m", "multiworld.run", "--ui", "--nproc-per-node", "1", str(script)], cwd=root,
        env={**os.environ, "PYTHONPATH": str(root), "TMPDIR": str(tmp_path), "XDG_RUNTIME_DIR": ""},
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == "hello\n"
    assert done.stderr.count("--ui has no terminal to draw on") == 1
    assert "event=run-ended exitcode=0" in done.stderr
