"""Sources from a distribution's source package, through apt, without touching the system's apt."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from m8d_build import proc
from m8d_build.errors import CommandFailed, PrerequisiteMissing
from m8d_build.files.disk import needs_room, remove_tree
from m8d_build.sources.base import Provided, Unavailable, last_words
from m8d_build.sources.unpack import ARCHIVE_ERRORS, unpack

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from m8d_build.targets import Target

__all__ = ["SUITES", "DistroSource", "Runner", "origin_of"]

PACKAGE = "pytorch"
# Where a package of a stable release stays for years, then where it is before and after.
SUITES: tuple[str, ...] = ("trixie", "forky", "sid")
# Another distribution keeps original archives of versions that Debian has replaced; taken by hash only.
POOLS: tuple[str, ...] = ("http://archive.ubuntu.com/ubuntu/pool/universe",)
# Named because newer systems no longer trust a key for every site; the first that exists is used.
KEYRINGS = (
    Path("/usr/share/keyrings/debian-archive-keyring.gpg"),
    Path("/usr/share/keyrings/debian-archive-keyring.pgp"),
)
TIMEOUT = 300.0  # seconds for all of it; measured: 3 s
APT_HELPER = "/usr/lib/apt/apt-helper"  # comes with apt; not on PATH
_VERSION = re.compile(r"[0-9A-Za-z.+~:-]+")
_SITE = re.compile(r"(https?|file|copy|mirror[+a-z]*)://?[^\s\[\]]+")
_SECURITY = re.compile(r"security", re.IGNORECASE)


class Runner(Protocol):
    """What m8d_build.proc.run does; a test puts another in its place."""

    def __call__(
        self,
        command: Sequence[str | Path],
        *,
        what: str,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float = ...,
    ) -> proc.Finished:
        """Run a program to its end."""


def origin_of(version: str) -> str:
    """Return what a tree from a version of the source package has as its origin."""
    return f"distribution source package {PACKAGE} {version}".rstrip()


@dataclass(frozen=True)
class DistroSource:
    """The source package ``pytorch`` of Debian, at the site this system's apt uses.

    Attributes:
        suites: releases to look in, in order.
        pools: where else an archive is looked for by its hash, in order.
        run: how to run apt-get.
        apt_get: its name or path.
        apt_helper: path of the program that downloads one file and checks its hash.
    """

    suites: tuple[str, ...] = SUITES
    pools: tuple[str, ...] = POOLS
    run: Runner = proc.run
    apt_get: str = "apt-get"
    apt_helper: str = APT_HELPER
    name: str = "distro"
    resumable: bool = False

    def provide(self, target: Target, wanted: Sequence[str], into: Path) -> Provided | Unavailable:
        """Download the package's original archive, checked by apt, and unpack what is wanted of it.

        Raises:
            DiskFull: there is no room.
            WrongTree: the archive holds an unsafe member.
        """
        version = target.distro_version
        place = origin_of(version)
        if not version:
            return Unavailable(place, f"none is recorded for torch {target.version}")
        if not _VERSION.fullmatch(version):
            return Unavailable(place, "that is no package version")
        with needs_room(into, f"fetching {place}"):
            try:
                apt_get = proc.which(
                    self.apt_get, why="to fetch a source package", next_step="Use --source git"
                )
                deadline = time.monotonic() + TIMEOUT
                archive = self._download(
                    _Apt(apt_get, self.run, into, deadline), version, target.distro_sha256
                )
                if isinstance(archive, str):
                    return Unavailable(place, archive)
                tree = into / "tree"
                tree.mkdir()
                if unpack(archive, tree, wanted) == 0:
                    return Unavailable(place, f"{archive.name} has none of {', '.join(wanted)}")
            except PrerequisiteMissing as exc:
                return Unavailable(place, exc.value)
            except ARCHIVE_ERRORS as exc:
                return Unavailable(place, f"its archive cannot be unpacked: {exc}")
        return Provided(tree, place)

    def _download(self, apt: _Apt, version: str, sha256: str) -> Path | str:
        """Return the original archive, or why there is none.

        A version that a newer one has replaced is in no suite any more, but for a while still in the pool, or
        in another distribution's. Nothing signs it there, so it is taken only by its hash.
        """
        try:
            sites = apt.sites()
        except CommandFailed as exc:
            return last_words(exc)
        if not sites:
            return "apt has no site configured"
        reasons: list[str] = []
        for site in sites:
            for suite in self.suites:
                if apt.expired():
                    return "; ".join([*reasons, f"no time left for {site} {suite}"])
                try:
                    return apt.fetch(site, suite, version)
                except CommandFailed as exc:
                    reasons.append(f"{site} {suite}: {last_words(exc)}")
        own = (f"{site.rstrip('/')}/pool/main" for site in sites)
        for pool in (*own, *self.pools) if sha256 else ():
            if apt.expired():
                return "; ".join([*reasons, f"no time left for {pool}"])
            try:
                return apt.fetch_from_pool(pool, self.apt_helper, version, sha256)
            except CommandFailed as exc:
                reasons.append(f"{pool}: {last_words(exc)}")
        return "; ".join(reasons)


@dataclass(frozen=True)
class _Apt:
    """apt-get with a configuration, state and cache of its own, all under one folder."""

    program: str
    run: Runner
    folder: Path
    deadline: float  # monotonic seconds

    def sites(self) -> list[str]:
        """Return the sites the system's apt uses, without the security ones: they have no such package."""
        done = self._apt(["indextargets", "--no-release-info", "--format", "$(SITE)", "Created-By: Packages"],
                         what="ask apt for its sites", own=False)  # fmt: skip
        sites = dict.fromkeys(line.strip() for line in done.stdout.splitlines())
        return [site for site in sites if _SITE.fullmatch(site) and not _SECURITY.search(site)]

    def expired(self) -> bool:
        """Return whether the time for all of it is over."""
        return time.monotonic() >= self.deadline

    def fetch(self, site: str, suite: str, version: str) -> Path:
        """Download the source package from one suite and return its original archive.

        Raises:
            CommandFailed: apt cannot reach the suite, or it lacks the version.
        """
        folder = self._fresh()
        keyring = next((f"[signed-by={k}] " for k in KEYRINGS if k.exists()), "")
        (folder / "sources.list").write_text(f"deb-src {keyring}{site} {suite} main\n", encoding="utf-8")
        self._apt(["update"], what=f"read {suite}'s index")
        self._apt(["source", "--download-only", f"{PACKAGE}={version}"], what=f"download {PACKAGE} {version}")
        archives = sorted(
            p
            for p in (folder / "got").glob(f"{PACKAGE}_{_upstream(version)}.orig.tar.*")
            if p.suffix not in {".asc", ".sig"}
        )
        if len(archives) != 1:
            raise CommandFailed(f"the package has {len(archives)} original archives, not one")
        return archives[0]

    def fetch_from_pool(self, pool: str, helper: str, version: str, sha256: str) -> Path:
        """Download the original archive from where a distribution keeps its files, checked by its hash.

        Raises:
            CommandFailed: it is not there, or is another file.
        """
        got = self._fresh() / "got"
        name = f"{PACKAGE}_{_upstream(version)}.orig.tar.xz"
        url = f"{pool}/{PACKAGE[0]}/{PACKAGE}/{name}"
        apt = _Apt(helper, self.run, self.folder, self.deadline)
        apt._apt(["download-file", url, str(got / name), f"SHA256:{sha256}"], what=f"download {name}")
        return got / name

    def _fresh(self) -> Path:
        """Make the folder anew that apt keeps everything in; return it."""
        folder = self.folder / "apt"
        remove_tree(folder)
        for part in ("state/lists/partial", "cache/archives/partial", "got"):
            (folder / part).mkdir(parents=True)
        (folder / "status").touch()
        (folder / "apt.conf").write_text(_configuration(folder), encoding="utf-8")
        return folder

    def _apt(self, arguments: Sequence[str], *, what: str, own: bool = True) -> proc.Finished:
        folder = self.folder / "apt"
        options = ["-c", str(folder / "apt.conf")] if own else []
        with needs_room(self.folder, f"letting apt {what}"):
            return self.run(
                [self.program, *options, *arguments],
                what=what,
                cwd=folder / "got" if own else None,
                env={"LC_ALL": "C", "LANGUAGE": "C", "DEBIAN_FRONTEND": "noninteractive"},
                timeout=max(self.deadline - time.monotonic(), 1.0),
            )


