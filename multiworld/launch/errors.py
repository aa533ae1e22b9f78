"""Errors of a script that starts its own processes.

MultiworldError
└── LaunchError
    ├── ConfigError              a value of the configuration breaks a rule (a ValueError too)
    └── ProcessFailedError       a process failed; the others were ended
        ├── ProcessRaisedError   its function raised an exception: type, message and traceback are here
        └── ProcessExitedError   it ended by a signal, or with an exit code of its own
"""

from __future__ import annotations

import signal

from multiworld.errors import MultiworldError

__all__ = ["ConfigError", "LaunchError", "ProcessExitedError", "ProcessFailedError", "ProcessRaisedError"]


class LaunchError(MultiworldError):
    """Processes could not be started, or one of them failed."""


class ConfigError(LaunchError, ValueError):
    """A value of the configuration breaks a rule."""


class ProcessFailedError(LaunchError):
    """A process failed first; the others were ended.

    Args:
        rank: of the process.
        local_rank: same.
        pid: same.
        exit_code: negative: the number of the signal that ended it.
        value, rule, next_step: as for `MultiworldError`.
        also: what the others say that had failed by then too, one line each.
    """

    def __init__(
        self,
        rank: int,
        local_rank: int,
        pid: int,
        exit_code: int,
        *,
        value: str,
        rule: str = "",
        next_step: str = "",
        also: tuple[str, ...] = (),
    ) -> None:
        self.rank = rank
        self.local_rank = local_rank
        self.pid = pid
        self.exit_code = exit_code
        self.also = also
        super().__init__(value, rule=rule, next_step=next_step)

    def __str__(self) -> str:
        return "\n".join([super().__str__(), *(f"Failed too: {line}" for line in self.also)])


class ProcessRaisedError(ProcessFailedError):
    """The function raised an exception in one of the processes.

    Args:
        rank, local_rank, pid, exit_code, also: as for `ProcessFailedError`.
        type_name: of the exception, with its module ("builtins" left out).
        message: its text.
        traceback: in full, as Python prints it; chained exceptions included.
    """

    def __init__(
        self,
        rank: int,
        local_rank: int,
        pid: int,
        exit_code: int,
        *,
        type_name: str,
        message: str,
        traceback: str,
        also: tuple[str, ...] = (),
    ) -> None:
        self.type_name = type_name
        self.message = message
        self.traceback = traceback
        first = message.splitlines()[0] if message else "no message"
        super().__init__(
            rank, local_rank, pid, exit_code, value=f"Rank {rank} raised {type_name}: {first}", also=also
        )

    def __str__(self) -> str:
        return f"{super().__str__()}\n\nIn rank {self.rank} (pid {self.pid}):\n{self.traceback.rstrip()}"


class ProcessExitedError(ProcessFailedError):
    """A process ended by a signal, or with an exit code other than 0, without an exception.

    Args:
        rank, local_rank, pid, exit_code, also: as for `ProcessFailedError`.
        began: whether it had reached the function.
    """

    def __init__(
        self,
        rank: int,
        local_rank: int,
        pid: int,
        exit_code: int,
        *,
        began: bool,
        also: tuple[str, ...] = (),
    ) -> None:
        self.began = began
        self.signal_name = signal_name(exit_code)
        how = f"by {self.signal_name}" if self.signal_name else f"with exit code {exit_code}"
        super().__init__(
            rank,
            local_rank,
            pid,
            exit_code,
            value=f"Rank {rank} (pid {pid}) ended {how}"
            + ("" if began else " before it reached the function"),
            rule="A process ends by returning from its function",
            next_step="Look at what it printed last"
            if began
            else "Look at what it printed; a script that starts processes does so below "
            'if __name__ == "__main__":',
            also=also,
        )


def signal_name(exit_code: int) -> str:
    """Name the signal behind an exit code ("SIGKILL" for -9); "" where there is none."""
    if exit_code >= 0:
        return ""
    try:
        return signal.Signals(-exit_code).name
    except ValueError:
        return f"signal {-exit_code}"
