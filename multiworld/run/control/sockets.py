"""Paths of the control sockets of this user's launchers, each in a folder of its own."""

from __future__ import annotations

import contextlib
import os
import pwd
import re
import secrets
import socket
import stat
import tempfile
import time
import zlib
from pathlib import Path

from multiworld import settings
from multiworld.run.errors import RunError
from multiworld.run.secure.key_folder import remove_abandoned

__all__ = ["SOCKET", "answers", "choose", "roots", "sockets", "sweep"]

SOCKET = "control.sock"
"""Name of the socket in a launcher's folder."""

LONGEST = 107
"""Bytes of a unix socket's path (sockaddr_un has 108, the last one is zero)."""

_LINGER = Path("/var/lib/systemd/linger")
"""Has a file for each user whose processes outlive their sessions, by systemd's design."""

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_YOUNG = 60.0
"""Seconds for which a folder without a socket may belong to a launcher that is starting, or ending."""
_ASKING = 1.0
"""Seconds that a connection may take; the kernel accepts it for a stopped launcher."""


def roots() -> list[Path]:
    """The folders that may hold launchers' folders, the best one first; they need not exist."""
    bases = [base for name in ("TMPDIR", "TEMP", "TMP") if (base := settings.environment(name))]
    bases.append("/tmp")  # noqa: S108  (in it a folder that `_safe` has checked)
    with contextlib.suppress(OSError):  # no file can be written, as on a full disk
        bases.append(tempfile.gettempdir())
    found = [Path(base).absolute() / f"m8d-run-{os.getuid()}" for base in bases]
    runtime = settings.environment("XDG_RUNTIME_DIR")
    if runtime and runtime.startswith("/"):
        found.insert(len(found) if _ends_at_logout(Path(runtime)) else 0, Path(runtime) / "m8d-run")
    return list(dict.fromkeys(found))


def choose(run_id: str) -> str:
    """Choose the path of this launcher's socket, not made yet; remove those of dead launchers.

    Args:
        run_id: the rendezvous id; it is cut, and characters that do not suit a file name are replaced.

    Raises:
        RunError: this user has no folder for sockets.
    """
    name = f"{re.sub(r'[^A-Za-z0-9_-]', '-', run_id)[:20] or 'run'}{_host()}{os.getpid()}"
    for root in roots():
        if not _own(root):
            continue
        sweep(root)
        folder = root / name
        if folder.exists():  # of another pid namespace that shares the folder
            folder = root / f"{name}-{secrets.token_hex(3)}"
        if len(os.fsencode(folder / SOCKET)) <= LONGEST:
            return str(folder / SOCKET)
    raise RunError(
        f"no folder for the control socket: tried {', '.join(map(str, roots()))}",
        rule=f"It is this user's alone, and the socket's path has at most {LONGEST} bytes",
        next_step="Set XDG_RUNTIME_DIR or TMPDIR to a folder with a short name that you own",
    )


def sockets() -> list[Path]:
    """The sockets of this user's launchers, dead ones perhaps among them."""
    found = [path for root in roots() if _safe(root) for path in root.glob(f"*/{SOCKET}")]
    return sorted(dict.fromkeys(found))


def sweep(root: Path) -> None:
    """Remove sockets, keys and folders of this host's dead launchers in `root`."""
    with contextlib.suppress(OSError):  # another launcher may be removing them as well
        for folder in list(root.glob(f"*{_host()}*")):
            path = folder / SOCKET
            if path.exists():
                dead = not answers(path)
            else:
                dead = folder.is_dir() and time.time() - folder.stat().st_mtime > _YOUNG
            if dead and remove_abandoned(folder):
                with contextlib.suppress(OSError):
                    path.unlink(missing_ok=True)
                    folder.rmdir()


def answers(path: Path) -> bool:
    """Whether a process listens at a socket."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(_ASKING)
        try:
            sock.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:  # a full queue, or no permission: it may be in use
            return True
    return True


def _host() -> str:
    """The part of a folder's name that tells this host's launchers from those of hosts that share the root.

    A socket of another host's launcher cannot be connected to here, as that of a dead one.
    """
    try:
        return f"-{_BOOT.read_text()[:8]}-"
    except OSError:
        return f"-{zlib.crc32(socket.gethostname().encode()):08x}-"


def _ends_at_logout(runtime: Path) -> bool:
    """Whether logind removes a folder with this user's last session, which a launcher may outlive (nohup)."""
    if runtime != Path(f"/run/user/{os.getuid()}"):
        return False
    try:
        return not (_LINGER / pwd.getpwuid(os.getuid()).pw_name).exists()
    except (KeyError, OSError):
        return True


def _own(root: Path) -> bool:
    """Make `root`, if need be; return whether it is a folder of this user, and private."""
    with contextlib.suppress(OSError):  # it exists, or cannot be made: `_safe` tells
        root.mkdir(mode=0o700)
    return _safe(root) and os.access(root, os.W_OK)


def _safe(root: Path) -> bool:
    try:
        seen = root.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(seen.st_mode) and seen.st_uid == os.getuid() and not seen.st_mode & 0o077
