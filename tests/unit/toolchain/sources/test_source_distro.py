from __future__ import annotations

import sys
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

import pytest
from kits.sourcekit import (
    ARCHIVE,
    FILES,
    archive_of,
    contents,
    get,
    left,
    make_settings,
    write_target,
)

from m8d_build.errors import (
    CommandFailed,
    DiskFull,
    SourceUnreachable,
)
from m8d_build.proc import Finished
from m8d_build.sources import SPARSE
from m8d_build.sources.base import Provided
from m8d_build.sources.distro import DistroSource


@pytest.fixture
def target(tmp_path):
    return write_target(tmp_path / "patches")


@pytest.fixture
def settings(tmp_path):
    return make_settings(tmp_path)


@pytest.fixture
def folder(settings):
    return settings.cache / "sources" / "v2.6.0"


SITES = (
    "http://deb.example/debian\nhttp://deb.example/debian\nhttp://deb.example/debian-security\ncdrom:[x]/\n"
)


@dataclass
class FakeApt:
    """apt-get whose archives are in a dictionary: suite -> archive, or the last line of a failure."""

    suites: dict[str, bytes | str]
    sites: str = SITES
    pool: dict[str, bytes] = field(default_factory=dict)  # by URL
    commands: list[list[str]] = field(default_factory=list)
    lists: list[str] = field(default_factory=list)

    def __call__(self, command, *, what, cwd=None, env=None, timeout=0.0):
        arguments = [str(part) for part in command]
        self.commands.append(arguments)
        assert env["LC_ALL"] == "C"
        assert timeout > 0
        if "indextargets" in arguments:
            return Finished(self.sites, 0.1)
        if "download-file" in arguments:
            url, path, digest = arguments[-3:]
            data = self.pool.get(url)
            if data is None or digest != f"SHA256:{sha256(data).hexdigest()}":
                raise CommandFailed(
                    f"could not {what}: apt-helper exited with 100", tail="E: Download Failed\n"
                )
            Path(path).write_bytes(data)
            return Finished("", 0.1)
        configuration = Path(arguments[arguments.index("-c") + 1])
        listed = (configuration.parent / "sources.list").read_text(encoding="utf-8")
        self.lists.append(listed.strip())
        answer = self.suites.get(listed.split()[-2], "E: The repository does not have a Release file.")
        if isinstance(answer, str):
            raise CommandFailed(f"could not {what}: apt-get exited with 100", tail=f"Reading...\n{answer}\n")
        if "source" in arguments:
            (cwd / "pytorch_2.6.0+dfsg.orig.tar.xz").write_bytes(answer)
            (cwd / "pytorch_2.6.0+dfsg.orig.tar.xz.asc").write_bytes(b"signature")
            (cwd / "pytorch_2.6.0+dfsg-7.debian.tar.xz").write_bytes(b"not this one")
        return Finished("", 0.1)

    def source(self, **more) -> DistroSource:
        return DistroSource(run=self, apt_get=sys.executable, **more)


def test_the_package_is_downloaded_and_only_what_is_wanted_unpacked(target, settings, folder):
    apt = FakeApt({"trixie": ARCHIVE})
    tree = get(target, settings, apt.source(), wanted=("torch/csrc", "c10"))
    assert tree.origin == "distribution source package pytorch 2.6.0+dfsg-7"
    assert contents(tree.root) == FILES
    assert left(folder) == ["distro"]
    assert sorted(p.name for p in (folder / "distro").iterdir()) == ["origin.json", "tree"]
    assert [c[-1] for c in apt.commands[1:]] == ["update", "pytorch=2.6.0+dfsg-7"]
    assert "--download-only" in apt.commands[2]


def test_apt_is_given_a_configuration_of_its_own(target, tmp_path):
    apt = FakeApt({"trixie": ARCHIVE})
    apt.source().provide(target, SPARSE, tmp_path)
    text = (tmp_path / "apt" / "apt.conf").read_text(encoding="utf-8")
    for key in ("Dir::State", "Dir::State::lists", "Dir::Cache", "Dir::Etc::sourcelist"):
        assert f'{key} "{tmp_path}/apt/' in text
    assert '"/dev/null"' in text
    assert "#clear APT::Update::Post-Invoke;" in text
    assert all("-c" in c for c in apt.commands[1:])


