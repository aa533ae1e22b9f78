"""What torch runs in threads of its own, for a caller inside ``with world:`` (docs/torch-threads.md)."""

from __future__ import annotations

import ast
import contextlib
import importlib
import re
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from kits.contract.battery.features_parallel import dtensor
from kits.contract.routerkit import routed
from kits.contract.worldkit import cast as casting
from kits.contract.worldkit import outcome
from torch.distributed.device_mesh import init_device_mesh

import multiworld as mw
from multiworld._c10d.routing import router, threads
from multiworld.errors import RouterError

PAGE = Path(__file__).resolve().parents[3] / "docs" / "torch-threads.md"


@pytest.fixture
def cast():
    with casting() as made:
        yield made


# -- checkpoints ------------------------------------------------------------------------------------------------


def checkpointing(me, size, folder, late=0.0, how="block"):
    """Save a tensor of both ranks in the background, and load it back."""
    warnings.simplefilter("ignore")
    import torch.distributed.checkpoint as dcp

    distribute_tensor, shard = dtensor("distribute_tensor"), dtensor("Shard")
    whole = torch.arange(12.0)
    with mw.join("w", me.rank, size, store=me.store, timeout=60) as world:
        mesh = init_device_mesh("cpu", (size,))
        there = {"t": distribute_tensor(whole.clone(), mesh, [shard(0)])}
        if me.rank:
            # Not to make the test pass: the others' threads are to find nobody there yet.
            time.sleep(late)
        if how == "block":
            saved = dcp.async_save(there, checkpoint_id=folder)
        elif how == "group":
            saved = dcp.async_save(there, checkpoint_id=folder, process_group=world.group)
        else:
            saved = None
    if saved is None:
        if how == "group outside":
            dcp.async_save(there, checkpoint_id=folder, process_group=world.group).result(60)
        else:
            dcp.save(there, checkpoint_id=folder, process_group=world.group)
    else:
        saved.result(60)  # the block has ended; the world of the call counts
    with world:
        back = {"t": distribute_tensor(torch.zeros(12), mesh, [shard(0)])}
        dcp.load(back, checkpoint_id=folder)
        assert torch.equal(back["t"].full_tensor(), whole), back
        assert world.state.value == "active"
        dist.barrier()
    world.close()


@pytest.mark.parametrize(
    ("how", "late"),
    [("block", 0.0), ("block", 2.0), ("group", 0.0), ("group outside", 2.0), ("sync outside", 2.0)],
)
def test_a_checkpoint_saved_in_the_background_is_the_worlds(cast, tmp_path, how, late):
    members = cast.all(checkpointing, 2, folder=str(tmp_path / "saved"), how=how, late=late)
    for member in members:
        member.expect("end")
    assert sorted(each.name for each in (tmp_path / "saved").iterdir()) == [
        ".metadata",
        "__0_0.distcp",
        "__1_0.distcp",
    ]


def two_at_once(me, size, folder):
    warnings.simplefilter("ignore")
    import torch.distributed.checkpoint as dcp

    worlds = [mw.join(name, me.rank, size, store=me.store, timeout=60) for name in ("a", "b")]
    saving = []
    for number, world in enumerate(worlds):
        with world:
            saving.append(
                dcp.async_save({"t": torch.full((3,), float(number))}, checkpoint_id=f"{folder}{number}")
            )
    for each in saving:
        each.result(60)
    for number in range(2):
        back = {"t": torch.zeros(3)}
        dcp.load(back, checkpoint_id=f"{folder}{number}")
        assert torch.equal(back["t"], torch.full((3,), float(number)))
    for world in worlds:
        world.close()


def test_two_worlds_save_at_once(cast, tmp_path):
    for member in cast.all(two_at_once, 2, folder=str(tmp_path / "saved")):
        member.expect("end")


def goes_on(me, size, folder):
    """Collectives between a save's beginning and its end, which each rank reaches in its own time; two saves at once."""
    warnings.simplefilter("ignore")
    import torch.distributed.checkpoint as dcp

    world = mw.join("w", me.rank, size, store=me.store, timeout=60)
    write, may_write = dcp.FileSystemWriter.write_data, threading.Event()

    def later(writer, *args):
        assert may_write.wait(60)
        return write(writer, *args)

    dcp.FileSystemWriter.write_data = later
    with world:
        for number in range(2):
            may_write.clear()
            saves = [
                dcp.async_save(
                    {"t": torch.ones(3)}, checkpoint_id=f"{folder}{number}{each}", process_group=group
                )
                for each, group in enumerate((None, world.group))
            ]
            for step in range(40):
                if step == 20 + 10 * me.rank:
                    may_write.set()
                t = torch.tensor([step])
                dist.all_reduce(t)
                assert t.item() == size * step
            for each in saves:
                each.result(60)
    world.close()


def test_collectives_beside_a_checkpoint_that_is_being_saved(cast, tmp_path):
    for member in cast.all(goes_on, 2, folder=str(tmp_path / "saved")):
        member.expect("end")


def closing_first(me, size, folder):
    import torch.distributed.checkpoint as dcp

    world = mw.join("w", me.rank, size, store=me.store, timeout=60)
    with world:
        world.close()

        def save():
            try:
                dcp.async_save({"t": torch.ones(2)}, checkpoint_id=folder).result(60)
            except dcp.CheckpointException as error:  # it is no Exception
                raise RuntimeError(str(error)) from error

        me.emit("saved", **outcome(save))


