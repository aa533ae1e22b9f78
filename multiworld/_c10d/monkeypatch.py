"""Temporary replacement of attributes of modules, types and objects, undone exactly."""

from __future__ import annotations

from typing import Any

__all__ = ["Patches"]

_ABSENT = object()
_BESIDE = ("__defaults__", "cell_contents")


class Patches:
    """What was replaced, in order, so that it can be undone. Not thread-safe: the caller holds a lock."""

    def __init__(self) -> None:
        self._done: list[tuple[Any, str, Any]] = []
        self._inserted: list[tuple[list[Any], Any]] = []

    def set(self, owner: Any, name: str, value: Any) -> Any:
        """Set ``owner.name`` to `value`; return what stood in `owner` itself (not in a base), or None.

        Args:
            owner: a module, a type, a closure's cell, or an object with a ``__dict__``.
            name: of the attribute.
            value: its new value.
        """
        # From the owner's own dictionary: getattr() would bind a method, or find a base class's. A function's
        # defaults, and the content of a closure's cell, are in no dictionary.
        before = getattr(owner, name) if name in _BESIDE else vars(owner).get(name, _ABSENT)
        setattr(owner, name, value)
        self._done.append((owner, name, before))
        return None if before is _ABSENT else before

    def insert(self, places: list[Any], value: Any) -> None:
        """Put `value` first into a list; `undo` takes it out, and leaves what others have put there."""
        places.insert(0, value)
        self._inserted.append((places, value))

    def undo(self) -> None:
        """Put everything back, last first. Idempotent."""
        while self._done:
            owner, name, before = self._done.pop()
            if before is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, before)
        while self._inserted:
            places, value = self._inserted.pop()
            if value in places:  # else another has taken it out
                places.remove(value)
