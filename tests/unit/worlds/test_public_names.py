from __future__ import annotations

import importlib
import pkgutil

import pytest

import m8d_build
import multiworld

PROBES = "m8d_build.check.probes"  # programs for a foreign environment, never imported here


def test_the_public_names_of_multiworld_are_these():
    assert sorted(multiworld.__all__) == [
        "BackendError", "Breakage", "BrokenWorldException", "Cause", "CollectiveMismatchError", "Event", "InstallError",
        "InvalidJoinError", "JoinAbandonedError", "JoinError", "JoinTimeoutError", "MarkerError",
        "MemberBusy", "MismatchError", "MultiworldError", "PatchRequiredError", "PendingOperation", "ProvenanceError", "RankTakenError",
        "RouterError", "ShimError", "SizeMismatchError", "StaleGenerationError", "State", "StateError", "StateTransferError", "StoreBindError",
        "StoreUnreachableError",
        "UnknownWorldError", "World", "WorldActive", "WorldBroken", "WorldClosed", "WorldClosedError",
        "WorldError", "WorldJoinFailed", "WorldJoining", "WorldReady", "WorldStateReceived", "WorldStuck", "WorldUnblocked", "WrongDeviceError",
        "__version__", "join", "join_all", "join_all_async", "join_async", "joined", "log_worlds", "retiring", "serve_metrics", "serve_page", "subscribe", "trace_worlds",
        "worlds",
    ]  # fmt: skip


@pytest.mark.parametrize("name", multiworld.__all__)
def test_every_public_name_resolves(name):
    assert getattr(multiworld, name) is not None
    assert name in dir(multiworld)


def test_a_name_that_is_not_public_is_an_attribute_error():
    with pytest.raises(AttributeError, match="nope"):
        _ = multiworld.nope


def modules(package) -> list[str]:
    names = [info.name for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")]
    return [
        package.__name__,
        *(name for name in names if not name.startswith(PROBES) and "__main__" not in name),
    ]


@pytest.mark.parametrize("name", [*modules(multiworld), *modules(m8d_build)])
def test_every_module_lists_its_public_names_and_has_them(name):
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as exc:  # `nox -s unit` has no torch
        if exc.name != "torch":
            raise
        pytest.skip("needs torch")
    if name == "m8d_build" or (not hasattr(module, "__all__") and hasattr(module, "__path__")):
        return  # a package that only holds modules
    assert [listed for listed in module.__all__ if not hasattr(module, listed)] == []
    assert len(set(module.__all__)) == len(module.__all__)
