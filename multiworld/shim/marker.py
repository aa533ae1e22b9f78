"""Public name of `multiworld._c10d.marker`, the marker of a patched build, for the toolchain and programs."""

from __future__ import annotations

from multiworld._c10d.marker import (
    LIBRARY_PREFIX,
    MARKER_NAME,
    OVERLAY_LIBRARY,
    SCHEMA,
    LibraryInfo,
    Marker,
    Overlay,
    Topic,
    compare,
    find_torch,
    library_info,
    library_info_in,
    parse_marker,
    read_marker,
)

__all__ = [
    "LIBRARY_PREFIX", "MARKER_NAME", "OVERLAY_LIBRARY", "SCHEMA", "LibraryInfo", "Marker", "Overlay", "Topic",
    "compare", "find_torch", "library_info", "library_info_in", "parse_marker", "read_marker",
]  # fmt: skip
