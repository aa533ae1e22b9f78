"""Builds for the matrix where none were named: official wheels, and the patched wheels that were built here."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from bed.errors import BedError
from packaging.version import Version

from m8d_build.check.subject import read_subject
from m8d_build.environments.venvs import Environment, Environments
from m8d_build.errors import BuildError
from m8d_build.testing.environment import environment

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from m8d_build.check.subject import Subject
    from m8d_build.progress import Reporter
    from m8d_build.settings import Settings

__all__ = ["STOCK", "found", "newest"]

STOCK = ("2.6.0", "2.14.1", "2.15.0")
"""The official builds of the page."""


@contextmanager
def found(
    settings: Settings, report: Reporter, *, versions: Iterable[str] = STOCK
) -> Iterator[dict[str, Path]]:
    """Hold environments with the official wheels, and with the newest patched wheel of each version in out/.

    The official ones are those in the cache, made if they are not there (6 GB each); a patched one leans on the
    official one of its version, and is removed at the end.

    Args:
        settings: where the cache and the wheels are.
        report: told of downloads.
        versions: of torch.

    Yields:
        The interpreters: "stock-2.6.0", "patched-2.6.0", ...

    Raises:
        BedError: one cannot be had.
    """
    subjects = newest(read_subject(path) for path in sorted(settings.out.glob("torch-*.m8d*.whl")))
    log = settings.out / "logs" / "matrix.log"
    with ExitStack() as stack:
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            held = {
                version: stack.enter_context(environment(version, None, settings, report, log=log, added=[]))
                for version in dict.fromkeys((*versions, *subjects))
            }
            pythons = {f"stock-{version}": each.python for version, each in held.items()}
            for version, subject in subjects.items():
                made = _patched(stack, settings, subject, held[version], log)
                pythons[f"patched-{version}"] = made.python
        except (BuildError, OSError) as exc:
            raise BedError(
                str(exc), rule="the matrix runs on builds of torch", next_step="Name them: --bed NAME=PYTHON"
            ) from exc
        yield pythons


def newest(subjects: Iterable[Subject]) -> dict[str, Subject]:
    """Return the newest wheel of each torch version: by its file's time, as that is what was built last."""
    chosen: dict[str, Subject] = {}
    for subject in sorted(subjects, key=lambda each: each.wheel.path.stat().st_mtime):
        chosen[subject.marker.torch] = subject
    return dict(sorted(chosen.items(), key=lambda pair: Version(pair[0])))


def _patched(
    stack: ExitStack, settings: Settings, subject: Subject, base: Environment, log: Path
) -> Environment:
    environments = Environments(settings.cache / "envs")
    return stack.enter_context(environments.fresh(subject.recipe, base=base, log=log))
