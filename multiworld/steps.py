"""Operations of several steps: what fails in one member once the first step is taken breaks the world.

The other members have the first step, and wait for the next one. Left out here, that would be a later
operation's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from multiworld.errors import MultiworldError
from multiworld.events import State

if TYPE_CHECKING:
    from multiworld._generation.generation import Generation

__all__ = ["Steps"]


class Steps:
    """A block that takes the steps of one operation.

    An error of this member alone that ends the block after the first step breaks the world, cause ``failed``,
    and is raised as the world's error. That may wait for a verdict.

    Args:
        gen: the generation.
        name: of the operation.
        begun: see there.

    Attributes:
        begun: whether the first step is taken.
    """

    def __init__(self, gen: Generation, name: str, *, begun: bool = False) -> None:
        self._gen, self._name, self.begun = gen, name, begun

    def __enter__(self) -> Steps:  # noqa: PYI034  (typing.Self is not in Python 3.10)
        return self

    def __exit__(self, _type: object, error: BaseException | None, _traceback: object) -> None:
        own = isinstance(error, Exception) and not isinstance(error, MultiworldError)
        if own and self.begun and self._gen.state is State.ACTIVE:  # else it is the error of its end
            raise self.cut(error) from error

    def cut(self, error: BaseException | None) -> Exception:
        """Break the world, if it is not over, as the steps ended with `error`; return what it raises then."""
        if self._gen.state is not State.ACTIVE:
            return self._gen.error()
        detail = f"{self._name} failed with {type(error).__name__}: {error}"
        return self._gen.fail(detail, (self._gen.rank,))
