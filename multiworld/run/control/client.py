"""One question to a launcher at its control socket. No slow module is imported."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from typing import TYPE_CHECKING, Any

from multiworld._net import peer_user

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

__all__ = ["LauncherSilentError", "look", "own_snapshot", "question", "snapshots"]

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
    lines = _exchange(path, message, timeout, lambda _: True)
    if not lines:
        return None  # it was about to end
    try:
        answer: object = json.loads(lines[0])
    except ValueError:
        return ""
    return answer


def own_snapshot(path: Path, timeout: float, after: int | None = None) -> dict[str, Any] | None:
    """Return a launcher's snapshot; None if it has ended.

    Args:
        path: of the socket.
        timeout: seconds, from connecting to the last byte.
        after: number of an event: the later ones are in it; None: the last ones.

    Raises:
        LauncherSilentError: it cannot be reached, has not answered in time, or with something else.
    """
    named = {} if after is None else {"after": after}
    answer = question(path, {"hello": "status", **named}, timeout)
    return None if answer is None else _snapshot_in(answer)


def snapshots(path: Path, timeout: float) -> list[dict[str, Any]] | None:
    """Return the snapshots of a run's launchers, that of this one first; None if it has ended.

    Args:
        path: of the socket.
        timeout: seconds, from connecting to the last byte.

    Raises:
        LauncherSilentError: as `own_snapshot`.
    """

    def last(line: bytes) -> bool:
        return not line.startswith(b'{"node":')

    lines = _exchange(path, {"hello": "status", "nodes": True}, timeout, last)
    if not lines:
        return None
    try:
        own, *others = (json.loads(line) for line in (lines[-1], *lines[:-1]))
    except ValueError:
        own, others = None, []
    return [_snapshot_in(own), *(each["node"] for each in others if isinstance(each.get("node"), dict))]


def _snapshot_in(answer: object) -> dict[str, Any]:
    found = answer.get("snapshot") if isinstance(answer, dict) else None
    if isinstance(found, dict):
        return found
    said = answer.get("error") if isinstance(answer, dict) else None
    raise LauncherSilentError(str(said or "its answer is no snapshot: another version of multiworld?"))


def look(
    path: Path,
    worlds: dict[str, list[str]],
    timeout: float,
    members: dict[str, list[str]] | None = None,
) -> list[dict[str, Any]] | None:
    """Ask a launcher how its workers' worlds stand; return the answers of those that gave one in time.

    Args:
        path: of the socket.
        worlds: rank of a worker, as text -> names of the worlds whose members it asks what they wait for.
        timeout: seconds, from connecting to the last byte.
        members: the same -> names of the worlds whose members it tells; None: all tell all.

    Returns:
        Dictionaries with ``rank`` (of the worker in the run), ``attempt``, ``status`` and ``waits`` (see
        `multiworld.status`); None from a launcher that has ended.

    Raises:
        LauncherSilentError: it cannot be reached, or has not answered in time.
    """
    hello = {"hello": "look", "worlds": worlds, "members": members}
    lines = _exchange(path, hello, timeout, lambda line: line.startswith(b'{"over":'))
    if not lines:
        return None
    found = []
    for line in lines:
        with contextlib.suppress(ValueError):
            said = json.loads(line)
            if isinstance(said, dict) and isinstance(said.get("status"), dict):
                found.append(said)
    return found


def _exchange(
    path: Path, message: dict[str, Any], timeout: float, last: Callable[[bytes], bool]
) -> list[bytes]:
    """Send `message`; return the lines of the answer, up to the `last`; none where the launcher has ended."""
    deadline = time.monotonic() + timeout
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
        try:
            _until(link, deadline)
            link.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError):
            return []
        except OSError as error:
            raise LauncherSilentError(f"cannot be reached: {error}") from error
        if (why := peer_user.refusal(link)) is not None:
            raise LauncherSilentError(f"is not spoken with: {why}")
        try:
            link.sendall(json.dumps(message).encode() + b"\n")
            return _lines(link, deadline, last)
        except (TimeoutError, BlockingIOError) as error:
            raise LauncherSilentError(f"no answer within {timeout:g} s: it is stopped, or hangs") from error
        except OSError as error:
            raise LauncherSilentError(f"no answer: {error}") from error


def _lines(link: socket.socket, deadline: float, last: Callable[[bytes], bool]) -> list[bytes]:
    found: list[bytes] = []
    rest, size = b"", 0
    while size < _MOST_BYTES:
        _until(link, deadline)
        part = link.recv(1 << 20)
        if not part:
            break
        size += len(part)
        *whole, rest = (rest + part).split(b"\n")
        found += whole
        if any(last(line) for line in whole):
            return found
    return [*found, rest] if rest else found


def _until(link: socket.socket, deadline: float) -> None:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    link.settimeout(left)
