"""A line's fields as ``key=value`` text or as JSON. Pure."""

from __future__ import annotations

import json
import re
from datetime import datetime, timezone
from typing import Any

__all__ = ["as_json", "as_text", "local_time"]

_BARE = re.compile(r"(?!-$)[^\s\"=\\]+")


def as_json(fields: dict[str, Any]) -> str:
    """Return a line's fields as a JSON object of one line."""
    return json.dumps(fields)


def as_text(fields: dict[str, Any]) -> str:
    """Return a line's fields as text: time, program, then ``key=value`` in the fields' order."""
    rest = (f"{key}={_value(value)}" for key, value in fields.items() if key not in {"time", "program"})
    return " ".join((fields["time"], fields["program"], *rest))


def _value(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, list):
        value = ",".join(str(each) for each in value)
    text = f"{value:g}" if isinstance(value, float) else str(value)
    if isinstance(value, int) or (_BARE.fullmatch(text) and text.isprintable()):
        return text
    quoted = json.dumps(text, ensure_ascii=False)
    # Characters that do not print, some of which end a line for some readers, are escaped as in JSON.
    return "".join(each if each.isprintable() else json.dumps(each)[1:-1] for each in quoted)


def local_time(at: float) -> str:
    """Return ``time.time()`` seconds as local time in ISO 8601, to the millisecond."""
    return datetime.fromtimestamp(at, timezone.utc).astimezone().isoformat(timespec="milliseconds")
