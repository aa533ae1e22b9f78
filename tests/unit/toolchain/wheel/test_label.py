"""The label of a patched wheel tells its patches apart."""

import pytest
from kits.fakewheel import target_of
from packaging.version import Version

from m8d_build.wheel.label import build_label, local_label

DIGEST = "0123456789ab"


@pytest.mark.parametrize(
    ("build", "series", "label"),
    [
        (2, DIGEST, "m8d2"),
        (2, "f" * 12, "m8d2.edited01234567"),
        (0, "", "m8d0.new01234567"),
        (0, "", "m8d0.ported01234567"),
    ],
    ids=["its own", "edited", "no number", "another version's"],
)
def test_a_number_stands_for_its_patches_only(build, series, label):
    target = target_of(build=build, series=series, ported_from="2.5.1" if "ported" in label else "")
    assert build_label(target, DIGEST) == label
    for official in ("cu124", ""):
        version = f"2.6.0+{local_label(official, target, DIGEST)}"
        assert version == f"2.6.0+{official}{'.' * bool(official)}{label}"
        assert str(Version(version)) == version, "it must be in its normal form"
        assert local_label("cu124", target, DIGEST, verified=False) == f"cu124.{label}.unverified"
