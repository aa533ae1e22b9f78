"""A version without a series: a repository with its tag and that of the version before, wheel, patches."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass, replace
from pathlib import Path

import tomli_w

from kits import fakewheel
from kits.patchkit import NCCL, TOPICS, Kit, Text, make_kit, small_states, write_targets, write_tree
from m8d_build.overlay.build import OverlayRequest
from m8d_build.settings import Settings
from m8d_build.targets import load_targets

NEXT = "2.7.0"
WHEEL = {"filename": fakewheel.NAME, "sha256": "0" * 64, "local": "cu124", "git_version": "0" * 40}
VERIFIED = {
    "status": "verified",
    "units": [{"path": NCCL}],
    "abi": {"cxx11_abi": False, "abi_version": 11, "std": "gnu++17", "cuda": "12.4"},
    "wheels": [WHEEL],
    "pinned_packages": ["nvidia-nccl-cu12"],
    "build_packages": ["nvidia-cuda-nvcc-cu12==12.4.131"],
    "packages": {"nvidia-cuda-nvcc-cu12==12.4.131": "1" * 64},
    "accepted": {"_Zf": "why"},
}


@dataclass
class PortKit:
    """What a port needs.

    Attributes:
        kit: patches with the series of 2.6.0, and an entry of 2.7.0 that is only planned.
        repository: with the tags v2.6.0 and v2.7.0.
        commit: of v2.7.0.
        wheel: the official one of 2.7.0, which names that commit.
        settings: whose git repository that is.
    """

    kit: Kit
    repository: Path
    commit: str
    wheel: Path
    settings: Settings

    def request(self, **changes: object) -> OverlayRequest:
        """Return what `build_ported` is asked for."""
        target = load_targets(self.kit.patches).get(NEXT)
        asked = OverlayRequest(target, "cp311", wheel=self.wheel, source="git")
        return replace(asked, **changes)


def make_port_kit(root: Path, files: dict[str, Text] | None = None) -> PortKit:
    """Make it; ``files`` differ in 2.7.0 from 2.6.0's."""
    kit = make_kit(root, small_states(), TOPICS)
    write_targets(kit.patches, kit.states[0], TOPICS, **VERIFIED)
    repository = root / "repository"
    write_tree(repository, kit.states[0])
    git(repository, "init", "--quiet")
    commit_tag(repository, "v2.6.0")
    write_tree(repository, files or {}, NEXT)
    commit = commit_tag(repository, f"v{NEXT}")
    planned = {
        "version": NEXT,
        "tag": f"v{NEXT}",
        "status": "planned",
        "note": "sources not seen",
        "commit": commit,
    }
    with (kit.patches / "targets.toml").open("a") as file:
        file.write("\n[[target]]\n" + tomli_w.dumps(planned))
    settings = Settings.load(
        cache=root / "cache",
        patches=kit.patches,
        out=root / "out",
        jobs=1,
        environ={"M8D_PYTORCH_GIT": repository.as_uri()},
    )
    return PortKit(kit, repository, commit, official_wheel(root / "official", commit), settings)


def official_wheel(folder: Path, commit: str, cuda: str = "12.4") -> Path:
    """Write the official wheel of 2.7.0."""
    changed = {"2.6.0": NEXT, fakewheel.COMMIT: commit, "'12.4'": f"'{cuda}'"}
    files = {}
    for name, data in fakewheel.contents().items():
        text = data
        for old, new in changed.items() if name.endswith((".py", "METADATA")) else ():
            text = text.replace(old.encode(), new.encode())
        files[name.replace("2.6.0", NEXT)] = text
    return fakewheel.write_wheel(folder, files, name=fakewheel.NAME.replace("2.6.0", NEXT))


def commit_tag(repository: Path, tag: str) -> str:
    """Commit all that is there, and tag it; return the commit."""
    own = ["-c", "user.name=n", "-c", "user.email=e@example.com", "-c", "commit.gpgsign=false"]
    git(repository, "add", "--all")
    git(repository, *own, "commit", "--quiet", "-m", tag)
    git(repository, "tag", tag)
    return git(repository, "rev-parse", "HEAD").strip()


def git(repository: Path, *arguments: str) -> str:
    """Run git in the repository; return what it prints."""
    done = subprocess.run(["git", *arguments], cwd=repository, check=True, capture_output=True, text=True)
    return done.stdout