def test_a_closed_world_saves_nothing_by_itself(cast, tmp_path):
    for member in cast.all(closing_first, 2, folder=str(tmp_path / "saved")):
        assert "closed by this process" in member.expect("saved").text
    assert not list(tmp_path.rglob("*.distcp"))


def test_a_checkpointer_process_is_refused_in_a_world(tmp_path):
    import torch.distributed.checkpoint as dcp

    saver = importlib.import_module("torch.distributed.checkpoint.state_dict_saver")
    if not hasattr(saver, "AsyncCheckpointerType"):
        pytest.skip("this torch has no checkpointer processes")
    with routed() as kit:
        state = kit.world("a")
        with router.selected(state), pytest.raises(RouterError, match=r"PROCESS in world 'a'") as caught:
            dcp.async_save(
                {"t": torch.ones(2)},
                checkpoint_id=tmp_path / "saved",
                async_checkpointer_type=saver.AsyncCheckpointerType.PROCESS,
            )
        assert "THREAD" in caught.value.next_step
    assert not (tmp_path / "saved").exists()


# -- callbacks, and other threads -------------------------------------------------------------------------------


def test_callbacks_of_futures_belong_to_the_world_they_were_given_in():
    with routed() as kit:
        state = kit.world("a")
        seen = []
        future = torch.futures.Future()
        with router.selected(state):
            done = future.then(lambda got: seen.append((router.current(), dist.get_rank())) or got.value())
            future.add_done_callback(lambda _: seen.append((router.current(), dist.get_world_size())))
        completing = threading.Thread(target=future.set_result, args=(7,))
        completing.start()
        completing.join()
        assert done.wait() == 7
        assert seen == [(state, 0), (state, 1)]
        other = torch.futures.Future()
        outside = other.then(lambda _: router.current())
        other.set_result(None)
        assert outside.wait() is None


class _Asks(torch.nn.Module):
    def forward(self, x):
        return x * 0 + dist.get_world_size()


def test_threads_that_modules_of_torch_start_know_the_world():
    with routed() as kit:
        state = kit.world("a")
        for name, replaced in threads.MODULES.items():
            with contextlib.suppress(
                ImportError
            ):  # not in this version, or it needs what torch does not bring
                module = importlib.import_module(name)
                for each in replaced:
                    if each not in vars(module) or each == threads.IN_A_PROCESS:
                        continue
                    with router.selected(state):
                        assert _asked_in_a_thread(vars(module)[each]) == 1, (name, each)
                    with pytest.raises(ValueError, match="not been initialized"):
                        _asked_in_a_thread(vars(module)[each])


def _asked_in_a_thread(door):
    """Ask in a thread made by `door`, a replaced global."""
    if getattr(door, "__name__", "") == "ThreadPoolExecutor" or hasattr(door, "submit"):
        with door(max_workers=1) as pool:
            return pool.submit(dist.get_world_size).result()
    if hasattr(door, "futures"):
        return _asked_in_a_thread(door.futures.ThreadPoolExecutor)
    made = door.Thread if hasattr(door, "Thread") else door
    seen = []

    def ask():
        try:
            seen.append(dist.get_world_size())
        except ValueError as error:
            seen.append(error)

    thread = made(target=ask)
    thread.start()
    thread.join()
    if isinstance(seen[0], ValueError):
        raise seen[0]
    return seen[0]


def test_an_executor_of_ones_own_is_left_alone():
    import concurrent.futures

    with routed() as kit, router.selected(kit.world("a")):
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            assert pool.submit(router.current).result() is None
        seen = []
        thread = threading.Thread(target=lambda: seen.append(router.current()))
        thread.start()
        thread.join()
        assert seen == [None]


# -- the list is whole ------------------------------------------------------------------------------------------

_STARTS = re.compile(
    r"\b(?:\w+\.)*(?:Thread|ThreadPoolExecutor|ProcessPoolExecutor|Process|Popen|ThreadPool|start_processes|spawn"
    r"|ThreadingHTTPServer|start_new_thread|run_in_executor|to_thread|TrackedProcessPoolExecutor|SubprocPool)$"
)
_PLACES = (
    "distributed",
    "nn",
    "utils/data",
    "utils/_functools.py",
    "autograd",
    "multiprocessing",
    "futures",
    "_lazy",
)


def starters():
    """Modules of the installed torch that start threads or processes, by dotted name."""
    root = Path(torch.__file__).parent
    found = set()
    for place in _PLACES:
        path = root / place
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path] * path.is_file():
            tree = ast.parse(file.read_text(encoding="utf-8"))
            for node in ast.walk(tree):
                called = node.func if isinstance(node, ast.Call) else None
                bases = node.bases if isinstance(node, ast.ClassDef) else ()
                names = [ast.unparse(each) for each in (called, *bases) if each is not None]
                if any(_STARTS.search(name) for name in names):
                    dotted = ".".join(file.relative_to(root.parent).with_suffix("").parts)
                    found.add(dotted.removesuffix(".__init__"))
    return found


def test_the_page_lists_every_module_that_starts_threads_or_processes():
    page = PAGE.read_text(encoding="utf-8")
    missing = {name for name in starters() if f"`{name.removeprefix('torch.')}`" not in page}
    assert not missing, f"not in {PAGE.name}: {sorted(missing)}"
    assert not {name for name in threads.MODULES if f"`{name.removeprefix('torch.')}`" not in page}
