"""Log files of each attempt of each worker, from torch's ``LogsSpecs``.

torch asks its ``LogsSpecs`` once for all workers of a node, again after a restart of the group, and each time
empties the folder of that attempt. Workers that restart alone share the run's folder: it is asked for once,
and a later attempt of one worker gets the same files in ``attempt_<k>/`` beside those of the first.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest, LogsSpecs

if TYPE_CHECKING:
    from typing import TextIO

    from torch.distributed.elastic.multiprocessing import PContext

__all__ = ["AskedForLogs", "AskingLogs", "LoneLogs", "RunLogs", "log_files", "remove_empty"]

_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"


class AskedForLogs(Exception):
    """Torch has made the workers' environments and asks for their log files.

    Attributes:
        envs: of all workers of this node, by local rank.
    """

    def __init__(self, envs: dict[int, dict[str, str]]) -> None:
        self.envs = envs
        super().__init__()


class AskingLogs(LogsSpecs):
    """Raises `AskedForLogs`, so that torch's own agent makes the environments and starts nothing."""

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Raise `AskedForLogs`."""
        raise AskedForLogs(envs)

    @property
    def root_log_dir(self) -> str:
        """Return /dev/null: nothing is written."""
        return os.devnull


class LoneLogs(LogsSpecs):
    """The logs of one process, which is number 0 in its context.

    Args:
        dest: with this one's entry in each mapping.
    """

    def __init__(self, dest: LogsDest) -> None:
        super().__init__()
        self._dest = dest

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Return them, and set the path of the worker's error file in its environment."""
        error_file = self._dest.error_files[0]
        envs[0][_ERROR_FILE] = "" if error_file == os.devnull else error_file
        return self._dest

    @property
    def root_log_dir(self) -> str:
        """Return "": the folder is not known here."""
        return ""


class RunLogs:
    """The logs of all workers of this node.

    Args:
        specs: from the options --log-dir, --redirects, --tee, --local-ranks-filter, --logs-specs.
        filters: of --duplicate-stdout-filters and --duplicate-stderr-filters.
        most: workers that this node can have, in a later slot perhaps.
    """

    def __init__(self, specs: LogsSpecs, filters: tuple[list[str], list[str]], most: int = 0) -> None:
        self._specs = specs
        self._most = most
        self._dest: LogsDest | None = None
        self._starts: dict[int, int] = {}
        self.filters = filters
        self.filtered: tuple[TextIO | None, TextIO | None] = (None, None)

    def prepare(self, envs: dict[int, dict[str, str]]) -> None:
        """Make the run's folder, the first time; needs the environments of all workers of this node."""
        if self._dest is not None:
            return
        # Asking again for a larger slot would empty the folder.
        ranks = range(max(len(envs), self._most))
        self._dest = self._specs.reify({rank: dict(envs.get(rank, envs[0])) for rank in ranks})
        paths = (getattr(self._dest, f"filtered_{name}", "") for name in ("stdout", "stderr"))
        self.filtered = tuple(  # type: ignore[assignment]
            _append(path) if wanted and path else None
            for wanted, path in zip(self.filters, paths, strict=True)
        )

    def next_start(self, local_rank: int) -> LogsDest:
        """Return the files of this local rank's next process: in ``attempt_0``, then ``attempt_1``, ..."""
        dest = self._dest
        if dest is None:
            raise AssertionError("prepare() comes first")
        start = self._starts[local_rank] = self._starts.get(local_rank, -1) + 1

        def lone(paths: dict[int, str], key: int = 0) -> dict[int, str]:
            return {key: _of_attempt(paths[local_rank], start)} if local_rank in paths else {}

        return LogsDest(
            stdouts=lone(dest.stdouts),
            stderrs=lone(dest.stderrs),
            # The prefix of shown lines has this number.
            tee_stdouts=lone(dest.tee_stdouts, local_rank),
            tee_stderrs=lone(dest.tee_stderrs, local_rank),
            error_files=lone(dest.error_files),
        )

    def close(self) -> None:
        """Close the files of filtered lines."""
        for stream in self.filtered:
            if stream is not None:
                stream.close()


def log_files(dest: LogsDest | PContext, key: int = 0) -> tuple[str, str]:
    """Return the paths of a process's standard output and error; "" where a file does not have it.

    Args:
        dest: has them, by local rank.
        key: the process's local rank in it.
    """
    files = (dest.stdouts.get(key, ""), dest.stderrs.get(key, ""))
    out, err = ("" if path in {"", os.devnull} else str(Path(path).absolute()) for path in files)
    return out, err


def _append(path: str) -> TextIO | None:
    # Not with "w": all processes of the run append to this file, one after the other.
    return None if path.startswith(os.devnull) else Path(path).open("a", errors="replace", buffering=1)


def _of_attempt(path: str, attempt: int) -> str:
    """Return the path of the same file for another attempt; its folder is made."""
    if not path or path == os.devnull or attempt == 0:
        return path
    parts = list(Path(path).parts)
    first = "attempt_0"
    if first in parts:
        at = len(parts) - 1 - parts[::-1].index(first)
        parts[at] = f"attempt_{attempt}"
    else:  # a layout of the user's own
        parts.insert(len(parts) - 1, f"attempt_{attempt}")
    made = Path(*parts)
    made.parent.mkdir(parents=True, exist_ok=True)
    return str(made)


def remove_empty(specs: LogsSpecs | None) -> None:
    """Remove the folders without a file that torch made for a run whose user named none.

    torch makes a temporary folder for each run, with one for each worker in it, also where no log is
    redirected. None: the user named a folder, which stays as it is.
    """
    # Not of a subclass (--logs-specs), whose folder may be one that runs share.
    if type(specs) is not DefaultLogsSpecs or not Path(specs.root_log_dir).is_absolute():
        return
    for folder, _, _ in os.walk(specs.root_log_dir, topdown=False):
        with suppress(OSError):  # it has files, or is gone
            Path(folder).rmdir()
