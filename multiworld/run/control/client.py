"""One question to a launcher at its control socket. No slow module is imported."""

from __future__ import annotations

import json
import socket
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["LauncherSilentError", "question"]

_MOST_BYTES = 32 << 20


class LauncherSilentError(Exception):
    """A launcher did not answer; the string says how that was seen."""


def question(path: Path, message: dict[str, Any], timeout: float) -> object | None:
    """Send `message`; return the answer, from its JSON; None from a launcher that has ended.

    Args:
        path: of the socket.
        message: a hello of the control protocol.
        timeout: seconds, from connecting to the last byte.

    Raises:
        LauncherSilentError: it cannot be reached, or has not answered in time.
    """
    deadline = time.monotonic() + timeout
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
        try:
            _until(link, deadline)
            link.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError):
            return None
        except OSError as error:
            raise LauncherSilentError(f"cannot be reached: {error}") from error
        try:
            link.sendall(json.dumps(message).encode() + b"\n")
            line = _line(link, deadline)
        except (TimeoutError, BlockingIOError) as error:
            raise LauncherSilentError(f"no answer within {timeout:g} s: it is stopped, or hangs") from error
        except OSError as error:
            raise LauncherSilentError(f"no answer: {error}") from error
    if not line:
        return None  # it was about to end
    try:
        answer: object = json.loads(line)
    except ValueError:
        return ""
    return answer


def _line(link: socket.socket, deadline: float) -> bytes:
    told = bytearray()
    while b"\n" not in told and len(told) < _MOST_BYTES:
        _until(link, deadline)
        part = link.recv(1 << 20)
        if not part:
            break
        told += part
    return bytes(told.partition(b"\n")[0])


def _until(link: socket.socket, deadline: float) -> None:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    link.settimeout(left)
