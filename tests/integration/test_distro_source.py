"""The distribution's source package, fetched for real where there is an apt-get and a mirror that answers."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from m8d_build.errors import SourceUnreachable
from m8d_build.settings import REPO_ROOT, Settings
from m8d_build.sources import SPARSE, fetch_source
from m8d_build.sources.identity import differences
from m8d_build.targets import load_targets

pytestmark = pytest.mark.skipif(shutil.which("apt-get") is None, reason="there is no apt-get")

# What apt says when it cannot reach a mirror, or the mirror is not Debian's. Anything else is our fault.
ELSEWHERE = re.compile(
    r"Could not resolve|Could not connect|Unable to connect|Cannot initiate|Connection (failed|timed|refused)|"
    r"Temporary failure|timed out|in time|within \d+ s|no time left|does not have a Release file|no site configured|"
    r"Network is unreachable|50[0-9] |429 |403 ",
    re.IGNORECASE,
)
SYSTEM = (Path("/var/lib/apt/lists"), Path("/var/cache/apt"), Path("/etc/apt"))


def system_state():
    return {
        str(path): path.stat().st_mtime_ns
        for folder in SYSTEM
        if folder.exists()
        for path in [folder, *folder.iterdir()]
    }


@pytest.fixture(scope="module")
def fetched(tmp_path_factory):
    base = tmp_path_factory.mktemp("distro")
    settings = Settings.load(
        cache=base / "cache folder", out=base / "out", patches=REPO_ROOT / "patches", environ={}
    )
    target = load_targets(settings.patches).get("2.6.0")
    before = system_state()
    tree = once(target, settings)
    if isinstance(tree, SourceUnreachable):
        tree = once(target, settings)
    if isinstance(tree, SourceUnreachable):
        pytest.skip(f"no mirror has it: {tree}")
    return tree, target, before, system_state()


def once(target, settings):
    try:
        return fetch_source(target, settings, source="distro")
    except SourceUnreachable as exc:
        if ELSEWHERE.search(str(exc)):
            return exc
        raise


def test_the_sources_are_the_targets_own(fetched):
    tree, target, _, _ = fetched
    assert tree.origin == f"distribution source package pytorch {target.distro_version}"
    assert tree.verified
    assert differences(tree.root, target) == ()
    assert (tree.root / "version.txt").read_text(encoding="utf-8").startswith(target.version)


def test_only_the_needed_folders_are_unpacked(fetched):
    root = fetched[0].root
    assert {p.name for p in root.iterdir() if p.is_dir()} == {folder.split("/")[0] for folder in SPARSE}
    assert {p.name for p in (root / "torch").iterdir()} == {"csrc", "distributed"}
    assert len(list((root / "torch/csrc").rglob("*.cpp"))) > 500


def test_the_systems_apt_is_not_touched(fetched):
    _, _, before, after = fetched
    assert after == before


def test_nothing_but_the_tree_is_left(fetched):
    folder = fetched[0].root.parents[1]
    assert sorted(p.name for p in folder.iterdir()) == [".m8d.lock", "distro"]
    assert sorted(p.name for p in (folder / "distro").iterdir()) == ["origin.json", "tree"]
