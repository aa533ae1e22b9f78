"""What a program is called with, in a rank's process."""

from __future__ import annotations

import functools
import importlib
import os
import sys
import threading
import time
import traceback
from collections import deque
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from bed.control import Bed
from bed.errors import BedError

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from bed.lines import Wire

__all__ = ["Rank", "load_program", "plain", "run_program"]

STORE_TIMEOUT = 60.0  # seconds
_LONG = 600.0  # seconds; a test that fails kills its ranks
_TEXT = 6000  # characters of an exception's text in an event


class Rank:
    """A rank of a test: its number, its configuration, and its link to the test.

    Attributes:
        rank: its number.
        world_size: how many there are.
        config: what the test gave to ``Launcher.start``.
        bed: the double's controls; None where there is none (a real GPU, gloo).
        store_ports: where the test's store servers listen.
    """

    def __init__(
        self, wire: Wire, rank: int, world_size: int, config: dict[str, Any], stores: list[int]
    ) -> None:
        self._wire = wire
        self.store_ports = stores
        self._told: deque[dict[str, Any]] = deque()
        self._hearing = threading.Lock()
        self.rank = rank
        self.world_size = world_size
        self.config = config
        try:
            self.bed: Bed | None = Bed.here()
        except BedError:
            self.bed = None

    @functools.cached_property
    def device(self) -> torch.device:
        """The device of this rank: a GPU (several ranks may share one), or the CPU where there is none."""
        import torch

        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        return torch.device("cuda", self.rank % count) if count else torch.device("cpu")

    def event(self, name: str, **fields: Any) -> None:
        """Tell the test that something happened, now."""
        self._wire.send({"event": name, "at": time.monotonic(), "fields": plain(fields)})

    def hear(self, name: str, timeout: float = 60.0) -> dict[str, Any]:
        """Return the fields of what the test tells under a name; what it tells under others is kept.

        Raises:
            TimeoutError: it did not within so many seconds.
        """
        deadline = time.monotonic() + timeout
        with self._hearing:
            while True:
                for index, message in enumerate(self._told):
                    if message["tell"] == name:
                        del self._told[index]
                        return message["fields"]
                left = deadline - time.monotonic()
                if left <= 0 or self._wire.ended:
                    raise TimeoutError(f"the test did not tell {name!r} within {timeout:g} s")
                self._told += self._wire.receive(left)

    def store(self, index: int = 0, timeout: float = STORE_TIMEOUT) -> Any:
        """Return a new client of a store server of this test; servers live in a process of their own.

        Raises:
            BedError: the test asked for fewer servers (``config={"stores": n}``).
        """
        import torch.distributed as dist

        if index >= len(self.store_ports):
            raise BedError(
                f"store {index} was asked for",
                rule=f"the test has {len(self.store_ports)}",
                next_step='Set "stores" in the configuration',
            )
        return dist.TCPStore(
            "127.0.0.1", self.store_ports[index], None, is_master=False, timeout=timedelta(seconds=timeout)
        )

    @functools.cached_property
    def meeting_point(self) -> Any:
        """One client of the first store server, for as long as this rank lives.

        Up to torch 2.6 making a store while another thread is in torch can end the process (pytorch #143598): ask for
        it before there is one.
        """
        return self.store()

    def init(self, backend: str, *, eager: bool = False, **more: Any) -> None:
        """Make the default group on `store()` and set the device.

        Args:
            backend: of the group.
            eager: name the device to torch, which then makes the communicator at once.
            more: further arguments of ``init_process_group``; ``timeout`` may be a number of seconds.
        """
        import torch
        import torch.distributed as dist

        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        if eager:
            more.setdefault("device_id", self.device)
        if isinstance(more.get("timeout"), (int, float)):
            more["timeout"] = timedelta(seconds=more["timeout"])
        dist.init_process_group(
            backend, store=self.store(), rank=self.rank, world_size=self.world_size, **more
        )

    def attempt(self, name: str, function: Callable[[], Any], **fields: Any) -> Any:
        """Run something and tell how it went.

        The event has ``ok``, ``ms``, and ``result``, or ``error`` (the exception's type), ``bases`` (its classes)
        and ``text``.

        Returns:
            What the function returned; None if it raised.
        """
        began = time.monotonic()
        try:
            result = function()
        except Exception as exc:  # noqa: BLE001 -- whatever it is, is the observation
            took = (time.monotonic() - began) * 1000
            bases = [base.__name__ for base in type(exc).__mro__]
            said = {"error": type(exc).__name__, "bases": bases, "text": str(exc)[:_TEXT]}
            self.event(name, ok=False, ms=took, **said, **fields)
            return None
        took = (time.monotonic() - began) * 1000
        self.event(name, ok=True, ms=took, result=result, **fields)
        return result


def plain(value: Any) -> Any:
    """Return a value as JSON has it: tensors as lists, sets and tuples too, and what else there is as its repr."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if value == value and abs(value) != float("inf") else repr(value)  # noqa: PLR0124 -- NaN
    if isinstance(value, dict):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(each) for each in value]
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return plain(value.tolist())
    return repr(value)


def load_program(name: str) -> Callable[[Rank], None]:
    """Return the function of ``module:function``; a module without a dot is one of ``programs``.

    Raises:
        BedError: there is none.
    """
    module, _, function = name.partition(":")
    path = module if "." in module else f"programs.{module}"
    try:
        return getattr(importlib.import_module(path), function)
    except (ModuleNotFoundError, AttributeError) as exc:
        raise BedError(
            f"{name} is no program ({exc})",
            rule="a program is module:function, the module in tests/testbed/programs or with its whole path",
            next_step="Correct the name",
        ) from exc


def run_program(name: str, rank: Rank) -> None:
    """Run a program to its end: the event ``failed`` and exit code 1 if it raises, otherwise ``ended``.

    The interpreter then ends as it always does, destructors and all; ``config={"exit": "hard"}`` leaves that out.
    With ``config={"together": True}`` a rank that is through says so (``through``) and ends when the test tells it to
    (``end``): whoever ends earlier is a dead peer to the others.
    """
    code: int | str | None = 0
    try:
        rank.event("started", pid=os.getpid())
        load_program(name)(rank)
        if rank.config.get("together"):
            rank.event("through")
            rank.hear("end", timeout=_LONG)
        rank.event("ended")
    except SystemExit as exc:
        code = exc.code
    except BaseException as exc:  # noqa: BLE001 -- told, and the rank ends with it
        traceback.print_exc()
        rank.event("failed", error=type(exc).__name__, text=str(exc)[:_TEXT], trace=traceback.format_exc())
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    if rank.config.get("exit") == "hard":
        os._exit(code if isinstance(code, int) else int(code is not None))
    sys.exit(code)
