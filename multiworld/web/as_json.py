"""JSON of what the page answers, whatever processes said."""

from __future__ import annotations

import json
import math
from functools import partial
from typing import Any

__all__ = ["as_json"]

_dumps = partial(json.dumps, separators=(",", ":"), allow_nan=False)


def as_json(data: Any) -> bytes:
    """Return it as JSON in ASCII: a script's path need not be UTF-8. A number that JSON has not is null."""
    try:
        return _dumps(data).encode()
    except ValueError:
        return _dumps(_finite(data)).encode()


def _finite(data: Any) -> Any:
    if isinstance(data, dict):
        return {key: _finite(each) for key, each in data.items()}
    if isinstance(data, list | tuple):
        return [_finite(each) for each in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data
