"""Version and platform of a wheel, rewritten wherever they stand. Pure; every other byte stays."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

from packaging.version import InvalidVersion, Version

from m8d_build.errors import WheelInvalid
from m8d_build.wheel.versionfile import VERSION_ENTRY

if TYPE_CHECKING:
    from collections.abc import Iterable

    from m8d_build.wheel.wheelfile import WheelFile

__all__ = [
    "dist_info_name",
    "patched_version",
    "retag",
    "set_metadata_version",
    "set_module_version",
    "wheel_name",
]


def wheel_name(wheel: WheelFile, local: str, platform: str) -> str:
    """Return the patched wheel's file name."""
    python, abi = ".".join(wheel.python_tags), ".".join(wheel.abi_tags)
    build = f"{wheel.build}-" if wheel.build else ""
    return f"{wheel.name}-{patched_version(wheel, local)}-{build}{python}-{abi}-{platform}.whl"


def patched_version(wheel: WheelFile, local: str) -> str:
    """Return the version with our local label ("2.6.0+cu124.m8d2").

    Raises:
        ValueError: the label is none that PEP 440 allows in its normal form.
    """
    text = f"{wheel.version.public}+{local}"
    try:
        normal = str(Version(text))
    except InvalidVersion as exc:
        raise ValueError(f"{local!r} is no local version label (PEP 440)") from exc
    if normal != text:
        raise ValueError(f"the local label {local!r} must be written as in {normal!r}")
    return text


def dist_info_name(wheel: WheelFile, local: str) -> str:
    """Return the name of the patched wheel's dist-info folder."""
    return f"{wheel.name}-{patched_version(wheel, local)}.dist-info"


def set_metadata_version(metadata: bytes, version: str) -> bytes:
    """Return METADATA with another Version; every other byte stays.

    Raises:
        WheelInvalid: its header has not one Version.
    """
    end = re.search(rb"\r?\n\r?\n", metadata)
    cut = end.start() if end else len(metadata)
    changed, count = re.subn(rb"(?m)^Version:[^\r\n]*", f"Version: {version}".encode(), metadata[:cut])
    if count != 1:
        raise WheelInvalid(
            f"METADATA has {count or 'no'} Version lines",
            rule="every wheel's has one",
            next_step="Download the wheel again",
        )
    return changed + metadata[cut:]


def set_module_version(source: bytes, version: str) -> bytes:
    """Return torch/version.py with another ``__version__``; every other byte stays.

    Raises:
        WheelInvalid: it does not assign exactly one string to ``__version__``.
    """
    found = [
        node.value
        for node in ast.parse(source).body
        if isinstance(node, ast.Assign)
        and [getattr(target, "id", "") for target in node.targets] == ["__version__"]
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    ]
    if len(found) != 1 or found[0].end_lineno != found[0].lineno:
        raise WheelInvalid(
            f"{VERSION_ENTRY} assigns {len(found)} strings to __version__",
            rule="it must be one, on one line",
            next_step="Give an official wheel",
        )
    lines = source.splitlines(keepends=True)
    row = found[0].lineno - 1
    line = lines[row]
    lines[row] = line[: found[0].col_offset] + repr(version).encode() + line[found[0].end_col_offset :]
    return b"".join(lines)


def retag(wheel: bytes, tags: Iterable[str]) -> bytes:
    """Return WHEEL with other tags, one line each in sorted order where the first tag stood.

    Raises:
        WheelInvalid: it has no Tag line.
    """
    lines = wheel.splitlines(keepends=True)
    kept = [line for line in lines if not line.startswith(b"Tag:")]
    if len(kept) == len(lines):
        raise WheelInvalid(
            "WHEEL has no Tag", rule="every wheel's has one", next_step="Download the wheel again"
        )
    first = next(number for number, line in enumerate(lines) if line.startswith(b"Tag:"))
    ending = b"\r\n" if lines[first].endswith(b"\r\n") else b"\n"
    return (
        b"".join(kept[:first])
        + b"".join(b"Tag: %s%s" % (tag.encode(), ending) for tag in sorted(tags))
        + b"".join(kept[first:])
    )
