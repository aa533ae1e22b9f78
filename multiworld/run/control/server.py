"""Control-socket server: workers' worlds, reports of their states, snapshots for ``m8d-run status``."""

from __future__ import annotations

import contextlib
import itertools
import queue
import selectors
import socket
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from multiworld._net import peer_user
from multiworld._net.launcher_connection import ProtocolError, encode
from multiworld.logs.source import logger
from multiworld.run.control.connection import MOST_LOOKED, Client
from multiworld.run.control.looks import Look
from multiworld.run.control.planned_worlds import planned_worlds
from multiworld.run.control.reports import event_of, whole
from multiworld.run.errors import RunError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from multiworld.run.events import EventBus
    from multiworld.run.worldsfile.worlds_plan import WorldsPlan

    Answer = Callable[[dict[str, Any]], None]

__all__ = ["VARIABLE", "ControlServer"]

VARIABLE = "M8D_CONTROL"
"""Environment variable with the socket's path, for workers."""

_BLOCK = 1 << 16
_LONGEST = 32 << 20
"""Bytes of a snapshot, the line of a client that asks for it. One of 256 worlds of 32 workers has 1 MiB."""
_LOOK_EVERY = 0.5
"""Seconds between two checks of the store's address, while there are workers."""
_LOOKING = 1.5
"""Seconds that workers have to say how their worlds stand."""
_IDLE = 10.0
_FULL = 0.5
"""Seconds without accepting, after the process had no descriptor left."""
_CLOSING = 2.0
_HELLO = 10.0
"""Seconds that a client has to send its hello."""
_MOST_SILENT = 64
"""Clients without a hello; the oldest is cut off for one more."""

_log = logger(__name__)


