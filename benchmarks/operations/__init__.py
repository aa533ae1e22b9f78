"""Operations timed beside plain torch.distributed in the same processes: what several parts share."""

from __future__ import annotations
