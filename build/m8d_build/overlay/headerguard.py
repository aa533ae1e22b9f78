"""Guards that newer wheels put around headers: stripped to compare, added again to replace.

PyTorch's setup.py (2.12's, not yet 2.9's) wraps each installed header, so that none is included where only
the stable ABI may be used. The text between is the source's, byte for byte.
"""

from __future__ import annotations

__all__ = ["guarded_like", "unguarded"]

_OPEN = b"#if !defined(TORCH_STABLE_ONLY) && !defined(TORCH_TARGET_VERSION)\n"
_CLOSE = (
    b"\n#else\n"
    b'#error "This file should not be included when either TORCH_STABLE_ONLY or TORCH_TARGET_VERSION is '
    b'defined."\n'
    b"#endif  // !defined(TORCH_STABLE_ONLY) && !defined(TORCH_TARGET_VERSION)\n"
)


def unguarded(header: bytes) -> bytes:
    """Return a wheel's header as its source is; one without the guard, or with half of one, as it stands."""
    if len(header) < len(_OPEN) + len(_CLOSE) or not (header.startswith(_OPEN) and header.endswith(_CLOSE)):
        return header
    return header[len(_OPEN) : -len(_CLOSE)]


def guarded_like(official: bytes, header: bytes) -> bytes:
    """Return a source's header as the wheel would hold it.

    Args:
        official: the wheel's own header of that name.
        header: what takes its place.
    """
    return header if unguarded(official) == official else _OPEN + header + _CLOSE
