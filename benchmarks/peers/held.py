"""The two environments for a run of a part, with what it says when they cannot be had."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from benchmarks.measuring.part import Run, Unavailable
from benchmarks.peers.environments import PEER, TORCH, Pair, pair, ready
from m8d_build.errors import BuildError
from m8d_build.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from m8d_build.progress import Reporter


class _Told:
    """The toolchain's steps and notes, as a run's progress."""

    def __init__(self, run: Run) -> None:
        self._run = run

    @contextlib.contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Show it."""
        self._run.progress(name)
        yield

    def note(self, text: str) -> None:
        """Show it."""
        self._run.progress(text)


@contextlib.contextmanager
def held_pair(run: Run, given: Path | None) -> Iterator[Pair]:
    """Hold both environments.

    Args:
        run: of the part.
        given: a Python with pymultiworld's torch to lean on; None for one in the cache.

    Raises:
        Unavailable: they are not there and this run is not to make them, or they cannot be made.
    """
    settings = Settings.load()
    if given is None and not (run.full or run.alone or ready(settings)):
        raise Unavailable(
            f"The environments with torch {TORCH} and pymultiworld are made with --full, or alone (5 GB, "
            "once)"
        )
    log = settings.out / "bench-peers.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    report: Reporter = _Told(run)
    run.progress(f"environments with torch {TORCH} and {PEER}")
    with contextlib.ExitStack() as stack:
        try:
            held = stack.enter_context(pair(settings, report, log=log, given=given))
        except BuildError as error:
            raise Unavailable(f"{PEER} cannot be had here: {error}") from error
        yield held
