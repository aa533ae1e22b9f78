"""What is replaced and overridden in the torch that runs here is what docs/torch-privates.md lists."""

from __future__ import annotations

import importlib
import inspect
import pkgutil

import torch.distributed.distributed_c10d as c10d
from torchprivates import page
from torchprivates.scan import is_private

import multiworld
from multiworld._c10d.elastic.group import ElasticGroup
from multiworld._c10d.monkeypatch import Patches
from multiworld._c10d.routing import router

LISTED = {
    how: {page.last(name) for use in page.uses() if use["how"] == how for name in use["names"]}
    for how in ("replaced", "overridden", "read")
}


def test_what_the_router_replaces_is_listed(monkeypatch):
    seen = []

    def noting(self, owner, name, value):
        seen.append((owner, name))
        return plain(self, owner, name, value)

    plain = Patches.set
    monkeypatch.setattr(Patches, "set", noting)
    before = router.installed()
    router.uninstall()
    router.install()
    try:
        router.install_nccl()
    finally:
        router.uninstall()
        if before:
            router.install()
    private = {name for _, name in seen if is_private(name)}
    assert {"_world", "_get_msg_dict", "_execution_engine"} <= private
    assert private <= LISTED["replaced"], private - LISTED["replaced"]
    assert hasattr(c10d, "_world")


def test_what_is_overridden_is_listed():
    found = set()
    for info in pkgutil.walk_packages(multiworld.__path__, "multiworld."):
        if info.name.endswith(("__main__", "evidence_program")):
            continue
        module = importlib.import_module(info.name)
        for each in vars(module).values():
            # ElasticGroup forwards whatever a version's ProcessGroup has, and relies on no name of it.
            if inspect.isclass(each) and each.__module__ == info.name and each is not ElasticGroup:
                bases = [base for base in each.__mro__[1:] if base.__module__.split(".")[0] == "torch"]
                found |= {
                    name
                    for name, value in vars(each).items()
                    if is_private(name)
                    and inspect.isfunction(value)
                    and any(name in vars(base) for base in bases)
                }
    assert found
    assert found <= LISTED["overridden"], found - LISTED["overridden"]
