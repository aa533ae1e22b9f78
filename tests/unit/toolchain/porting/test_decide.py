"""Whose series a version without one gets, which packages, and what shows its sources."""

from __future__ import annotations

from pathlib import Path

import pytest
from kits.fakewheel import target_of

from m8d_build.errors import PrerequisiteMissing, UnknownVersion
from m8d_build.porting.decide import (
    header_packages,
    nearest_series,
    needs_port,
    proof,
    recorded_packages,
    unlisted,
)
from m8d_build.settings import REPO_ROOT
from m8d_build.sources.base import SourceTree
from m8d_build.targets import Abi, Status, Targets, load_targets

COMMIT = "c" * 40


def verified(version: str, cuda: str = "12.4", **changes: object):
    fields = {
        "status": Status.VERIFIED,
        "topics": ("marker",),
        "abi": Abi(True, 0, "gnu++17", cuda),
        "pinned_packages": (f"nccl-of-{version}",),
        "build_packages": (f"nvcc=={version}",),
        **changes,
    }
    return target_of(version=version, **fields)


@pytest.mark.parametrize(
    ("version", "nearest"),
    [
        ("2.5.1", "2.6.0"),
        ("2.7.1", "2.6.0"),
        ("2.8.0", "2.9.1"),
        ("2.10.0", "2.9.1"),
        ("2.11.0", "2.12.1"),
        ("2.13.0", "2.12.1"),
        ("2.15.0", "2.12.1"),
        ("3.0.0", "2.12.1"),
        ("2.12.2", "2.12.1"),
    ],
)
def test_the_nearest_verified_series_is_taken(version, nearest):
    assert nearest_series(load_targets(REPO_ROOT / "patches"), version).version == nearest


def test_of_two_as_near_the_newer_is_taken_and_none_that_is_not_verified():
    older, newer = verified("2.6.0"), verified("2.8.0")
    between = verified("2.7.0", status=Status.APPLIES)
    assert nearest_series(Targets((older, between, newer)), "2.7.1") is newer
    with pytest.raises(UnknownVersion, match="no version has one"):
        nearest_series(Targets((between,)), "2.7.1")


def test_a_version_without_patches_is_ported_to():
    targets = load_targets(REPO_ROOT / "patches")
    assert needs_port(targets.get("2.13.0"))
    assert not needs_port(targets.get("2.12.1"))
    assert not needs_port(targets.get("2.4.0"))


def test_a_version_that_is_not_listed_has_its_tag():
    target = unlisted("v2.16.0+cu130")
    assert (target.version, target.tag, target.commit) == ("2.16.0", "v2.16.0", "")
    assert needs_port(target)


@pytest.mark.parametrize(
    "version", ["newest", "2.8.0rc1", "2.8.0.dev20250601", "2.8.0.post1", "2.8", "2.8.0.1"]
)
def test_what_is_no_version_of_a_release_is_refused(version):
    """The release of the same numbers is another version; 2.8 has no tag."""
    with pytest.raises(UnknownVersion, match=f"'{version}' is no version of a release"):
        unlisted(version)


def test_packages_are_those_of_the_nearest_version_with_the_same_cuda():
    targets = Targets((verified("2.6.0"), verified("2.9.1", "12.8"), verified("2.12.1", "12.8")))
    for version, cuda, other in (("2.7.1", "12.8", "2.9.1"), ("2.13.0", "12.4", "2.6.0")):
        found = header_packages(unlisted(version), targets, cuda)
        assert found == ((f"nccl-of-{other}",), (f"nvcc=={other}",))


def test_packages_that_a_version_names_itself_are_taken():
    own = target_of(version="2.13.0", status=Status.PLANNED, build_packages=("nvcc==13.2",))
    assert header_packages(own, Targets((verified("2.6.0"),)), "13.2") == ((), ("nvcc==13.2",))


def test_hashes_are_those_of_every_version_and_the_versions_own_go_first():
    targets = Targets(
        (
            verified("2.6.0", packages={"nccl==2": "a", "nvcc==1": "b"}),
            verified("2.9.1", packages={"json==3": "c"}),
        )
    )
    own = target_of(version="2.13.0", status=Status.PLANNED, packages={"nvcc==1": "d"})
    assert recorded_packages(own, targets) == {"nccl==2": "a", "nvcc==1": "d", "json==3": "c"}
    assert recorded_packages(unlisted("2.13.0"), targets)["nvcc==1"] == "b"


def test_a_cuda_that_no_version_has_is_told_with_those_that_are_known():
    targets = Targets((verified("2.6.0"), verified("2.9.1", "12.8"), unlisted("2.15.0")))
    with pytest.raises(PrerequisiteMissing, match=r"CUDA 13\.2\. .*CUDA 12\.4, 12\.8\. .*entry of 2\.15\.0"):
        header_packages(targets.get("2.15.0"), targets, "13.2")


def test_sources_are_shown_by_the_commit_or_by_the_distributions_archive_on_record():
    target = target_of(version="2.13.0", distro_version="2.13.0+dfsg-1")
    package = SourceTree(Path(), "distribution source package pytorch 2.13.0+dfsg-1", target)
    fetched = SourceTree(Path(), f"git https://example.org/pytorch at {COMMIT}", target)
    assert (fetched.commit, package.commit) == (COMMIT, "")
    assert COMMIT in proof(fetched, target, COMMIT, fetched.commit)
    assert proof(fetched, target, "d" * 40, fetched.commit) == ""
    assert proof(fetched, target, "", "") == ""
    assert "which targets.toml names" in proof(package, target, COMMIT, "")
    assert proof(package, unlisted("2.13.0"), COMMIT, "") == ""
    named = SourceTree(Path(), "folder /home/me/distribution source package pytorch 2.13.0+dfsg-1", target)
    assert proof(named, target, COMMIT, "") == ""
