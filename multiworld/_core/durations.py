"""Durations as callers pass them: numbers of seconds or timedeltas."""

from __future__ import annotations

import datetime as dt
import math

__all__ = ["seconds"]


def seconds(value: object) -> float | None:
    """Return `value`, a number of seconds or a timedelta, in seconds; None where it is neither, or NaN.

    NaN is neither before nor after any deadline: what waits for one would wait for ever.
    """
    if isinstance(value, dt.timedelta):
        return value.total_seconds()
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        try:
            found = float(value)
        except OverflowError:
            return float("inf") if value > 0 else float("-inf")
        return None if math.isnan(found) else found
    return None
