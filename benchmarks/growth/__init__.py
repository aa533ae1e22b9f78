"""Growth: what advances cost, and how long members are held while others come, leave, or are replaced."""

from __future__ import annotations
