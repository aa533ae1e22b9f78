"""The shim on the torch that is installed: what it says of itself, the namespace, on and off.

Each in a process of its own: what is looked at is a fresh torch.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from multiworld._core.nccl_policy import CLEAN_UP_ONLY, NO_HANDLING, VARIABLES
from multiworld.shim.loader import LOADER_ENTRY, loader_text

ROOT = Path(__file__).parents[3]
NCCL = "torch.distributed.is_nccl_available()"


def _path() -> str:
    """What torch warns of when it is missing (numpy) may lie beside the build (`--bed-path`)."""
    return os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))


def run(code: str, *, check: bool = True, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh process, without any variable of torch's NCCL or ours but those that are given."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in VARIABLES and not name.startswith("M8D_")
    }
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120, cwd="/",
        env={**kept, "PYTHONPATH": _path(), **environ},
    )  # fmt: skip
    assert not check or done.returncode == 0, done.stderr
    return done


def answer(code: str, **environ: str):
    return json.loads(run(f"import json\n{code}", **environ).stdout)


@pytest.fixture(scope="module")
def status():
    return answer("import multiworld.shim\nprint(json.dumps(multiworld.shim.status().as_dict()))")


@pytest.fixture(scope="module")
def has_nccl() -> bool:
    return answer(f"import torch.distributed\nprint(json.dumps({NCCL}))")


# --- status


def test_the_build_is_the_one_that_is_installed(status):
    told = answer(
        "import torch\nprint(json.dumps([torch.__version__, torch.version.git_version, torch.version.cuda, "
        "list(torch.__path__)[0]]))"
    )
    build = status["torch"]
    assert [build["version"], build["git"], build["cuda"], build["folder"]] == told
    assert build["distributed"] is True


def test_gloo_is_there_and_survives_everywhere(status):
    (gloo,) = [each for each in status["backends"] if each["name"] == "gloo"]
    assert gloo["available"]
    assert gloo["implementation"] == "ProcessGroupGloo"
    assert (gloo["abort"], gloo["survive"], gloo["remote_error"]) == ("sockets", "yes", True)


def test_what_is_said_of_reconfigure_is_what_a_group_says(status):
    said = {each["name"]: each["reconfigure"] for each in status["backends"]}
    group = answer(
        "import torch.distributed as dist\n"
        "store = dist.HashStore()\n"
        "group = dist.ProcessGroupGloo(store, 0, 1)\n"
        "print(json.dumps(bool(getattr(group, 'supports_reconfigure', False))))",
        GLOO_SOCKET_IFNAME="lo",
    )
    assert said["gloo"] is group


def test_nccl_is_said_to_be_what_torch_would_build(status, has_nccl):
    said = {each["name"]: each for each in status["backends"]}
    assert said["nccl"]["available"] is has_nccl
    if not has_nccl:
        assert status["nccl"]["mode"] == "off"
        assert "no backend 'nccl'" in status["nccl"]["reason"]
        return
    # What torch itself registers, where it registers through functions: the truth to compare with.
    truth = answer(
        "import torch.distributed.distributed_c10d as c\n"
        "register = getattr(c.Backend, '_ensure_backend_registered', None)\n"
        "register and register('nccl')\n"
        "plugin = c.Backend._plugins.get('NCCL')\n"
        "print(json.dumps(plugin.creator_fn.__name__ if plugin else None))"
    )
    expected = "ProcessGroupNCCL2" if truth == "_create_nccl2_process_group" else "ProcessGroupNCCL"
    assert said["nccl"]["implementation"] == expected
    assert said["nccl"]["abort"] in {"abort", "_shutdown"}
    assert said["nccl"]["remote_error"] is True


def test_the_mode_follows_from_the_patches(status, has_nccl):
    if not has_nccl:
        pytest.skip("this torch has no NCCL")
    assert status["patched"]["disagreements"] == []
    if status["patched"]["marked"]:
        assert {"group-guard", "cleanup-only", "abort-offload"} <= set(status["patched"]["topics"])
        assert status["nccl"]["mode"] == "on"
        assert status["nccl"]["environment"] == {
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": CLEAN_UP_ONLY,
            "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
        }
    else:
        assert status["nccl"]["mode"] == "guarded"
        # Torch is to do nothing by itself: it would abort before the world is known to be broken.
        assert status["nccl"]["environment"]["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == NO_HANDLING
        assert status["nccl"]["remaining"]


@pytest.mark.parametrize("value", ["0", "1"])
def test_the_switch_between_the_two_nccls_is_asked_of_torch(has_nccl, value):
    if not has_nccl:
        pytest.skip("this torch has no NCCL")
    said, truth = answer(
        "from multiworld._c10d.backend_class import implementation_of\n"
        "import torch.distributed.distributed_c10d as c\n"
        "before = dict(c.Backend._plugins), list(c.Backend.backend_list), sorted(getattr(c, '_FR_SELF_RECORDING_BACKENDS', ()))\n"
        "said = implementation_of('nccl')\n"
        "assert before == (dict(c.Backend._plugins), list(c.Backend.backend_list), sorted(getattr(c, '_FR_SELF_RECORDING_BACKENDS', ())))\n"
        "register = getattr(c.Backend, '_ensure_backend_registered', None)\n"
        "register and register('nccl')\n"
        "assert implementation_of('nccl') == said\n"
        "plugin = c.Backend._plugins.get('NCCL')\n"
        "print(json.dumps([said, plugin.creator_fn.__name__ if plugin else None]))",
        TORCH_DIST_USE_NCCL2=value,
    )
    assert said == ("ProcessGroupNCCL2" if truth == "_create_nccl2_process_group" else "ProcessGroupNCCL")


def test_a_backend_that_was_registered_by_others_is_not_taken_for_nccl():
    said = answer(
        "import torch.distributed as dist\n"
        "dist.Backend.register_backend('mine', lambda *a: None, devices=['cpu'])\n"
        "from multiworld._c10d import capabilities as c\n"
        "print(json.dumps([[str(c.nccl_facts(n).implementation) for n in ('mine', 'gloo', 'nowhere')],"
        " [a.name for a in c.backend_abilities()].count('mine')]))"
    )
    assert said == [["other", "other", "none"], 1]


def test_the_status_changes_nothing():
    same = answer(
        "import os, torch.distributed.distributed_c10d as c, torch.distributed as dist, multiworld.shim\n"
        "state = lambda: (dict(os.environ), dict(c.Backend._plugins), list(c.Backend.backend_list), sorted(vars(dist)))\n"
        "before = state()\n"
        "multiworld.shim.status()\n"
        "after = state()\n"
        "print(json.dumps([b == a for b, a in zip(before, after)] + [multiworld.shim.enabled()]))"
    )
    assert same == [True, True, True, True, False]


# --- before the first NCCL world


def test_the_guards_reach_the_environment_of_this_process(has_nccl, status):
    if not has_nccl:
        pytest.skip("this torch has no NCCL")
    said = answer(
        "import os, warnings\n"
        "from multiworld._c10d.capabilities import prepare_nccl\n"
        "with warnings.catch_warnings(record=True) as told:\n"
        "    warnings.simplefilter('always')\n"
        "    first, second = prepare_nccl('w'), prepare_nccl('w2', 'cpu:gloo,cuda:nccl')\n"
        "assert first.mode == second.mode and first.remaining == second.remaining\n"
        "print(json.dumps([{k: os.environ.get(k) for k in dict(first.environment)}, "
        "[str(each.message) for each in told if each.category is RuntimeWarning]]))"
    )
    assert said[0] == status["nccl"]["environment"]
    assert len(said[1]) == (status["nccl"]["mode"] == "guarded")


def test_without_nccl_nothing_is_prepared_unless_it_is_asked_for(has_nccl):
    if has_nccl:
        pytest.skip("this torch has NCCL")
    code = "from multiworld._c10d.capabilities import prepare_nccl\nprint(prepare_nccl('w').mode)"
    assert run(code).stdout == "off\n"
    done = run(code, check=False, M8D_SHIM="on")
    assert done.returncode == 1
    assert "M8D_SHIM=on asks for NCCL fault management" in done.stderr


def test_a_patch_that_is_asked_for(has_nccl, status):
    if not has_nccl:
        pytest.skip("this torch has no NCCL")
    code = "from multiworld._c10d.capabilities import prepare_nccl\nprint(prepare_nccl('w').mode)"
    done = run(code, check=False, M8D_REQUIRE_PATCH="1")
    if status["nccl"]["mode"] == "on":
        assert done.stdout == "on\n"
    else:
        assert "PatchRequiredError: World 'w'" in done.stderr
        assert "build-torch" in done.stderr


# --- doctor


@pytest.mark.parametrize("arguments", [[], ["--json"]])
def test_the_doctor_finds_this_torch_in_order(arguments, status):
    code = f"import sys; from multiworld.cli.main import main; sys.exit(main({['doctor', *arguments]}))"
    done = run(code)
    assert done.stderr == ""
    assert status["torch"]["version"] in done.stdout
    if arguments:
        assert json.loads(done.stdout) == {**status, "sound": True}


# --- the namespace


@pytest.fixture(scope="module")
def namespace(tmp_path_factory) -> str:
    """Code that puts the loader's folder beside torch.distributed's own, as if it had been installed."""
    root = tmp_path_factory.mktemp("namespace")
    place = root / LOADER_ENTRY
    place.parent.mkdir(parents=True)
    place.write_bytes(loader_text())
    return f"import torch.distributed as dist\ndist.__path__.append({str(root / 'torch/distributed')!r})\n"


def test_the_namespace_has_the_packages_own_objects(namespace):
    done = run(
        namespace + "import torch.distributed.multiworld as mw, multiworld\n"
        "import torch.distributed.multiworld.communicator, torch.distributed.multiworld.shim.marker as marker\n"
        "from torch.distributed.multiworld import manager, watchdog\n"
        "import multiworld.communicator, multiworld.shim.marker, multiworld.manager, multiworld.watchdog, sys\n"
        "assert mw.communicator is multiworld.communicator and marker is multiworld.shim.marker\n"
        "assert manager is multiworld.manager and watchdog is multiworld.watchdog\n"
        "for name in multiworld.__all__:\n"
        "    assert getattr(mw, name) is getattr(multiworld, name), name\n"
        "assert mw.join is multiworld.join\n"
        "assert dist.WorldManager is multiworld.manager.WorldManager\n"
        "assert not multiworld.shim.enabled()\n"
        "import torch, threading\n"
        "assert threading.active_count() == 1\n"
        "copies = [n for n, m in sys.modules.items() if n.startswith('torch.distributed.multiworld.')"
        " and m is not sys.modules[n.removeprefix('torch.distributed.')]]\n"
        "assert not copies, copies\n"
        "print('good')"
    )
    assert done.stdout == "good\n"


def test_off_leaves_torchs_namespace_alone(namespace):
    done = run(
        namespace
        + "import torch.distributed.multiworld as mw\nprint(hasattr(dist, 'WorldManager'), mw.__version__ != '')",
        M8D_SHIM="off",
    )
    assert done.stdout == "False True\n"


# --- on and off


def test_turning_it_off_restores_torch_exactly():
    done = run(
        "import torch.distributed as dist, torch.distributed.distributed_c10d as c10d\n"
        "import torch.distributed.device_mesh as mesh\n"
        "import multiworld.shim as shim, multiworld.manager\n"
        "look = lambda: [{k: id(v) for k, v in vars(m).items()} for m in (dist, c10d, mesh)]\n"
        "before = look()\n"
        "for _ in range(2):\n"
        "    shim.enable(); shim.enable()\n"
        "    assert shim.enabled() and dist.WorldManager is multiworld.manager.WorldManager\n"
        "    assert look() != before\n"
        "    shim.disable(); shim.disable()\n"
        "    assert not shim.enabled() and look() == before\n"
        "print('good')"
    )
    assert done.stdout == "good\n"


def test_a_world_managers_place_that_is_taken_stays(namespace):
    done = run(
        namespace + "dist.WorldManager = mine = object()\n"
        "import multiworld.shim as shim, torch.distributed.multiworld\n"
        "shim.enable()\nassert dist.WorldManager is mine\nshim.disable()\nassert dist.WorldManager is mine\nprint('good')"
    )
    assert done.stdout == "good\n"


def test_it_is_not_turned_off_under_open_worlds():
    done = run(
        "import multiworld.shim as shim\n"
        "from multiworld.registry import registry\n"
        "registry.worlds = lambda: {'hub': object(), 'w1': object()}\n"
        "shim.enable()\n"
        "try:\n    shim.disable()\nexcept shim.switch.ShimError as error:\n    print(error)\n"
        "assert shim.enabled()"
    )
    assert "2 world(s) open: 'hub', 'w1'" in done.stdout
    assert "Close them first" in done.stdout


def test_it_is_not_turned_off_while_a_world_is_joined():
    done = run(
        "import multiworld.shim as shim\n"
        "from multiworld.registry import Reservation, registry\n"
        "join = Reservation(registry, 'w1', 0)\n"
        "registry.reserve('w1', None, join)\n"
        "shim.enable()\n"
        "try:\n    shim.disable()\nexcept shim.switch.ShimError as error:\n    print(error)\n"
        "assert shim.enabled()\n"
        "join.end()\n"
        "shim.disable()\n"
        "assert not shim.enabled()"
    )
    assert "1 world(s) open: 'w1' (being joined)" in done.stdout


def test_a_join_that_begins_while_it_is_turned_off_turns_it_on():
    done = run(
        "import threading\n"
        "import multiworld.shim as shim\n"
        "from multiworld.registry import registry\n"
        "shim.enable()\n"
        "join = threading.Thread(target=shim.enable)\n"
        "def worlds():\n"
        "    join.start()\n"
        "    join.join(1.0)\n"  # it waits for the decision
        "    return {}\n"
        "registry.worlds = worlds\n"
        "shim.disable()\n"
        "join.join(60)\n"
        "assert shim.enabled()\n"
        "print('good')"
    )
    assert done.stdout == "good\n"
