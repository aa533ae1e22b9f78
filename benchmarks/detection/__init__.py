"""Detection: time from the signal that ends or stops a member to the exception elsewhere."""

from __future__ import annotations
