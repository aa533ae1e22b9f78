"""The launcher and its ranks, with a toy for torch: no NCCL, no double (but for the tests about a wrong one)."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
from bed.errors import BedError
from bed.forkserver import cuda_in, mismatch
from bed.ranks import ROOT, TESTBED, Launcher
from kits.toytorch_bed import make_double, make_torch

PYTHON = Path(sys.executable)
SOON = 30.0  # seconds; a bound on a busy machine, not what it takes


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> Path:
    return make_torch(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="module")
def launcher(toy, tmp_path_factory):
    with Launcher(PYTHON, None, workdir=tmp_path_factory.mktemp("work"), extra_path=(toy,)) as made:
        yield made


def gone(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return True
    return state == "Z"  # its parent is gone too; whoever adopted it reaps it when it likes


def wait_gone(*pids: int) -> None:
    deadline = time.monotonic() + SOON
    while not all(map(gone, pids)):
        assert time.monotonic() < deadline, f"still there: {[pid for pid in pids if not gone(pid)]}"
        time.sleep(0.02)


def test_ranks_talk_with_their_test(launcher):
    with launcher.start("basics:talks", 3) as ranks:
        ranks.tell("other", n=0)
        ranks.tell("say", n=1)
        ranks.tell("say", ranks=[2], n=2)
        assert [each.fields["n"] for each in ranks.wait("said")] == [1, 1, 1]
        (second,) = ranks.wait("said", ranks=[2], count=2)
        assert (second.rank, second.fields) == (2, {"n": 2})
        assert second.at <= time.monotonic()
        ranks.tell("say", end=True)
        exits = ranks.join()
    assert [(each.code, each.signal) for each in exits.values()] == [(0, None)] * 3
    assert [each.name for each in ranks.events(0)] == ["started", "said", "ended"]


def test_a_killed_rank_and_the_others(launcher):
    with launcher.start("basics:waits", 3) as ranks:
        assert [each.fields["threads"] for each in ranks.wait("ready")] == [1, 1, 1]
        at = ranks.kill(1)
        ended = ranks.join(ranks=[1])[1]
        assert (ended.code, ended.signal) == (None, "SIGKILL")
        assert at <= ended.at <= time.monotonic()
        assert ranks.alive() == [0, 2]
        ranks.tell("go")
        assert [each.rank for each in ranks.wait("gone")] == [0, 2]
        assert [str(each) for each in ranks.join().values()] == [
            "rank 0 ended with 0", "rank 1 ended by SIGKILL", "rank 2 ended with 0",
        ]  # fmt: skip


def test_a_stopped_rank_says_nothing_until_it_is_released(launcher):
    with launcher.start("basics:talks", 1) as ranks:
        ranks.wait("started")
        ranks.stop(0)
        ranks.tell("say", n=1)
        with pytest.raises(AssertionError, match="rank 0 runs; the time is over"):
            ranks.wait("said", timeout=0.3)
        at = ranks.resume(0)
        (said,) = ranks.wait("said")
        assert said.at > at


def test_leaving_kills_what_is_left_even_stopped(launcher):
    with launcher.start("basics:sleeps", 2) as ranks:
        ranks.wait("started")
        ranks.stop(1)
        pids = [ranks.pid(0), ranks.pid(1)]
    assert {each.signal for each in ranks.exits.values()} == {"SIGKILL"}
    assert all(map(gone, pids))


@pytest.mark.parametrize(
    ("config", "code", "number"),
    [
        ({"how": "raise"}, 1, None),
        ({"how": "abort"}, None, "SIGABRT"),
        ({"how": "exit", "code": 7}, 7, None),
        ({"how": "exit", "code": 3, "exit": "hard"}, 3, None),
        ({"how": "hard", "code": 9}, 9, None),
        ({"how": "plain"}, 0, None),
    ],
)
def test_ends_and_what_was_written(launcher, config, code, number):
    with launcher.start("basics:ends", 2, config=config) as ranks:
        for ended in ranks.join().values():
            assert (ended.code, ended.signal) == (code, number)
    assert "rank 1 ends: " in ranks.stderr(1)
    assert "on stderr too" in ranks.stderr(1)


def test_waiting_for_a_rank_that_failed_says_why(launcher):
    with launcher.start("basics:ends", 1, config={"how": "raise"}) as ranks:
        with pytest.raises(AssertionError) as caught:
            ranks.wait("never", timeout=SOON)
        text = str(caught.value)
    assert "rank 0 ended with 1. It did not tell 'never'; it told: started, failed." in text
    assert "RuntimeError: as asked" in text
    assert "its output ends with" in text


def test_waits_have_an_end(launcher):
    with launcher.start("basics:sleeps", 2, timeout=0.5) as ranks:
        with pytest.raises(AssertionError, match="did not end"):
            ranks.join()
        with pytest.raises(AssertionError, match="It did not tell 'anything'"):
            ranks.wait("anything")


def test_a_rank_that_never_starts(launcher):
    """It hangs on its way to the program: opening its output, a pipe that nobody reads."""
    folder = launcher.workdir / f"{launcher._count + 1:04d}-basics.waits"
    folder.mkdir()
    os.mkfifo(folder / "rank1.txt")
    with launcher.start("basics:waits", 2) as ranks:
        ranks.wait("ready", ranks=[0])
        with pytest.raises(AssertionError, match="rank 1 never started; the time is over"):
            ranks.wait("ready", timeout=0.2)
    assert ranks.exits[1].signal == "SIGKILL"


def test_environment_of_ranks(launcher, monkeypatch):
    monkeypatch.setenv("TOY_LATE", "set after the fork server started")
    with launcher.start(
        "basics:shows", 2, config={"names": ["TOY_A", "TOY_B", "OMP_NUM_THREADS", "TOY_LATE"]},
        env={"TOY_A": "all", "OMP_NUM_THREADS": None}, rank_env=lambda rank: {"TOY_B": f"of {rank}"},
    ) as ranks:  # fmt: skip
        seen = ranks.wait("seen")
    assert [each.fields["env"] for each in seen] == [
        {"TOY_A": "all", "TOY_B": f"of {rank}", "OMP_NUM_THREADS": None, "TOY_LATE": None} for rank in (0, 1)
    ]


def test_stubs_and_refused_kernels_fail_with_their_names(launcher):
    config = {"text": "m8d-bed: STUB cuHidden\nm8d-bed[1]: KERNEL add\n"}
    with (
        pytest.raises(
            AssertionError, match=r"(?s)rank 0: .* stub: cuHidden.*rank 1: a kernel it refuses: add"
        ),
        launcher.start("basics:prints", 2, config=config) as ranks,
    ):
        ranks.join()
    with launcher.start("basics:prints", 1, config=config, allow_refused=True) as ranks:
        ranks.join()


def test_a_use_of_freed_memory_fails_whatever_is_allowed(launcher):
    config = {"text": "m8d-bed: LIFETIME over\n"}
    with (
        pytest.raises(AssertionError, match=r"(?s)NCCL has freed this.*rank 0: over"),
        launcher.start("basics:prints", 1, config=config, allow_refused=True) as ranks,
    ):
        ranks.join()


def test_several_at_once_in_threads(launcher):
    failed = []

    def one(n: int) -> None:
        try:
            for _ in range(3):
                with launcher.start("basics:talks", 2) as ranks:
                    ranks.tell("say", n=n)
                    assert [each.fields["n"] for each in ranks.wait("said")] == [n, n]
        except BaseException as exc:
            failed.append(exc)
            raise

    threads = [threading.Thread(target=one, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


def test_stores_are_on_free_ports_of_loopback(launcher):
    with launcher.start("basics:stores", 1, config={"stores": 2}) as ranks:
        (told,) = ranks.wait("stores")
        ports = told.fields["ports"]
        assert len({*ports}) == 2
        for port in ports:
            socket.create_connection(("127.0.0.1", port), SOON).close()
    deadline = time.monotonic() + SOON
    while True:  # closing is asked for, not waited for
        try:
            socket.create_connection(("127.0.0.1", ports[0]), 1.0).close()
        except (ConnectionRefusedError, TimeoutError):
            break
        except ConnectionResetError:  # accepted by the kernel in the moment in which the listener closed
            continue
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_port_in_use(launcher):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(BedError, match=f"port {port}: Address already in use"):
            launcher.start("basics:waits", 1, config={"store_port": port})
    with launcher.start("basics:waits", 1, config={"store_port": port}) as ranks:
        ranks.wait("ready")


def test_too_long_a_request(launcher):
    with pytest.raises(BedError, match="a configuration of"):
        launcher.start("basics:waits", 1, config={"long": "x" * 200_000})


def test_ranks_end_with_the_fork_server(toy, tmp_path):
    with (
        Launcher(PYTHON, None, workdir=tmp_path, extra_path=(toy,)) as launcher,
        launcher.start("basics:sleeps", 2) as ranks,
    ):
        ranks.wait("started")
        pids = [ranks.pid(0), ranks.pid(1), launcher._host.pid(0)]
        os.kill(launcher._process.pid, signal.SIGKILL)
        wait_gone(*pids)
        with pytest.raises(AssertionError, match="its fork server is gone"):
            ranks.wait("never")
        with pytest.raises(BedError, match="ended by SIGKILL"):
            launcher.start("basics:sleeps", 1, config={"stores": 0})


def test_everything_ends_with_a_test_run_that_is_killed(toy, tmp_path):
    """And while any of it lives, nobody else gets the work folder."""
    script = tmp_path / "run.py"
    script.write_text(
        textwrap.dedent(f"""
        import sys
        sys.path[:0] = {[str(TESTBED), str(ROOT)]}
        from pathlib import Path
        from bed.ranks import Launcher
        launcher = Launcher(Path(sys.executable), None, workdir=Path("work"), extra_path=(Path({str(toy)!r}),))
        ranks = launcher.start("basics:sleeps", 2)
        ranks.wait("started")
        ranks.stop(1)
        print(launcher._process.pid, launcher._host.pid(0), ranks.pid(0), ranks.pid(1), flush=True)
        sys.stdin.read()
        """)
    )
    with subprocess.Popen(
        [PYTHON, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=tmp_path, text=True
    ) as run:
        pids = [int(each) for each in run.stdout.readline().split()]
        assert len(pids) == 4
        run.kill()
        run.wait()
    wait_gone(*pids)
    Launcher(PYTHON, None, workdir=tmp_path / "work", extra_path=(toy,)).close()


def test_a_left_over_process_of_an_earlier_run_is_named(toy, tmp_path, monkeypatch):
    monkeypatch.setattr("bed.ranks.FREE", 0.2)
    earlier = Launcher(PYTHON, None, workdir=tmp_path, extra_path=(toy,))
    with pytest.raises(BedError, match=f"is in use by .*process {earlier._process.pid} .*kill -9"):
        Launcher(PYTHON, None, workdir=tmp_path, extra_path=(toy,))
    earlier.close()
    Launcher(PYTHON, None, workdir=tmp_path, extra_path=(toy,)).close()


@pytest.mark.parametrize(
    ("torch", "says"),
    [
        ("raise ImportError('libcudnn.so.9: cannot open')", "torch cannot be imported: libcudnn"),
        ("import os; os.abort()", "ended by SIGABRT before it was ready"),
        (
            "import threading, time; threading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
            "2 threads",
        ),
    ],
)
def test_a_torch_that_cannot_be_used(tmp_path, torch, says):
    toy = make_torch(tmp_path / "toy", more=torch)
    with pytest.raises(BedError, match=says):
        Launcher(PYTHON, None, workdir=tmp_path / "work", extra_path=(toy,))


def test_an_import_that_hangs(tmp_path):
    toy = make_torch(tmp_path / "toy", more="import time; time.sleep(600)")
    began = time.monotonic()
    with pytest.raises(BedError, match="did not import torch within 1 s"):
        Launcher(PYTHON, None, workdir=tmp_path / "work", extra_path=(toy,), start_timeout=1.0)
    assert time.monotonic() - began < SOON


def test_an_interpreter_that_is_none(tmp_path):
    with pytest.raises(BedError, match="cannot be started: No such file"):
        Launcher(tmp_path / "python", None, workdir=tmp_path / "work")


def test_an_interpreter_without_torch(tmp_path):
    venv = tmp_path / "venv"
    subprocess.run([PYTHON, "-m", "venv", "--without-pip", venv], check=True, timeout=120)
    with pytest.raises(BedError, match="has no torch"):
        Launcher(venv / "bin" / "python", None, workdir=tmp_path / "work")


def test_a_library_that_is_not_there(tmp_path):
    with pytest.raises(BedError, match=r"is not there.*bed.build"):
        Launcher(PYTHON, tmp_path / "lib.so", workdir=tmp_path / "work")


def test_a_library_whose_path_ends_early_in_ld_preload(tmp_path):
    library = tmp_path / "my cache" / "lib.so"
    library.parent.mkdir()
    library.touch()
    with pytest.raises(BedError, match=r"cannot be preloaded.*M8D_CACHE"):
        Launcher(PYTHON, library, workdir=tmp_path / "work")


def test_a_library_the_loader_refuses(tmp_path):
    """The loader says so on stderr and goes on without it; ranks would then run without a double."""
    toy = make_torch(tmp_path / "toy", cuda="13.0", nccl=True)
    (tmp_path / "lib.so").write_text("no library")
    with pytest.raises(BedError, match="could not be preloaded"):
        Launcher(PYTHON, tmp_path / "lib.so", workdir=tmp_path / "work", extra_path=(toy,))


@pytest.mark.compiler
@pytest.mark.parametrize(
    ("cuda", "nccl", "says"),
    [
        ("12.4", True, r"built for CUDA 13, this torch for CUDA 12\.4.*bed\.build"),
        (None, False, "built without CUDA"),
        ("13.0", False, "has no NCCL"),
    ],
)
def test_a_library_and_a_torch_that_do_not_fit(tmp_path, cuda, nccl, says):
    toy = make_torch(tmp_path / "toy", cuda=cuda, nccl=nccl)
    with pytest.raises(BedError, match=says):
        Launcher(PYTHON, make_double(tmp_path), workdir=tmp_path / "work", extra_path=(toy,))


@pytest.mark.compiler
def test_a_rank_has_the_controls_where_there_is_a_double(tmp_path):
    toy = make_torch(tmp_path / "toy", cuda="13.0", nccl=True)
    with Launcher(PYTHON, make_double(tmp_path), workdir=tmp_path / "work", extra_path=(toy,)) as launcher:
        assert launcher.facts["info"]["cuda"] == 13000
        with launcher.start("basics:controls", 1) as ranks:
            (told,) = ranks.wait("controls")
    assert told.fields == {"before": "", "inside": "4", "after": "", "stubs": ["cuHidden"]}


@pytest.mark.parametrize(
    ("text", "cuda"),
    [
        ("cuda: Optional[str] = '12.4'", "12.4"),
        ('__version__ = "2"\ncuda = "13.0"', "13.0"),
        ("cuda: Optional[str] = None", ""),
        ("__version__ = '2.13.0+cpu'", ""),
    ],
)
def test_cuda_as_version_py_has_it(text, cuda):
    assert cuda_in(text) == cuda


def test_no_library_fits_everything():
    assert mismatch("", None, library="") is None
    assert mismatch("12.4", {"cuda": 12040}, library="x.so") is None
