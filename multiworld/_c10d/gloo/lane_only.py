"""Groups of a world in secure mode: without gloo's connections, which have no TLS.

The lane carries what it can of such a group. The backend that stands in gloo's place has no sockets and
refuses every collective: torch's FakeProcessGroup with `error_on_collective` (pytorch #162841, in 2.12 at the
latest).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed

from multiworld.errors import UnencryptedError

if TYPE_CHECKING:
    import datetime as dt

    from multiworld._c10d.monkeypatch import Patches

__all__ = ["available", "install", "is_refusal", "is_stand_in", "refusal", "stand_in", "unavailable"]

_Fake: Any = getattr(torch._C._distributed_c10d, "FakeProcessGroup", None)
_Options: Any = getattr(_Fake, "Options", None)
_WORDS = "error_on_collective"
"""In the text of each of its errors; and the option's name."""


_SEQUENCE = "_set_sequence_number_for_group"


def install(patches: Patches) -> None:
    """Let torch make groups of stand-ins: it numbers the operations of each gloo group, and they have none.

    Args:
        patches: the router's, which undoes it.
    """
    if _Fake is None:
        return
    original = getattr(_Fake, _SEQUENCE)

    def set_sequence_number_for_group(backend: object) -> None:
        if not is_stand_in(backend):
            original(backend)

    patches.set(_Fake, _SEQUENCE, set_sequence_number_for_group)


def stand_in(world: str, rank: int, size: int, timeout: dt.timedelta) -> object:
    """Return a backend that refuses all collectives.

    Args:
        world: name.
        rank: of this process in the group.
        size: of the group.
        timeout: that the group's operations have.

    Raises:
        UnencryptedError: this torch has none.
    """
    if not available():
        raise unavailable(world)
    options = _Options()
    options.error_on_collective = True
    options._timeout = timeout
    return _Fake._create_internal(rank, size, options)


def available() -> bool:
    """Whether this torch has a backend that refuses all collectives."""
    return _Options is not None and hasattr(_Options, _WORDS)


def unavailable(world: str) -> UnencryptedError:
    """Return what is raised where it has none."""
    return refusal(
        world, f"torch {torch.__version__} makes no groups but gloo's, for functions of torch.distributed"
    )


def is_stand_in(backend: object) -> bool:
    """Whether a backend came from `stand_in`."""
    if _Fake is None or type(backend) is not _Fake:
        return False
    return bool(getattr(getattr(backend, "options", None), _WORDS, False))  # torch 2.4's has no options


def is_refusal(error: BaseException) -> bool:
    """Whether a backend of `stand_in` raised this."""
    return isinstance(error, RuntimeError) and (_WORDS in str(error) or "Backend fake does not" in str(error))


def refusal(world: str, what: str) -> UnencryptedError:
    """Return what an operation raises that the lane does not carry."""
    return UnencryptedError(
        world,
        f"world {world!r} is secure (M8D_TLS_CERT), and {what}",
        rule="gloo and NCCL connect without TLS; the world's own connection carries the messages and "
        "collectives of docs/collectives.md",
        next_step="Call one of these, or allow it where the network is trusted: M8D_TLS_PLAIN=gloo",
    )