def test_suites_are_tried_in_order_and_each_failure_is_told(target, tmp_path):
    apt = FakeApt({"trixie": "E: Version '2.6.0+dfsg-7' was not found", "sid": ARCHIVE})
    assert isinstance(apt.source().provide(target, SPARSE, tmp_path), Provided)
    assert [line.split()[-3:-1] for line in apt.lists] == [
        ["http://deb.example/debian", "trixie"],
        ["http://deb.example/debian", "forky"],
        ["http://deb.example/debian", "sid"],
        ["http://deb.example/debian", "sid"],
    ]
    apt = FakeApt({"trixie": "E: Version '2.6.0+dfsg-7' was not found"})
    answer = apt.source().provide(target, SPARSE, tmp_path / "again")
    assert "trixie: could not read trixie's index" in answer.reason
    assert "E: Version '2.6.0+dfsg-7' was not found" in answer.reason
    assert "sid: " in answer.reason
    assert answer.reason.count("does not have a Release file") == 2


POOL = "http://deb.example/debian/pool/main/p/pytorch/pytorch_2.6.0+dfsg.orig.tar.xz"


def test_a_version_no_index_names_any_more_is_taken_from_the_pool_by_its_hash(tmp_path):
    known = write_target(tmp_path / "patches", sha256=sha256(ARCHIVE).hexdigest())
    apt = FakeApt({}, pool={POOL: ARCHIVE})
    found = apt.source().provide(known, SPARSE, tmp_path)
    assert isinstance(found, Provided)
    assert contents(found.root) == FILES
    assert "-c" in apt.commands[-1]  # with a configuration of its own


def test_a_version_that_another_distribution_keeps_is_taken_from_there_by_its_hash(tmp_path):
    known = write_target(tmp_path / "patches", sha256=sha256(ARCHIVE).hexdigest())
    url = "http://other.example/pool/universe/p/pytorch/pytorch_2.6.0+dfsg.orig.tar.xz"
    apt = FakeApt({}, pool={url: ARCHIVE})
    found = apt.source(pools=("http://other.example/pool/universe",)).provide(known, SPARSE, tmp_path)
    assert isinstance(found, Provided)
    assert contents(found.root) == FILES
    tried = [command[-3] for command in apt.commands if "download-file" in command]
    assert tried == [POOL, url], "the system's own site comes first"


def test_the_pools_file_must_be_the_one_on_record(tmp_path, target):
    apt = FakeApt({}, pool={POOL: ARCHIVE})
    assert (
        "pool" not in apt.source().provide(target, SPARSE, tmp_path).reason
    )  # no hash: nothing vouches for it
    other = write_target(tmp_path / "patches", sha256=sha256(b"another").hexdigest())
    answer = apt.source().provide(other, SPARSE, tmp_path)
    assert "http://deb.example/debian/pool/main: " in answer.reason
    assert "E: Download Failed" in answer.reason


def test_no_time_left_ends_the_search(target, tmp_path, monkeypatch):
    monkeypatch.setattr("m8d_build.sources.distro.TIMEOUT", 0.0)
    apt = FakeApt({"trixie": ARCHIVE})
    answer = apt.source().provide(target, SPARSE, tmp_path)
    assert "no time left" in answer.reason
    assert len(apt.commands) == 1


def test_the_distribution_cannot_help(tmp_path, target):
    none = write_target(tmp_path / "p2", distro="")
    odd = write_target(tmp_path / "p3", distro="1 -o Dir=/")
    apt = FakeApt({"trixie": ARCHIVE})
    assert "none is recorded" in apt.source().provide(none, SPARSE, tmp_path / "a").reason
    assert "no package version" in apt.source().provide(odd, SPARSE, tmp_path / "b").reason
    assert apt.commands == []
    absent = DistroSource(run=apt, apt_get="no-such-apt-get")
    assert "is not on PATH" in absent.provide(target, SPARSE, tmp_path / "c").reason
    apt.sites = "\n"
    assert apt.source().provide(target, SPARSE, tmp_path / "d").reason == "apt has no site configured"


def test_apt_on_a_full_disk(target, tmp_path):
    apt = FakeApt({"trixie": "E: Write error - write (28: No space left on device)"})
    with pytest.raises(DiskFull, match="MiB free"):
        apt.source().provide(target, SPARSE, tmp_path)


@pytest.mark.parametrize("damaged", [ARCHIVE[: len(ARCHIVE) // 2], b"no archive", b""])
def test_a_damaged_archive_is_a_reason_and_leaves_nothing(target, settings, folder, damaged):
    with pytest.raises(SourceUnreachable, match="cannot be unpacked"):
        get(target, settings, FakeApt({"trixie": damaged}).source())
    assert left(folder) == []


def test_an_archive_without_the_wanted_folders(target, tmp_path):
    apt = FakeApt({"trixie": archive_of({"docs/x": b""})})
    assert "has none of" in apt.source().provide(target, SPARSE, tmp_path).reason
