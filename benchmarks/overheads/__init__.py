"""What multiworld costs where nothing travels: entering a world, asking for a rank, importing, events."""

from __future__ import annotations
