"""Messages between two members, beside plain torch.distributed and a plain socket pair."""

from __future__ import annotations
