"""How ranks are put on GPUs, and which scenarios then fit."""

from __future__ import annotations

import pytest
from bed.errors import BedError
from hardware.placed import Placed
from hardware.placements import PLACEMENTS, choices
from hardware.selection import HARDWARE, ORDER, needs_double, select
from kits.gpukit import NeverStarts
from kits.matrixkit import STOCK
from matrix.catalogue import GROUPS, SCENARIOS, by_id
from matrix.modes import MODES


def ids(groups):
    return [[each.id for each in group] for group in groups]


def test_what_a_machine_is_asked_for():
    assert ids(choices(1)) == [["one-gpu", "one-gpu-hosts"]]
    assert ids(choices(4)) == [["gpus-sockets"], ["gpus"], ["one-gpu", "one-gpu-hosts"]]
    assert ids(choices(1, ["one-gpu-hosts", "one-gpu", "one-gpu"])) == [["one-gpu-hosts"], ["one-gpu"]]


@pytest.mark.parametrize(
    ("gpus", "name", "words"), [(1, "gpus", "needs a GPU for each"), (4, "x", "there are one-gpu")]
)
def test_a_placement_that_is_none_or_does_not_fit(gpus, name, words):
    with pytest.raises(BedError, match=words):
        choices(gpus, [name])


def test_environments():
    shared, hosts, apart, own = (
        PLACEMENTS[name] for name in ("one-gpu", "one-gpu-hosts", "gpus-sockets", "gpus")
    )
    assert shared.of_all()["NCCL_MULTI_RANK_GPU_ENABLE"] == "1"
    assert shared.of_all()["CUDA_VISIBLE_DEVICES"] == "0"
    assert shared.of_all("3,1")["CUDA_VISIBLE_DEVICES"] == "3"
    assert [hosts.of_rank(rank)["NCCL_HOSTID"] for rank in (0, 1)] == ["m8d-host-0", "m8d-host-1"]
    assert own.of_all("3,1") == {}
    for each in (shared, hosts, apart):  # a peer's end is seen over sockets
        env = each.of_all()
        assert (env["NCCL_P2P_DISABLE"], env["NCCL_SHM_DISABLE"], env["NCCL_NET"]) == ("1", "1", "Socket")


def test_who_comes_late_takes_the_gpu_of_its_rank():
    assert PLACEMENTS["gpus"].of_latecomer(2) == {"CUDA_VISIBLE_DEVICES": "2"}
    assert PLACEMENTS["gpus"].of_latecomer(1, "5,7")["CUDA_VISIBLE_DEVICES"] == "7"
    assert PLACEMENTS["one-gpu"].of_latecomer(2, "5,7")["CUDA_VISIBLE_DEVICES"] == "5"
    assert PLACEMENTS["one-gpu-hosts"].of_latecomer(2)["NCCL_HOSTID"] == "m8d-host-2"


def test_a_launcher_gives_them_to_its_ranks(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    launcher = NeverStarts()
    placed = Placed(launcher, PLACEMENTS["one-gpu-hosts"])
    with pytest.raises(AssertionError):
        placed.start("a:b", 2, env={"NCCL_NET": "IB", "MINE": "1"}, timeout=3)
    with pytest.raises(AssertionError):
        Placed(launcher, PLACEMENTS["gpus"], disguise=True).start("a:b", 1, as_rank=2)
    first, second = launcher.asked
    assert (first["program"], first["world_size"], first["timeout"]) == ("a:b", 2, 3)
    assert (first["env"]["NCCL_NET"], first["env"]["MINE"], first["env"]["CUDA_VISIBLE_DEVICES"]) == (
        "IB",
        "1",
        "0",
    )
    assert first["rank_env"](1) == {"NCCL_HOSTID": "m8d-host-1"}
    assert second["program"] == "hardware.disguise:a__b"
    assert (second["env"], second["rank_env"](0)) == ({"CUDA_VISIBLE_DEVICES": "2"}, {})


def test_only_scenarios_whose_fault_is_a_signal():
    assert {each.fault.verb for each in HARDWARE} == {"kill", "stop"}
    for scenario in HARDWARE:
        assert "knob" not in repr(scenario.config)
    for name in ("lost.recv.stream", "silent.stopped", "others.same-process", "others.same-store", "later.cleaned-up",
                 "again.rebuilt"):  # fmt: skip
        assert by_id(name) in HARDWARE
    for name in ("silent.killed", "abort.fails", "enqueue.send", "making.peer-lost", "error.ncclRemoteError"):
        assert needs_double(by_id(name))


def test_what_is_added_is_of_a_group_and_named_like_no_other():
    assert len({each.id for each in HARDWARE} | {each.id for each in SCENARIOS}) == len(SCENARIOS) + 1
    assert {each.group for each in HARDWARE} <= set(GROUPS)
    assert {mode for _, mode in ORDER} <= set(MODES)
    assert HARDWARE[-1].group == by_id("later.dump-sleep").group


def test_cells_of_one_gpu_and_of_two():
    one, none = select(STOCK, PLACEMENTS["one-gpu"], 1, repeat=2)
    assert none == []
    assert {cell.repeat for cell in one} == {0, 1}
    assert {cell.mode.id for cell in one} >= {"unset", "aeh1", "aeh2", "aeh3", "aeh2-wait", "aeh2-beat-dump"}
    assert "aeh0" not in {cell.mode.id for cell in one}
    two, lacking = select(STOCK, PLACEMENTS["gpus"], 2)
    assert "lost.three: 3 ranks" in lacking
    assert {cell.scenario.world_size for cell in two} == {2}
    few, lacking = select(STOCK, PLACEMENTS["gpus"], 2, only=["lost.t*", "again.d*"], modes=["aeh2"])
    assert ([str(cell) for cell in few], lacking) == (
        ["stock-2.6.0 nccl again.destroyed aeh2"],
        ["lost.three: 3 ranks"],
    )
