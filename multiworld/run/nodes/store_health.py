"""Silence of the rendezvous store: whether it answers, since when it does not, its next poll. Pure."""

from __future__ import annotations

__all__ = ["StoreHealth"]


class StoreHealth:
    """See the module; times are ``time.monotonic()`` seconds.

    Attributes:
        answers: whether the last call was answered.
        gone: whether it is lost for good: torch's TCPStore clients do not connect a second time.
        next_poll: when it is polled again.
    """

    def __init__(self) -> None:
        self.answers = True
        self.gone = False
        self.next_poll = 0.0
        self._silent_since: float | None = None

    def due(self, now: float) -> bool:
        """Whether it is to be polled."""
        return now >= self.next_poll and not self.gone

    def silent(self, now: float, *, gone: bool) -> bool:
        """A call was not answered, or it is `gone`; return whether that is news."""
        news = self._silent_since is None or (gone and not self.gone)
        self.answers = False
        self.gone = self.gone or gone
        if self._silent_since is None:
            self._silent_since = now
        return news

    def answered(self, now: float) -> float | None:
        """A call was answered; return for how many seconds none was before, None where none was missed."""
        self.answers = True
        since, self._silent_since = self._silent_since, None
        return None if since is None else now - since