def _upstream(version: str) -> str:
    """Return the upstream part of a package version: "2.6.0+dfsg-7" -> "2.6.0+dfsg"."""
    return version.rpartition("-")[0].rpartition(":")[2]


def _configuration(folder: Path) -> str:
    """Return an apt configuration that keeps apt inside a folder.

    The system's own is read before it (proxies and certificates are there), so its hooks are cleared: some of
    them clean or fill the system's caches.
    """
    return "\n".join(
        [
            f'Dir::State "{folder / "state"}";',
            f'Dir::State::lists "{folder / "state" / "lists"}";',
            f'Dir::State::status "{folder / "status"}";',
            f'Dir::Cache "{folder / "cache"}";',
            f'Dir::Etc::sourcelist "{folder / "sources.list"}";',
            'Dir::Etc::sourceparts "/dev/null";',
            'Dir::Etc::preferences "/dev/null";',
            'Dir::Etc::preferencesparts "/dev/null";',
            "#clear APT::Update::Pre-Invoke;",
            "#clear APT::Update::Post-Invoke;",
            "#clear APT::Update::Post-Invoke-Success;",
            'APT::Update::Error-Mode "any";',  # an index that did not come is a failure, not a warning
            'APT::Get::AllowUnauthenticated "false";',
            'Acquire::AllowInsecureRepositories "false";',
            'Acquire::Languages "none";',
            'Acquire::Retries "2";',
            'Acquire::http::Timeout "20";',
            'Acquire::https::Timeout "20";',
            "",
        ]
    )
