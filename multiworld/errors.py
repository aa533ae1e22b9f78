"""Exceptions of multiworld.

    MultiworldError
    ├── MarkerError                 a patched build's marker cannot be read, or its two halves disagree
    ├── ProvenanceError             a patched wheel is not as its statement or signature says, or has none
    ├── WorldError                  something about one world; ``.world`` names it
    │   ├── BrokenWorldException    a member is gone or failed: this generation of the world is over
    │   ├── WorldClosedError        this process closed the world; nothing can be done in it
    │   ├── UnknownWorldError       no world of that name in this process (a KeyError too)
    │   ├── WrongDeviceError        a tensor lies where the world's backend cannot reach it (a ValueError too)
    │   ├── SizeMismatchError       a message does not fit the tensor it was received into (a ValueError too)
    │   ├── CollectiveMismatchError members called different collectives (a ValueError too); with M8D_CHECK=1
    │   ├── UnencryptedError        an operation needs connections without TLS, in secure mode
    │   ├── StateTransferError      a member's state did not come whole: damaged, or the other end gave up
    │   └── JoinError               the world could not be joined; nothing half-made is left
    │       ├── InvalidJoinError        an argument breaks a rule (a ValueError too)
    │       ├── RankTakenError          two processes claim the same rank
    │       ├── MismatchError           members disagree about the world (size, backend, ...)
    │       ├── JoinTimeoutError        not everyone came before the timeout (a TimeoutError too)
    │       ├── StoreUnreachableError   the store does not answer (a ConnectionError too)
    │       ├── StoreBindError          rank 0 cannot serve the store at that address (an OSError too)
    │       ├── BackendError            torch has no such backend here, or it could not be built
    │       ├── StaleGenerationError    this process holds a generation that is over
    │       └── JoinAbandonedError      cancelled; another member gave up; no thread or descriptor left
    ├── StateError                  a state has what cannot be sent to another member (a ValueError too)
    ├── ShimError                   what multiworld changes in torch could not be put in place, or was refused
    │   ├── RouterError             this torch brings something the router does not know
    │   ├── PatchRequiredError      M8D_REQUIRE_PATCH=1, and this build of torch is not patched
    │   └── InstallError            m8d-post-setup could not install, check or remove
    └── BuildError                  (in m8d_build.errors) one subclass per way the toolchain can fail

An error carries its parts as fields and builds its message from them: the value, the rule it broke, the next
step.
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "BackendError",
    "BrokenWorldException",
    "CollectiveMismatchError",
    "InstallError",
    "InvalidJoinError",
    "JoinAbandonedError",
    "JoinError",
    "JoinTimeoutError",
    "MarkerError",
    "MismatchError",
    "MultiworldError",
    "PatchRequiredError",
    "ProvenanceError",
    "RankTakenError",
    "RouterError",
    "ShimError",
    "SizeMismatchError",
    "StaleGenerationError",
    "StateError",
    "StateTransferError",
    "StoreBindError",
    "StoreUnreachableError",
    "UnencryptedError",
    "UnknownWorldError",
    "WorldClosedError",
    "WorldError",
    "WrongDeviceError",
]


class MultiworldError(Exception):
    """Base of all errors of this project.

    Args:
        value: the offending value, as the reader can find it.
        rule: the rule that it breaks.
        next_step: how to fix it.
    """

    def __init__(self, value: str, *, rule: str = "", next_step: str = "") -> None:
        self.value = value
        self.rule = rule
        self.next_step = next_step
        super().__init__(value, rule, next_step)

    def __str__(self) -> str:
        parts = [self.value, self.rule, self.next_step]
        return " ".join(part.rstrip(".") + "." for part in parts if part)

    def __reduce__(self) -> tuple[Any, ...]:
        # Keyword-only parts: without this an error could not cross a process boundary.
        return _rebuild, (type(self), dict(self.__dict__), self.args)


def _rebuild(cls: type[MultiworldError], fields: dict[str, Any], args: tuple[Any, ...]) -> MultiworldError:
    error = cls.__new__(cls)
    error.args = args
    error.__dict__.update(fields)
    return error


class MarkerError(MultiworldError):
    """A torch build's multiworld marker is unreadable, or torch/m8d.json and the library disagree."""


class ProvenanceError(MultiworldError):
    """A patched wheel is not as its statement or its signature says, or has none."""


class WorldError(MultiworldError):
    """Something about one world.

    Args:
        world: its name.
        value, rule, next_step: as for `MultiworldError`.
    """

    def __init__(self, world: str, value: str, *, rule: str = "", next_step: str = "") -> None:
        self.world = world
        super().__init__(value, rule=rule, next_step=next_step)


