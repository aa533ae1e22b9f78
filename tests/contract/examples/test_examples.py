"""The examples, run as a user runs them: programs with their own processes, killed where they say "kill one"."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.util
import io
import os
import re
import runpy
import select
import signal
import subprocess
import sys
import time
import types
import uuid

import pytest
from kits.contract.examplekit import EXAMPLES, MARK, PATIENCE, ROOT, examples, processes_with
from kits.contract.worldkit import free_port
from kits.meetkit import until
from kits.portkit import listeners

import multiworld as mw
from multiworld._c10d import groups
from multiworld.registry import registry

pytestmark = pytest.mark.everyday

# Makes the terminal on its standard input the controlling one, so that Ctrl-C is a signal, and becomes the program.
LEAD_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


@pytest.fixture
def run():
    with examples() as start:
        yield start


COLLECTIVES = {
    "all_gather": r"world[12] round 1: rank 2 has \[1.0, 11.0, 21.0\]",
    "all_reduce": r"world[12] round 1: rank 0 has \[6.0, 6.0\]",
    "broadcast": r"world[12] round 1: rank 2 has \[11.0, 11.0\]",
    "gather": r"world[12] round 1: rank 0 has \[1.0, 11.0, 21.0\]",
    "reduce": r"world[12] round 1: rank 0 has \[2, 0, 1\]",
    "scatter": r"world[12] round 1: rank 2 has \[201.0, 201.0\]",
    "send_recv": r"world[12] round 1: rank 0 has \[4\]",
}


class Printed(io.StringIO):
    """What a program prints; the process dies where it prints `last`."""

    def __init__(self, last):
        super().__init__()
        self.last = last

    def write(self, text):
        if self.last and self.last in text:
            dies()
        return super().write(text)


def dies(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)


def one_process(me, script, arguments, last="", dies_joining=False):
    """Be one process of an example, as with --rank in a terminal of its own; torch is loaded already."""
    if dies_joining:  # when it has agreed on a generation with the other members
        groups.build = dies
    sys.argv = [str(EXAMPLES / script), *arguments, "--rank", str(me.rank)]
    sys.path.insert(0, str(EXAMPLES))
    with contextlib.redirect_stdout(Printed(last)) as printed:
        try:
            runpy.run_path(sys.argv[0], run_name="__main__")
        except SystemExit as end:
            code = end.code
        else:
            code = 0
    me.emit("ran", code=code or 0, text=printed.getvalue())


def module_of(script, *arguments):
    """An example, or a part of one, as a module whose `main` has these arguments."""
    sys.path.insert(0, str(EXAMPLES))
    sys.argv = [script, *arguments]
    return importlib.import_module(script)


@pytest.mark.parametrize("name", sorted(COLLECTIVES.keys() - {"send_recv"}))
def test_collectives(cast, name):
    arguments = ("--rounds", "2", "--pause", "0.05", "--port", str(cast.server.port))
    processes = [cast.start(one_process, rank, script=f"{name}.py", arguments=arguments) for rank in range(5)]
    ran = [process.expect("ran") for process in processes]
    text = "".join(each.text for each in ran)
    assert [each.code for each in ran] == [0] * 5, text
    right_in_both_worlds(name, text)


def test_a_collective_with_one_command(run):
    program = run("send_recv.py", "--rounds", 2, "--pause", 0.05)
    assert program.finish() == 0, program.text
    right_in_both_worlds("send_recv", program.text)


def right_in_both_worlds(name, text):
    seen = {found[0].split()[0] for found in re.finditer(COLLECTIVES[name], text)}
    assert seen == {"world1", "world2"}, text
    assert "[0] done: world1 ok, world2 ok" in text
    assert "Traceback" not in text


def test_a_collective_on_a_backend_that_is_not_there_has_failed(run):
    program = run("send_recv.py", "--backend", "nosuch")
    assert program.finish() == 1, program.text
    assert "nosuch" in program.text


@pytest.mark.parametrize("name", ["all_reduce", "all_gather"])
def test_a_kill_in_one_world_leaves_the_other(run, name):
    program = run(f"{name}.py", "--rounds", 30, "--pause", 0.2)
    pids = program.pids(5)
    program.expect(r"\[0\] world2 round 2")
    os.kill(pids[4], signal.SIGKILL)
    assert program.finish() == 0, program.text
    assert re.search(r"^\[0\] world2 broken: .*", program.text, re.MULTILINE), program.text
    assert re.search(r"^\[3\] world2 broken: .*", program.text, re.MULTILINE), program.text
    assert "[0] done: world1 ok, world2 crashed" in program.text
    assert "[1] done: world1 ok" in program.text
    assert "[0] world1 round 29" in program.text
    assert "[start] process 4 was killed by signal 9" in program.text
    assert "Traceback" not in program.text


@pytest.mark.parametrize("name", ["all_reduce", "all_gather"])
def test_a_kill_while_it_joins_one_world_leaves_the_other(cast, name):
    program = {"script": f"{name}.py", "arguments": ("--pause", "0.05", "--port", str(cast.server.port))}
    first, dying, *others = [
        cast.start(one_process, rank, dies_joining=rank == 2, **program) for rank in (0, 2, 1, 3, 4)
    ]
    assert dying.finish() == -signal.SIGKILL
    ran = [each.expect("ran") for each in (first, *others)]
    assert [each.code for each in ran] == [0, 3, 0, 0], ran
    assert "[0] done: world1 not joined, world2 ok" in ran[0].text


def test_multiworld_asyncio_in_three_terminals(run):
    port = free_port(further=2)
    common = ("--backend", "gloo", "--addr", "127.0.0.1", "--port", port)
    leader, first, second = (
        run("multiworld_asyncio.py", *common, "--rank", rank, "--count", count, "--pause", 0.05)
        for rank, count in ((0, 0), (1, 400), (2, 1000))
    )
    leader.expect("received 3 from world2")
    second.kill()
    leader.expect(r"^world2 broken: ")
    leader.expect("waiting for --rank 2 to be started again")
    again = run("multiworld_asyncio.py", *common, "--rank", 2, "--count", 5, "--pause", 0.05)
    leader.expect("received 5 from world2")
    assert again.finish() == 0, again.text
    leader.expect(r"^world2 broken: .*good order")
    leader.expect("received 400 from world1")
    leader.expect(r"^world1 broken: .* \(after \d+ tensors\)")
    assert leader.finish() == 0, leader.text
    assert first.finish() == 0, first.text
    assert second.finish() == -signal.SIGKILL
    assert "Traceback" not in leader.text + first.text


def test_multiworld_asyncio_goes_on_where_a_worker_dies_while_it_joins(cast):
    port = free_port(further=2)
    common = ("--addr", "127.0.0.1", "--port", str(port), "--pause", "0.01")

    def start(rank, *more, **how):
        program = {"script": "multiworld_asyncio.py", "arguments": (*common, *more), **how}
        return cast.start(one_process, rank, **program)

    leader, second = start(0), start(2, "--count", "5")
    for how in ({"dies_joining": True}, {"last": "rank 1 sent 3"}, {"dies_joining": True}):
        assert start(1, **how).finish() == -signal.SIGKILL
    again = start(1, "--count", "7")
    ran = [each.expect("ran") for each in (leader, second, again)]
    assert [each.code for each in ran] == [0, 0, 0], ran
    text = ran[0].text
    assert text.count("world1 is not there: ") == 2, text
    assert "waiting for --rank 1 to be started again" in text
    assert "received 7 from world1" in text
    assert "received 5 from world2" in text


def test_single_world_everyone_stops(run):
    program = run("single_world.py", "--worldsize", 3, "--count", 1000, "--pause", 0.05)
    pids = program.pids(3)
    program.expect("rank 0 received 1 from rank 2")
    os.kill(pids[2], signal.SIGKILL)
    assert program.finish() == 9
    assert "rank 0 stops: " in program.text
    assert "rank 1 stops: " in program.text
    assert "exit codes: [1, 1, -9]" in program.text


def test_single_world_on_several_hosts(run):
    common = (
        "--multihost",
        "--worldsize",
        2,
        "--addr",
        "127.0.0.1",
        "--port",
        free_port(),
        "--count",
        3,
        "--pause",
        0,
    )
    ranks = [
        run("single_world.py", *common, "--nccl_async_error_handle_cleanup", "--rank", rank)
        for rank in (0, 1)
    ]
    assert [rank.finish() for rank in ranks] == [0, 0], ranks[0].text
    assert "rank 0 received 2 from rank 1" in ranks[0].text


def test_resnet_loses_no_image(run):
    program = run("resnet_serving.py", "--images", 60)
    assert program.finish() == 0, program.text
    assert "crashed: worker1 broken: " in program.text
    assert "worker1 is here, generation 2" in program.text
    for phase, workers in (("before", 2), ("during", 1), ("after", 2)):
        assert re.search(rf"{phase} +{workers} workers +[\d.]+ images/s", program.text), program.text
    told = re.search(r"(\d+) images, (\d+) sent again, (\d+) not done exactly once", program.text)
    assert told is not None, program.text
    assert int(told[1]) >= 180
    assert told[3] == "0"
    assert re.search(r"[1-9]\d* batches compared with the model here: 0 differ", program.text), program.text
    assert "Traceback" not in program.text


def test_resnet_in_terminals_with_a_folder(run, tmp_path):
    image = pytest.importorskip("PIL.Image", reason="Pillow is optional")
    for number in range(3):
        image.new("RGB", (40, 30), (80 * number, 10, 200)).save(tmp_path / f"{number}.png")
    common = ("--port", free_port(), "--workers", 1, "--images", 12, "--folder", tmp_path)
    leader, worker = (run("resnet_serving.py", *common, "--rank", rank) for rank in (0, 1))
    assert leader.finish() == 0, leader.text
    assert worker.finish() == 0, worker.text
    assert "0 differ" in leader.text


def test_resnet_says_what_is_missing(run, tmp_path):
    program = run("resnet_serving.py", "--folder", tmp_path)
    assert program.finish() == 1
    assert "no image in" in program.text
    assert "Traceback" not in program.text


def test_ddp_in_two_worlds(run):
    program = run("ddp_two_worlds.py")
    assert program.finish() == 0, program.text
    assert "[0] done: sum ok, difference ok" in program.text
    assert len(re.findall("weights the same on both", program.text)) == 4
    assert "Traceback" not in program.text


def test_ddp_loses_a_partner(run):
    program = run("ddp_two_worlds.py", "--pause", 0.03)
    pids = program.pids(3)
    program.expect(r"\[0\] difference step 50")
    os.kill(pids[2], signal.SIGKILL)
    assert program.finish() == 0, program.text
    assert "[0] difference broken: " in program.text
    assert "[0] done: sum ok, difference broke" in program.text
    assert "[1] done: sum ok" in program.text
    assert "Traceback" not in program.text


def test_rl_gets_a_new_engine(run):
    program = run("rl_weight_sync.py", "--steps", 60)
    assert program.finish() == 0, program.text
    assert "crashed: engine3 broken: " in program.text
    assert "engine3 is here, generation 2" in program.text
    assert len(re.findall(r"[12] engines: +\d+ steps/s", program.text)) == 4
    assert "weights the same" in program.text
    assert "Traceback" not in program.text


def asks(me):
    """Be a process of rl_weight_sync.py up to its first join, and tell how long that would wait."""
    module = module_of("rl_weight_sync", "--rank", str(me.rank))

    def joins(name, *_, timeout=30, **__):
        me.emit("asked", world=name, timeout=timeout)
        raise SystemExit

    mw.join = mw.join_async = joins
    with contextlib.suppress(SystemExit):
        module.main()


def test_rl_waits_for_processes_that_are_started_by_hand(cast):
    asked = [cast.start(asks, rank).expect("asked") for rank in range(4)]
    assert [each.world for each in asked] == ["trainers", "trainers", "engine2", "engine3"]
    assert {each.timeout for each in asked} == {120}


def serves(me):
    """Be trainer 0, whose engines do not come back in time."""
    leader, waits = module_of("rl.leader").Leader, []

    async def joins(name, *_, timeout=30, **__):
        waits.append(timeout)
        serving.stop = len(waits) == 2
        raise mw.JoinTimeoutError(name, "", rule="", next_step="")

    mw.join_async = joins
    args = types.SimpleNamespace(store=me.store, backend="gloo", device=None)
    serving = leader(args, types.SimpleNamespace(device="cpu"), 1)
    serving.complete.set()
    asyncio.run(serving.serve("engine2"))
    me.emit("served", waits=waits)


def test_rl_goes_on_where_no_engine_comes_back_in_time(cast):
    assert cast.start(serves).expect("served").waits == [120, 120]


def came_to(program):
    """The numbers of members, in turn, of the disturbed run, and the largest difference between the losses of both."""
    assert program.finish() == 0, program.text
    assert "Traceback" not in program.text
    told = re.search(r" disturbed: members (.*); loss ", program.text)
    accuracies = [float(each) for each in re.findall(r"accuracy ([\d.]+) %", program.text)]
    assert len(accuracies) == 2
    assert min(accuracies) > 85
    found = re.search(r"largest difference of a step's loss: (\S+)", program.text)
    return [int(each) for each in re.findall(r"(\d) from step", told[1])], float(found[1])


def test_a_training_that_members_come_to_and_go_from(run, scikit_learn):
    sizes, difference = came_to(run("elastic_training.py"))
    assert sizes == [3, 2, 3, 2]
    assert difference < 1e-12


def test_a_sharded_training_that_loses_members(run, scikit_learn):
    program = run("elastic_fsdp.py")
    sizes, difference = came_to(program)
    assert sizes == [4, 3, 2, 3]
    assert difference < 1e-12
    assert len(re.findall(r"of 2, gloo>, step \d+, of the checkpoint", program.text)) == 2


def test_a_training_in_terminals_loses_the_member_that_serves_the_store(run, scikit_learn):
    port = free_port()
    members = [
        run("elastic_training.py", "--port", port, "--pause", 0.05, "--rank", rank) for rank in range(3)
    ]
    for member in members:
        member.expect("of 3, gloo>, step")
    (served,) = [each for each in listeners(member.process.pid for member in members) if each.port == port]
    serving = next(member for member in members if member.process.pid in served.pids)
    serving.kill()
    members.remove(serving)
    for member in members:
        member.expect("of 2, gloo>, step")
    codes, text = [member.finish() for member in members], "\n".join(member.text for member in members)
    assert codes == [0, 0], text
    assert "Traceback" not in text


def ends_together(me, script, port, folder, *, lost):
    """Be a member of a training of one epoch that three begin; it may be killed where it comes to the closing barrier."""
    barrier = mw.World.barrier

    def closing(world):
        me.emit("closing")
        if lost:
            dies()
        barrier(world)

    mw.World.barrier = closing
    words = ("--port", str(port), "--pause", "0", "--rank", str(me.rank))
    module = module_of(script, *words, *(("--folder", folder) if script == "elastic_fsdp" else ()))
    module.EPOCHS, module.MEMBERS = 1, 3
    me.emit("ended", code=module.main())


@pytest.mark.parametrize(("script", "lost"), [("elastic_training", {1}), ("elastic_fsdp", {1, 2})])
def test_a_training_that_loses_members_in_its_closing_barrier(cast, tmp_path, scikit_learn, script, lost):
    program = {"script": script, "port": cast.server.port, "folder": str(tmp_path)}
    members = [cast.start(ends_together, seat, lost=seat in lost, **program) for seat in range(3)]
    for member in members:
        if member.rank in lost:
            member.expect("closing")
        else:
            assert member.expect("ended").code == 0


def makes_its_model(me, port):
    """Be a member of a training of one epoch; one is killed while they make their models, and the others have seen it."""
    module = module_of("elastic_training", "--port", str(port), "--pause", "0", "--rank", str(me.rank))
    make = module.DistributedDataParallel

    def making(net, process_group):
        module.DistributedDataParallel = make
        me.emit("making")
        until(lambda: registry.worlds()["digits"].state is mw.State.BROKEN)
        return make(net, process_group=process_group)

    module.DistributedDataParallel, module.EPOCHS, module.MEMBERS = making, 1, 3
    me.emit("ended", code=module.main())


def test_a_training_that_loses_a_member_while_models_are_made(cast, scikit_learn):
    members = [cast.start(makes_its_model, seat, port=cast.server.port) for seat in range(3)]
    for member in members:
        member.expect("making")
    members[1].kill()
    assert [members[seat].expect("ended").code for seat in (0, 2)] == [0, 0]


def test_a_sharded_training_refuses_the_checkpoints_of_an_earlier_run(cast, tmp_path, scikit_learn):
    (tmp_path / "20").mkdir()
    (tmp_path / "20" / ".metadata").touch()
    words = ("--port", str(cast.server.port), "--folder", str(tmp_path))
    members = [cast.start(one_process, seat, script="elastic_fsdp.py", arguments=words) for seat in range(4)]
    for member in members:
        code = member.expect("ran").code
        assert f"{tmp_path} has checkpoints of an earlier run" in str(code)


def test_rl_weights_of_engines_that_are_killed(run, gymnasium):
    program = run("rl_weights.py", "--seconds", 8, "--rounds", 1, "--fresh", 5)  # engines may stand still
    assert program.finish() == 0, program.text
    fire = re.search(
        r"with kills +(\d+) samples/s.* stale (\d+), mixed (\d+), worlds that broke (\d+)", program.text
    )
    assert int(fire[1]) > 0
    assert (fire[2], fire[3]) == ("0", "0")
    assert int(fire[4]) >= 2
    assert re.search(r"[1-9] while it plays, [1-9] in group creation, \d in a transfer", program.text)
    assert "Traceback" not in program.text


def test_rl_weights_ends_by_ctrl_c(run, gymnasium):
    program = run("rl_weights.py", "--seconds", 60)
    program.expect("4 engines are there")
    os.killpg(program.process.pid, signal.SIGINT)
    assert program.finish() == 130
    assert "Traceback" not in program.text
    assert "KeyboardInterrupt" not in program.text


def test_rl_weights_in_one_group_end_with_the_first_kill(run, gymnasium):
    program = run("rl_weights.py", "--plain")
    assert program.finish() == 0, program.text
    assert "plain torch.distributed: the trainer ended in step" in program.text


@pytest.fixture
def gymnasium():
    if importlib.util.find_spec("gymnasium") is None:
        pytest.skip("CartPole is gymnasium's: pip install gymnasium")


@pytest.fixture
def scikit_learn():
    if importlib.util.find_spec("sklearn") is None:
        pytest.skip("the digits are a file of scikit-learn: pip install --no-deps scikit-learn")


def test_the_demo(run):
    # The demo's second is short for a machine that others share: a stall of a healthy worker is a hang too.
    program = run("demo.py", "--pause", 1, "--hang-timeout", 4)
    assert program.finish() == 0, program.text
    assert re.search(r"w2 broke: crashed, rank 1, [\d.]+ ms after SIGKILL", program.text), program.text
    assert re.search(r"w3 broke: hung, rank 1, [\d.]+ ms after SIGSTOP", program.text), program.text
    assert re.search(r"went on: w1 \d+ messages/s, w3 \d+ messages/s, w4 \d+ messages/s", program.text)
    assert re.search(r"went on: w1 \d+ messages/s, w4 \d+ messages/s", program.text)
    assert "w2 is active, generation 2" in program.text
    assert "w3 is active, generation 2" in program.text
    assert "messages, none wrong; every process ended by itself" in program.text
    assert "Traceback" not in program.text


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_the_demo_can_be_stopped(run, how):
    program = run("demo.py", "--pause", 30)
    program.expect("w4 is active|w3 is active")
    program.process.send_signal(how)
    assert program.finish() == (130 if how != signal.SIGKILL else -9)
    assert "Traceback" not in program.text


def test_the_demo_on_a_terminal():
    """Live, with rich; Ctrl-C is typed, and every process is gone."""
    pytest.importorskip("rich", reason="the live screen needs rich")
    mark, (ours, theirs) = uuid.uuid4().hex, os.openpty()
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environ = {**os.environ, "PYTHONPATH": path, "TERM": "xterm", "COLUMNS": "120", "LINES": "40", MARK: mark}
    with os.fdopen(theirs, "r+b", buffering=0) as terminal:
        process = subprocess.Popen(
            [sys.executable, "-c", LEAD_TERMINAL, str(EXAMPLES / "demo.py"), "--pause", "60"],
            stdin=terminal, stdout=terminal, stderr=terminal, env=environ, start_new_session=True,
        )  # fmt: skip
    seen, deadline = b"", time.monotonic() + PATIENCE
    try:
        while b"is active, generation 1" not in seen and time.monotonic() < deadline:
            if select.select([ours], [], [], 0.2)[0]:
                seen += os.read(ours, 65536)
        assert b"messages/s" in seen
        os.write(ours, b"\x03")
        while process.poll() is None and time.monotonic() < deadline:
            if select.select([ours], [], [], 0.2)[0]:
                with contextlib.suppress(OSError):  # the terminal's other end closed
                    seen += os.read(ours, 65536)
        assert process.poll() == 130
        assert b"Traceback" not in seen
        until = time.monotonic() + PATIENCE / 2
        while left := processes_with(mark):  # a helper of Python's ends after its parent
            assert time.monotonic() < until, left
            time.sleep(0.05)
    finally:
        for pid in processes_with(mark):
            os.kill(pid, signal.SIGKILL)
        process.wait(PATIENCE)
        os.close(ours)


def test_ctrl_c_is_quiet(run):
    program = run("all_reduce.py", "--rounds", 1000)
    program.expect(r"\[0\] world2 round 2")
    os.killpg(program.process.pid, signal.SIGINT)  # as a terminal does: to all of its processes
    assert program.finish() == 130
    assert "Traceback" not in program.text
    assert "KeyboardInterrupt" not in program.text


@pytest.mark.parametrize("name", ["elastic_training", "elastic_fsdp"])
def test_what_runs_on_gloo_alone_takes_no_backend(cast, name):
    process = cast.start(one_process, 0, script=f"{name}.py", arguments=("--backend", "nccl"))
    assert process.expect("ran").code == 2


@pytest.mark.parametrize(
    "line", ["resnet_serving.py --rank 0 --images 100000", "rl_weight_sync.py --rank 0 --steps 100000"]
)
def test_in_terminals_there_is_time_to_kill_a_process(line):
    """By default they end after some seconds, which is what a program that kills by itself wants."""
    name, _, options = line.partition(" --rank 0 ")
    for file in (EXAMPLES / name, EXAMPLES / "README.md"):
        assert f"python examples/{line}" in file.read_text(encoding="utf-8"), file
    assert f'("{options.split()[0]}", ' in (EXAMPLES / name).read_text(encoding="utf-8")


def test_every_example_is_explained():
    told = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    programs = [path.name for path in EXAMPLES.glob("*.py") if not path.name.startswith("_")]
    assert programs
    assert [name for name in programs if f"]({name})" not in told] == []


def test_examples_are_short():
    for path in EXAMPLES.rglob("*.py"):
        assert len(path.read_text(encoding="utf-8").splitlines()) < 300, path
