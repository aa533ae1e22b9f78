"""Fan-in: a leader that receives from many, each in a world of its own, beside one group of them all."""

from __future__ import annotations
