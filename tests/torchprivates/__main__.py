"""``python -m torchprivates [--seen]``."""

from __future__ import annotations

import importlib
import json
import re
import sys
from typing import Any

from torchprivates import page


def has(name: str) -> bool:
    """Whether the torch of this Python has what a listed name stands for."""
    import torch
    import torch.distributed.distributed_c10d as c10d
    from torch.distributed import device_mesh
    from torch.distributed.elastic.agent.server import local_elastic_agent
    from torch.distributed.elastic.multiprocessing import api
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

    owners: dict[str, Any] = {
        "ProcessGroup": c10d.ProcessGroup,
        "Work": c10d.Work,
        "ProcessGroupGloo": getattr(c10d, "ProcessGroupGloo", None),
        "ProcessGroupNCCL": getattr(c10d, "ProcessGroupNCCL", None),
        "DeviceMesh": device_mesh.DeviceMesh,
        "DistributedDataParallel": torch.nn.parallel.DistributedDataParallel,
        "DynamicRendezvousHandler": DynamicRendezvousHandler,
        "LocalElasticAgent": local_elastic_agent.LocalElasticAgent,
        "PContext": api.PContext,
        "SubprocessHandler": SubprocessHandler,
        "OpOverload": torch._ops.OpOverload,
    }
    first, _, rest = name.partition(".")
    if first in owners:
        owner = owners[first]
        if hasattr(owner, rest):
            return True
        # An attribute of an object: named in the code of its class or of what derives from it.
        import inspect

        module = inspect.getmodule(owner)
        return module is not None and re.search(rf"\b{rest}\b", inspect.getsource(module)) is not None
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:cut]))
        except ImportError:
            continue
        for part in parts[cut:]:
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True
    return False


def note_seen() -> None:
    """Note in uses.toml which names this torch has."""
    import torch

    version = torch.__version__.partition("+")[0]
    blocks = page.USES.read_text().split("[[use]]\n")
    entries = page.uses()
    for index, entry in enumerate(entries, 1):
        if "library" in entry:
            continue
        lacking = [name for name in entry["names"] if not has(name)]
        seen = {each for each in entry.get("seen", []) if each != version} | (
            {version} if not lacking else set()
        )
        lacks = {v: names for v, names in entry.get("lacking", {}).items() if v != version}
        if lacking:
            lacks[version] = lacking
        block = re.sub(r"^(seen|lacking) = .*\n", "", blocks[index], flags=re.MULTILINE).rstrip("\n")
        order = sorted(seen, key=lambda text: [int(part) for part in text.split(".")])
        block += f"\nseen = {json.dumps(order)}\n" if seen else "\n"
        if lacks:
            inner = ", ".join(f'"{v}" = {json.dumps(names)}' for v, names in sorted(lacks.items()))
            block += f"lacking = {{ {inner} }}\n"
        blocks[index] = block + "\n"
    page.USES.write_text("[[use]]\n".join(blocks).rstrip("\n") + "\n")


if __name__ == "__main__":
    if sys.argv[1:] == ["--seen"]:
        note_seen()
    elif sys.argv[1:]:
        sys.exit(f"unknown: {sys.argv[1:]}; see python -m pydoc torchprivates")
    page.PAGE.write_text(page.text())
