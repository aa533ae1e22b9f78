"""The local version label of a patched wheel: which of our builds of a version it is.

``targets.toml`` records a number for each version, and the digest of the patches it stands for. A wheel with
other patches (edited in a checkout, or of a version that has no number yet) carries their digest instead, so
that no two wheels with different patches have the same version. One whose patches were made for another
version says that they were ported. One that was made from what is not on record
(``--allow-unverified``, or a library that ``wheel`` was given) says so too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from m8d_build.targets import Target

__all__ = ["build_label", "local_label"]


def build_label(target: Target, digest: str) -> str:
    """Return our part of the label: "m8d2" for build 2, "m8d2.edited1a2b3c4d" where its patches were changed.

    It is "m8d0.new1a2b3c4d" where the version has no build number yet, and "m8d0.ported1a2b3c4d" where the
    patches were made for another version and carried to this one.

    Args:
        target: the torch version.
        digest: of the patches, as `Series.digest`.
    """
    if target.ported_from:
        return f"m8d{target.build}.ported{digest[:8]}"
    if not target.build:
        return f"m8d0.new{digest[:8]}"
    return f"m8d{target.build}" + ("" if digest == target.series else f".edited{digest[:8]}")


def local_label(official: str, target: Target, digest: str, *, verified: bool = True) -> str:
    """Return a patched wheel's local version label: "cu124" -> "cu124.m8d2".

    Args:
        official: the official wheel's label; may be empty.
        target: the torch version.
        digest: of the patches, as `Series.digest`.
        verified: whether all it is made from is on record; "cu124.m8d2.unverified" if not.
    """
    ours = build_label(target, digest) + ("" if verified else ".unverified")
    return f"{official}.{ours}" if official else ours
