"""What torch is made of where the router touches it, to be compared before and after. Knows nothing of multiworld."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.autograd import Variable
from torch.distributed import c10d_logger, device_mesh


def everything() -> dict[str, dict[str, Any]]:
    """Every attribute of what the router touches, to be compared by identity."""
    packet = torch.ops._c10d_functional.wait_tensor
    places: dict[str, Any] = {
        "c10d": c10d,
        "dist": dist,
        "c10d_logger": c10d_logger,
        "device_mesh": device_mesh,
        "DeviceMesh": device_mesh.DeviceMesh,
        "Work": torch._C._distributed_c10d.Work,
        "ProcessGroup": dist.ProcessGroup,
        "Variable": Variable,
        "wait_tensor": packet,
        "wait_tensor.default": packet.default,
        "_World": c10d._World,
        "_world": c10d._world,
    }
    found = {name: dict(vars(place)) for name, place in places.items()}
    found["sys"] = {"excepthook": sys.excepthook, "meta_path": list(sys.meta_path), "path": sys.meta_path}
    return found


def differences(before: dict[str, dict[str, Any]], after: dict[str, dict[str, Any]]) -> list[str]:
    found = []
    for place, attributes in before.items():
        now = after[place]
        for name in sorted(attributes.keys() | now.keys()):
            if name not in attributes or name not in now:
                found.append(f"{place}.{name} came or went")
            elif name == "meta_path":
                found += [f"{place}.{name}"] * (attributes[name] != now[name])
            elif attributes[name] is not now[name] and not _same_constant(attributes[name], now[name]):
                found.append(f"{place}.{name}")
    return found


def _same_constant(one: Any, two: Any) -> bool:
    return isinstance(one, (int, str, float)) and one == two