class BrokenWorldException(WorldError):
    """A generation of a world is over: each pending and each later operation raises this.

    The string is ``"<world> broken: <detail>"``, as pymultiworld's is.

    Args:
        world: its name.
        detail: the observation, in one sentence.
        generation: number of the broken generation; 0 where unknown.
        cause: "crashed", "hung", "unreachable", "left" or "failed" (`multiworld.Cause`); "failed" by default.
        ranks: of the members that are the cause, ascending; empty where unknown.
    """

    def __init__(
        self,
        world: str,
        detail: str = "",
        *,
        generation: int = 0,
        cause: str = "failed",
        ranks: tuple[int, ...] = (),
    ) -> None:
        self.detail = detail
        self.generation = generation
        self.cause = cause
        self.ranks = tuple(ranks)
        super().__init__(world, detail)

    def __str__(self) -> str:
        return f"{self.world} broken: {self.detail}"

    def __repr__(self) -> str:
        return (
            f"BrokenWorldException({self.world!r}, {self.detail!r}, generation={self.generation}, "
            f"cause={self.cause!r}, ranks={self.ranks})"
        )


class WorldClosedError(WorldError):
    """This process closed the world."""


class UnknownWorldError(WorldError, KeyError):
    """No world of that name in this process."""

    __str__ = MultiworldError.__str__


class WrongDeviceError(WorldError, ValueError):
    """A tensor lies on a device that the world's backend cannot reach."""


class SizeMismatchError(WorldError, ValueError):
    """A message does not fit the tensor that it was received into.

    Raised where it is received; the tensor is as it was, the message is gone, and the world goes on.

    Args:
        world: its name.
        value, rule, next_step: as for `MultiworldError`.
        sent: bytes of the message.
        expected: bytes of the tensor.
        sender: rank of the sender, in the world.
    """

    def __init__(
        self,
        world: str,
        value: str,
        *,
        rule: str = "",
        next_step: str = "",
        sent: int = 0,
        expected: int = 0,
        sender: int = -1,
    ) -> None:
        self.sent = sent
        self.expected = expected
        self.sender = sender
        super().__init__(world, value, rule=rule, next_step=next_step)


class CollectiveMismatchError(WorldError, ValueError):
    """The members of a group have called different collectives, or one with different sizes; see M8D_CHECK.

    Raised on all of them before the collective begins: no tensor has changed, and the world goes on.

    Args:
        world: its name.
        value, rule, next_step: as for `MultiworldError`.
        calls: what each member has called, by its rank in the group.
    """

    def __init__(
        self,
        world: str,
        value: str,
        *,
        rule: str = "",
        next_step: str = "",
        calls: tuple[str, ...] = (),
    ) -> None:
        self.calls = calls
        super().__init__(world, value, rule=rule, next_step=next_step)


class UnencryptedError(WorldError):
    """In secure mode an operation needs connections without TLS: gloo's, or NCCL's (docs/security.md)."""


class StateTransferError(WorldError):
    """A member's state did not come whole: it came damaged, or the other end gave up, or broke a rule.

    Nothing half-loaded is returned; tensors that were to be received in place may have changed.
    """


class JoinError(WorldError):
    """The world could not be joined; nothing half-made is left in this process."""


class InvalidJoinError(JoinError, ValueError):
    """An argument of the join breaks a rule."""


class RankTakenError(JoinError):
    """Two processes claim the same rank of the world."""


class MismatchError(JoinError):
    """Members disagree about the world: its size, its backend, its kind of device."""


class JoinTimeoutError(JoinError, TimeoutError):
    """Not everyone joined before the timeout.

    Attributes:
        missing: ranks of members that had agreed to the generation and did not connect; () where members did
            not come at all.
    """

    missing: tuple[int, ...] = ()


class StoreUnreachableError(JoinError, ConnectionError):
    """The store does not answer."""


class StoreBindError(JoinError, OSError):
    """Rank 0 cannot serve the store at the address it was given."""

    __str__ = MultiworldError.__str__


class BackendError(JoinError):
    """Torch has no such backend here, or the process group could not be built."""


class StaleGenerationError(JoinError):
    """This process holds a generation of the world that is over."""


class JoinAbandonedError(JoinError):
    """The join was cancelled, another member gave up, or the host has no thread or descriptor left.

    Attributes:
        lost: ranks of members that had agreed to the generation, and crashed, hung or could not be reached
            while the members connected.
    """

    lost: tuple[int, ...] = ()


class StateError(MultiworldError, ValueError):
    """A state has what cannot be sent to another member; the message says where."""


class ShimError(MultiworldError):
    """What multiworld changes in torch could not be put in place, or was refused."""


class RouterError(ShimError):
    """This version of torch brings something in its distributed state that the router does not know."""


class PatchRequiredError(ShimError):
    """M8D_REQUIRE_PATCH=1, and this build of torch carries no patches."""


class InstallError(ShimError):
    """m8d-post-setup could not install, check or remove."""
