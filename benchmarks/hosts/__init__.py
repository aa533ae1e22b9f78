"""Messages and small sums between two hosts, which are network namespaces here."""

from __future__ import annotations
