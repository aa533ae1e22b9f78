"""For a test of this folder's code on the test bed: programs that do not find the double, as on hardware.

``hardware.disguise:faults__peer_lost`` is ``faults:peer_lost`` with no `Rank.bed`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bed.rank import load_program

if TYPE_CHECKING:
    from collections.abc import Callable

    from bed.rank import Rank


def __getattr__(name: str) -> Callable[[Rank], None]:
    module, separator, function = name.rpartition("__")
    if not separator or not module:
        raise AttributeError(name)
    program = load_program(f"{module}:{function}")

    def disguised(me: Rank) -> None:
        me.bed = None
        program(me)

    return disguised
