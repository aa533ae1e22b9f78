"""The packages of torchft, in a folder of the cache that only its processes have on their path.

It runs on the torch that everything else here runs on, so that torchft's own requirement of torch is not
installed. The folder is moved into place when it is complete.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from m8d_build import proc
from m8d_build.errors import CommandFailed, WheelUnreachable
from m8d_build.files.disk import move_into_place, needs_room, remove_tree
from m8d_build.files.lock import hold

if TYPE_CHECKING:
    from pathlib import Path

    from m8d_build.settings import Settings

PEER = "torchft==0.2.0"
NEEDS = tuple(f"opentelemetry-{name}>=1.39.0" for name in ("api", "sdk", "exporter-otlp-proto-http"))
"""What torchft 0.2.0 requires beside torch."""
_ATTEMPTS = 3
_WAIT = 900.0  # seconds for another run to finish installing it
_INSTALL = 300.0  # seconds; 16 MB


def folder_of(settings: Settings) -> Path:
    """Where the packages are, or would be."""
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    return settings.cache / "envs" / f"torchft-{PEER.partition('==')[2]}-{tag}"


def packages(settings: Settings, *, log: Path) -> Path:
    """Return the folder for PYTHONPATH, installed if it is not there.

    Args:
        settings: where the cache is.
        log: where pip writes.

    Raises:
        WheelUnreachable: pip could not install it, or it cannot be imported with this torch.
        BuildError: see `hold` and `needs_room`.
    """
    final = folder_of(settings)
    root, part = final.parent, final.with_name(f".part-{final.name}")
    with hold(root / ".locks" / final.name, what=f"install {PEER}", wait=_WAIT):
        if not final.is_dir():
            try:
                with needs_room(root, f"installing {PEER}"):
                    _install(part, log)
                    move_into_place(part, final)
            finally:
                remove_tree(part)
    return final


def _install(into: Path, log: Path) -> None:
    pip: list[str | Path] = [
        sys.executable, "-I", "-m", "pip", "--disable-pip-version-check", "--no-input", "--retries", "5",
        "install", "--no-warn-script-location", "--progress-bar", "off", "--upgrade", "--target", into,
    ]  # fmt: skip
    use = "import sys; sys.path.insert(0, sys.argv[1]); import torchft.manager, torchft.process_group"
    failed = None
    for _ in range(_ATTEMPTS):
        remove_tree(into)
        try:
            for more in ([*NEEDS], ["--no-deps", PEER]):
                proc.run([*pip, *more], what=f"install {PEER}", log=log, timeout=_INSTALL)
            proc.run([sys.executable, "-I", "-W", "ignore", "-c", use, into], what=f"import {PEER}", log=log)
        except CommandFailed as exc:
            failed = exc
        else:
            return
    raise WheelUnreachable(
        f"{PEER} could not be installed and imported, in {_ATTEMPTS} attempts",
        next_step="Look at the log; check the network and pip's index settings, then run it again",
        log=log,
        tail=failed.tail if failed else "",
    ) from failed