class ControlServer:
    """Serves the control socket from one daemon thread.

    Args:
        path: of the socket; its folder is made, and removed in the end, unless it is there already.
        plan: of the worlds file; None without one.
        bus: gets the workers' reports, as `WorldChanged`.
        snapshot: returns a dictionary for JSON, the answer to ``status``; may get ``after``, the number
            of an event. Quick; called in the server's thread.
        store: returns the present address of the store that planned worlds meet at; "" if there is none yet.
            Quick.
        others: asks the other nodes' launchers for their snapshots, within so many seconds; in a thread
            of its own.
        command: gets the requests of ``m8d-run scale`` and ``retire``, each with a function for the answer
            and one that says whether it is waited for, which any thread may call. Quick. None: this run does
            not change.

    Attributes:
        path: as given.
    """

    def __init__(
        self,
        path: str,
        plan: WorldsPlan | None,
        bus: EventBus,
        snapshot: Callable[..., dict[str, Any]],
        *,
        store: Callable[[], str],
        command: Callable[[dict[str, Any], Answer, Callable[[], bool]], None] | None = None,
        others: Callable[[float], list[dict[str, Any]]] = lambda _: [],
    ) -> None:
        self.path = path
        self._plan = plan
        self._bus = bus
        self._snapshot = snapshot
        self._store = store
        self._command = command
        self._others = others
        self._answers: queue.SimpleQueue[tuple[Client, dict[str, Any]]] = queue.SimpleQueue()
        self._looks: dict[int, tuple[Client, Look]] = {}
        self._numbers = itertools.count(1)
        self._retiring: frozenset[int] = frozenset()
        self._known = ""
        self._paused_until = 0.0
        self._clients: set[Client] = set()
        self._attempts: dict[int, int] = {}
        self._reporters: dict[int, Client] = {}
        self._listener: socket.socket | None = None
        self._made_folder = False
        self._closing = False
        self._thread = threading.Thread(target=self._run, daemon=True, name="m8d-control-server")

    def env(self) -> dict[str, str]:
        """Environment variables for workers."""
        return {VARIABLE: self.path}

    def start(self) -> None:
        """Listen.

        Raises:
            RunError: it cannot be served there.
        """
        path = Path(self.path)
        fresh = path.with_name("new.sock")
        self._selector = selectors.DefaultSelector()
        self._awake, self._wake = socket.socketpair()
        listener = socket.socket(socket.AF_UNIX)
        try:
            with contextlib.suppress(FileExistsError):
                path.parent.mkdir(mode=0o700)
                self._made_folder = True
            # Under another name first: a client that finds the socket can connect.
            listener.bind(str(fresh))
            fresh.chmod(0o600)
            listener.listen(1024)
            listener.setblocking(False)
            fresh.rename(path)
        except OSError as exc:
            listener.close()
            self._release()
            self._remove(fresh)
            raise RunError(
                f"control socket {self.path}: {exc.strerror or exc}",
                rule="It is made in a folder that this user can write, under a path of at most 107 bytes",
                next_step="Set XDG_RUNTIME_DIR or TMPDIR to such a folder",
            ) from exc
        self._listener = listener
        self._awake.setblocking(False)
        self._wake.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(self._awake, selectors.EVENT_READ)
        self._thread.start()

    def close(self) -> None:
        """Close all connections and remove the socket; takes 2 s at most. Harmless when repeated."""
        self._closing = True
        if self._listener is None:
            return
        self._rouse()
        if threading.current_thread() is not self._thread:
            self._thread.join(_CLOSING)
        self._remove(Path(self.path))

    def retire(self, ranks: Iterable[int]) -> None:
        """Tell the workers of these ranks that they retire; those told before and not named are new ones."""
        self._retiring = frozenset(ranks)
        self._rouse()

    def _rouse(self) -> None:
        with contextlib.suppress(OSError):  # it is awake, or has ended
            self._wake.send(b".")

    def _remove(self, path: Path) -> None:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
        if self._made_folder:
            with contextlib.suppress(OSError):  # it has a file that is not this server's
                path.parent.rmdir()

    # -- the thread

    def _run(self) -> None:
        try:
            while not self._closing:
                self._turn()
        finally:
            for client in tuple(self._clients):
                self._cut(client, "")
            if self._listener is not None:
                self._listener.close()
            self._release()

    def _release(self) -> None:
        self._selector.close()
        self._awake.close()
        self._wake.close()

    def _turn(self) -> None:
        workers = any(client.rank is not None for client in self._clients)
        silent = self._silent()
        pause = _LOOK_EVERY if workers or silent or self._paused_until else _IDLE
        for number, (client, look) in tuple(self._looks.items()):
            left = look.deadline - time.monotonic()
            pause = min(pause, max(0.0, left))
            if left <= 0 or client not in self._clients:
                self._looked(number)
        for key, ready in self._selector.select(pause):
            if key.fileobj is self._listener:
                self._accept()
            elif key.fileobj is self._awake:
                self._awake.recv(_BLOCK)
            elif isinstance(key.data, Client) and key.data in self._clients:
                self._serve(key.data, ready)
        if self._paused_until and time.monotonic() > self._paused_until and self._listener is not None:
            self._paused_until = time.monotonic() + _FULL
            with contextlib.suppress(OSError):  # as at `_accept`: once more
                self._selector.register(self._listener, selectors.EVENT_READ)
                self._paused_until = 0.0
        while not self._answers.empty():
            self._send(*self._answers.get_nowait())
        for client in tuple(self._clients):
            retires = client.rank in self._retiring
            if retires and not client.retires:
                self._send(client, {"retire": True})
            client.retires = retires
        for client in silent:
            if client in self._clients and not client.said and time.monotonic() > client.since + _HELLO:
                self._cut(client, f"it said nothing in {_HELLO:g} s")
        address = self._address() if workers else ""
        for client in tuple(self._clients) if workers else ():
            if client.rank is not None and client.told != address:
                client.told = address
                self._send(client, {"store": address})

    def _silent(self) -> list[Client]:
        """Clients without a hello, the oldest first."""
        return sorted((each for each in self._clients if not each.said), key=lambda each: each.since)

    def _accept(self) -> None:
        assert self._listener is not None  # noqa: S101  (it is what became readable)
        try:
            sock, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as exc:  # no descriptor is left
            self._pause(exc)
            return
        if (why := peer_user.refusal(sock)) is not None:
            _log.warning("control socket: a client was turned away: %s", why)
            sock.close()
            return
        sock.setblocking(False)
        silent = self._silent()
        if len(silent) >= _MOST_SILENT:
            self._cut(silent[0], f"{len(silent)} clients say nothing")
        client = Client(sock)
        try:
            self._selector.register(sock, selectors.EVENT_READ, client)
        except OSError as exc:  # the kernel has no memory left for it, or the user's limit is reached
            sock.close()
            self._pause(exc)
            return
        self._clients.add(client)

    def _pause(self, why: OSError) -> None:
        """Accept waiting clients later."""
        assert self._listener is not None  # noqa: S101  (it is what became readable)
        _log.warning("control socket: %s", why)
        self._selector.unregister(self._listener)
        self._paused_until = time.monotonic() + _FULL

    def _serve(self, client: Client, ready: int) -> None:
        try:
            if ready & selectors.EVENT_WRITE:
                self._flush(client)
            if ready & selectors.EVENT_READ:
                octets = client.sock.recv(_BLOCK)
                if not octets:
                    self._cut(client, "")
                    return
                for message in client.lines.feed(octets):
                    self._hear(client, message)
        except (BlockingIOError, InterruptedError):
            return
        except ConnectionError:  # its process has ended, with lines unread as a rule
            self._cut(client, "")
        except (OSError, ProtocolError) as exc:
            self._cut(client, str(exc))
        except Exception as exc:  # noqa: BLE001  (one client must not end the server for all)
            _log.exception("control socket: what %s said could not be handled", client)
            self._cut(client, f"{type(exc).__name__}: {exc}")

    def _send(self, client: Client, message: dict[str, Any]) -> None:
        if client not in self._clients:
            return
        try:
            line = encode(message, client.longest)
        except (ProtocolError, ValueError, TypeError) as exc:
            _log.exception("control socket: an answer could not be sent")
            line = encode({"error": str(exc)[:1000], **({"id": message["id"]} if "id" in message else {})})
        client.out += line
        if len(client.out) > client.most:
            self._cut(client, f"it did not read {len(client.out)} bytes")
            return
        try:
            self._flush(client)
        except ConnectionError:  # the client has ended, with lines unread
            self._cut(client, "")
        except OSError as exc:
            self._cut(client, str(exc))

    def _flush(self, client: Client) -> None:
        with contextlib.suppress(BlockingIOError):
            while client.out:
                del client.out[: client.sock.send(client.out[:_BLOCK])]
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if client.out else 0)
        self._selector.modify(client.sock, wanted, client)

    def _cut(self, client: Client, why: str) -> None:
        self._clients.discard(client)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(client.sock)
        client.sock.close()
        if client.rank is not None and self._reporters.get(client.rank) is client:
            del self._reporters[client.rank]
            # It was a program of the worker's that connected first, perhaps: the worker itself reports then.
            others = [each for each in self._clients if each.rank == client.rank]
            if others:
                self._reporters[client.rank] = max(others, key=lambda each: (each.attempt, -each.since))
        if why and not self._closing:
            _log.warning("control socket: %s was cut off: %s", client, why)

    # -- messages

    def _hear(self, client: Client, message: dict[str, Any]) -> None:
        if message.get("hello") == "worker":
            rank, attempt = message.get("rank"), message.get("attempt", 0)
            if rank is None or not whole(rank) or not whole(attempt):
                raise ProtocolError(f"hello of rank {rank!r}, attempt {attempt!r}")
            client.said = True
            client.rank, client.attempt = int(rank), int(attempt)
            known = self._reporters.get(client.rank)
            if known is None or known not in self._clients or known.attempt < client.attempt:
                self._reporters[client.rank] = client  # not a child of the worker that has its environment
            self._attempts[client.rank] = max(client.attempt, self._attempts.get(client.rank, 0))
            self._send(client, self._worlds(client, client.rank))
        elif message.get("hello") == "status":
            client.said = True
            client.most, client.longest = MOST_LOOKED, _LONGEST
            if message.get("nodes") is True:
                self._ask_nodes(client)
            else:
                self._send(client, self._status(message.get("after")))
        elif message.get("hello") == "look":
            client.said = True
            client.most = MOST_LOOKED
            self._look(client, message.get("worlds"), message.get("members"))
        elif message.get("hello") == "command":
            client.said = True
            self._obey(client, message.get("command"))
        elif client.rank is None:
            raise ProtocolError("it did not say hello")
        elif message.get("ask") == "worlds":
            self._send(client, {**self._worlds(client, client.rank), "id": message.get("id")})
        elif "look" in message:
            self._seen(client, client.rank, message)
        elif "world" in message:
            self._reported(client, client.rank, message)

    def _obey(self, client: Client, said: object) -> None:
        if not isinstance(said, dict):
            raise ProtocolError(f"command {str(said)[:200]!r}")
        if self._command is None:
            self._send(client, {"error": "this run restarts as a group: its workers stay the same"})
            return

        def answer(message: dict[str, Any]) -> None:
            self._answers.put((client, message))
            self._rouse()

        self._command(said, answer, client.waits)

    def _look(self, client: Client, worlds: object, members: object) -> None:
        """Ask all workers how their worlds stand, and hand each answer on as it comes."""
        wanted = worlds if isinstance(worlds, dict) else {}
        named = members if isinstance(members, dict) else None
        number = next(self._numbers)
        workers = {rank: each for rank, each in self._reporters.items() if each in self._clients}
        self._looks[number] = client, Look(frozenset(workers), time.monotonic() + _LOOKING)
        for rank, each in workers.items():
            question = {"look": number, "worlds": wanted.get(str(rank), [])}
            self._send(each, question if named is None else {**question, "members": named.get(str(rank), [])})
        if not workers:
            self._looked(number)

    def _seen(self, client: Client, rank: int, message: dict[str, Any]) -> None:
        asker, look = self._looks.get(message["look"] if whole(message["look"]) else 0, (None, None))
        if asker is None or look is None or not look.answered(rank):
            return  # it comes too late, or twice
        said = {key: message.get(key) for key in ("status", "waits")}
        self._send(asker, {"rank": rank, "attempt": client.attempt, **said})
        if look.complete:
            self._looked(message["look"])

    def _looked(self, number: int) -> None:
        asker, look = self._looks.pop(number)
        self._send(asker, {"over": True, "silent": look.silent})

    def _reported(self, client: Client, rank: int, message: dict[str, Any]) -> None:
        event = event_of(message, rank, time.time())
        # Else it is a late report of a process that was replaced, or of another one beside the worker.
        if client.attempt >= self._attempts.get(rank, 0) and self._reporters.get(rank) is client:
            self._bus.publish(event)

    def _ask_nodes(self, client: Client) -> None:
        """Send the other nodes' snapshots, one a line, and then this one's."""

        def ask() -> None:
            try:
                for found in self._others(_LOOKING):
                    self._answers.put((client, {"node": found}))
            except Exception:  # noqa: BLE001  (told without them)
                _log.exception("control socket: the other nodes could not be asked")
            self._answers.put((client, self._status()))
            self._rouse()

        try:
            threading.Thread(target=ask, name="m8d-control-nodes", daemon=True).start()
        except RuntimeError:  # the process gets none: told without them
            self._answers.put((client, self._status()))
            self._rouse()

    def _status(self, after: object = None) -> dict[str, Any]:
        more = {"after": after} if isinstance(after, int) else {}
        try:
            return {"snapshot": self._snapshot(**more)}
        except Exception as exc:  # noqa: BLE001  (a faulty snapshot must not end the server)
            _log.exception("control socket: no snapshot could be made")
            return {"error": f"no snapshot: {exc}"}

    def _worlds(self, client: Client, rank: int) -> dict[str, Any]:
        """Return the worlds of one worker, with the store's present address."""
        client.told = self._address()
        return planned_worlds(self._plan, rank, client.told)

    def _address(self) -> str:
        try:
            self._known = self._store()
        except Exception:  # noqa: BLE001  (a faulty store must not end the server)
            _log.exception("control socket: the store's address is not known")
        return self._known
