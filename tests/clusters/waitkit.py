"""Waiting for what a cluster of a test comes to."""

from __future__ import annotations

import time

SOON = 60.0
"""Seconds in which a cluster does what it is asked, on a machine that may be busy."""


class Waits:
    """What has a `report` of itself, and can be waited for."""

    def wait(self, condition, what, timeout=SOON):
        """Wait until a condition holds; return its value."""
        deadline = time.monotonic() + timeout
        while not (value := condition()):
            assert time.monotonic() < deadline, f"not within {timeout} s: {what}\n{self.report()}"
            time.sleep(0.1)
        return value
