"""Fetching from real git repositories, made here and reached by file:// URLs."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from m8d_build.errors import BlobMismatch, CommandFailed, SourceUnreachable
from m8d_build.files.blobs import blob_id
from m8d_build.gitrepo import fetch as door
from m8d_build.gitrepo.fetch import fetch_tag
from m8d_build.progress import Silent
from m8d_build.settings import Settings
from m8d_build.sources import SPARSE, fetch_source, obtain, sources_for
from m8d_build.sources.git import GitSource
from m8d_build.targets import load_targets

pytestmark = [
    pytest.mark.git,
    pytest.mark.skipif(shutil.which("git") is None, reason="the git program is not there"),
]

CPP = "torch/csrc/cuda/nccl.cpp"
WANTED = {
    CPP: b"int nccl;\n",
    "c10/util.h": b"#pragma once\n",
    "version.txt": b"2.6.0a0\n",
    "setup.py": b"\n",
}
UNWANTED = {
    "docs/guide.md": b"a guide\n",
    "torch/nn/module.py": b"pass\n",
    "c10x/y.h": b"y\n",
    "aten/z.h": b"z\n",
}
TAG = "v2.6.0"


def git(repo: Path, *arguments: str) -> str:
    """Run git as a user with no configuration at all."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    environment |= {"GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": "/dev/null", "LC_ALL": "C"}
    identity = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    done = subprocess.run(
        ["git", *identity, *arguments], cwd=repo, env=environment, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


def commit(repo: Path, files: dict[str, bytes], tag: str = "") -> str:
    for name, data in files.items():
        (repo / name).parent.mkdir(parents=True, exist_ok=True)
        (repo / name).write_bytes(data)
    git(repo, "add", "--all")
    git(repo, "commit", "--quiet", "--message", "more")
    if tag:
        git(repo, "tag", "--annotate", "--force", "--message", tag, tag)
    return git(repo, "rev-parse", "HEAD")


@pytest.fixture
def remote(tmp_path):
    repo = tmp_path / "remote"
    repo.mkdir()
    git(repo, "init", "--quiet")
    git(repo, "config", "uploadpack.allowFilter", "true")
    git(repo, "config", "uploadpack.allowAnySHA1InWant", "true")
    commit(repo, {"docs/history.md": b"from before\n"})
    commit(repo, {**WANTED, **UNWANTED}, tag=TAG)
    return repo


@pytest.fixture
def settings(tmp_path, remote):
    patches = tmp_path / "patches"
    patches.mkdir()
    write_targets(patches, {CPP: blob_id(WANTED[CPP])})
    return Settings.load(
        cache=tmp_path / "cache",
        patches=patches,
        out=tmp_path / "out",
        environ={"M8D_PYTORCH_GIT": f"file://{remote}"},
    )


def write_targets(patches: Path, blobs: dict[str, str]) -> None:
    lines = ["schema = 1", "[[target]]", 'version = "2.6.0"', f'tag = "{TAG}"', 'status = "applies"']
    lines += ["[target.files]", *(f'"{path}" = "{blob}"' for path, blob in blobs.items())]
    (patches / "targets.toml").write_text("\n".join(lines), encoding="utf-8")


def target_of(settings):
    return load_targets(settings.patches).get("2.6.0")


def contents(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


@pytest.fixture
def commands(monkeypatch):
    """Count the git commands that are run; a name in ``stop_at`` raises what it maps to."""

    class Commands(list):
        stop_at: dict[str, BaseException] = {}  # noqa: RUF012  (set anew by each test)

    ran = Commands()
    ran.stop_at = {}
    run = door._Door.run

    def counted(self, *arguments, what):
        ran.append(arguments[0])
        if arguments[0] in ran.stop_at:
            raise ran.stop_at.pop(arguments[0])
        return run(self, *arguments, what=what)

    monkeypatch.setattr(door._Door, "run", counted)
    return ran


def fetched(tmp_path: Path, remote: Path, tag: str = TAG, **more) -> str:
    more = {"repo": tmp_path / "repo", "tree": tmp_path / "tree", "folders": SPARSE, "timeout": 60, **more}
    return fetch_tag(f"file://{remote}", tag, **more)


def test_only_the_wanted_folders_and_the_top_are_there(tmp_path, remote):
    assert fetched(tmp_path, remote) == git(remote, "rev-parse", f"{TAG}^{{commit}}")
    assert contents(tmp_path / "tree") == WANTED


def test_neither_history_nor_unwanted_contents_come_over_the_line(tmp_path, remote):
    fetched(tmp_path, remote)
    listed = git(
        tmp_path / "repo", "--git-dir=.", "rev-list", "--objects", "--all", "--missing=print"
    ).split()
    for data in UNWANTED.values():
        assert f"?{blob_id(data)}" in listed
    for data in WANTED.values():
        assert blob_id(data) in listed
    assert not [word for word in listed if blob_id(b"from before\n") in word and not word.startswith("?")]
    assert (tmp_path / "repo" / "shallow").exists()


def test_the_chain_keeps_the_tree_and_tells_url_and_commit(settings, remote):
    tree = fetch_source(target_of(settings), settings, source="git")
    assert tree.root == settings.cache / "sources" / "v2.6.0" / "git" / "tree"
    assert tree.origin == f"git file://{remote} at {git(remote, 'rev-parse', 'HEAD')}"
    assert tree.verified
    assert contents(tree.root) == WANTED
    assert sorted(p.name for p in tree.root.parents[1].iterdir()) == [".m8d.lock", "git"]


def test_a_kept_tree_needs_no_repository_any_more(settings, remote, commands):
    fetch_source(target_of(settings), settings, source="git")
    shutil.rmtree(remote)
    before = len(commands)
    assert contents(fetch_source(target_of(settings), settings, source="auto").root) == WANTED
    assert len(commands) == before


def test_a_missing_tag_is_told(tmp_path, remote, settings):
    with pytest.raises(CommandFailed, match=r"could not fetch v9\.9\.9") as caught:
        fetched(tmp_path, remote, tag="v9.9.9")
    assert "refs/tags/v9.9.9" in caught.value.tail
    git(remote, "tag", "--delete", TAG)
    with pytest.raises(SourceUnreachable, match=f"couldn't find remote ref refs/tags/{TAG}"):
        fetch_source(target_of(settings), settings, source="git")


def test_a_branch_of_the_tags_name_is_not_the_tag(tmp_path, remote):
    git(remote, "branch", "v9.9.9")
    with pytest.raises(CommandFailed):
        fetched(tmp_path, remote, tag="v9.9.9")


def test_an_unreachable_url_is_told(settings, remote):
    shutil.rmtree(remote)
    with pytest.raises(SourceUnreachable, match=f"git file://{remote}, tag {TAG}: could not fetch"):
        fetch_source(target_of(settings), settings, source="git")


@contextmanager
def silent_server():
    """A server that accepts and never says anything."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_a_server_that_says_nothing_is_given_up_in_time(settings):
    before = children_of(os.getpid())  # other tests keep a server that their processes are forked from
    with silent_server() as port:
        place = GitSource(f"git://127.0.0.1:{port}/pytorch.git", timeout=1.0)
        began = time.monotonic()
        with pytest.raises(SourceUnreachable, match="in time"):
            obtain(
                target_of(settings),
                [place],
                settings,
                wanted=SPARSE,
                allow_unverified=False,
                reporter=Silent(),
            )
        assert time.monotonic() - began < 60
    assert children_of(os.getpid()) <= before


def children_of(pid: int) -> set[str]:
    return set(Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split())


def test_a_password_is_never_asked_for(tmp_path):
    with pytest.raises(CommandFailed):
        fetch_tag(
            "ext::sh -c 'echo asked'",
            TAG,
            repo=tmp_path / "r",
            tree=tmp_path / "t",
            folders=SPARSE,
            timeout=30,
        )
    environment = door._Door(tmp_path, tmp_path, 0)._environment()
    assert environment["GIT_TERMINAL_PROMPT"] == "0"
    assert environment["LC_ALL"] == "C"


def test_a_url_is_never_read_as_an_option(tmp_path):
    trap = tmp_path / "trap"
    with pytest.raises(CommandFailed):
        fetch_tag(f"--upload-pack=touch {trap}", TAG, repo=tmp_path / "r", tree=tmp_path / "t",
                  folders=SPARSE, timeout=30)  # fmt: skip
    assert not trap.exists()


def test_the_users_configuration_and_environment_do_not_matter(tmp_path, remote, monkeypatch):
    home = tmp_path / "home"
    home.mkdir()
    (home / ".gitconfig").write_text(
        '[url "file:///nowhere/"]\n\tinsteadOf = file:///\n[core]\n\tautocrlf = true\n\thooksPath = /nowhere\n'
    )
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))
    monkeypatch.setenv("GIT_INDEX_FILE", str(tmp_path / "index"))
    monkeypatch.setenv("GIT_CONFIG_COUNT", "1")
    monkeypatch.setenv("GIT_CONFIG_KEY_0", "url.file:///nowhere/.insteadOf")
    monkeypatch.setenv("GIT_CONFIG_VALUE_0", "file:///")
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    fetched(tmp_path, remote)
    assert contents(tmp_path / "tree") == WANTED
    assert not (tmp_path / "elsewhere").exists()
    assert not (tmp_path / "index").exists()


@pytest.mark.parametrize("stop", [KeyboardInterrupt(), CommandFailed("ended")])
def test_stopped_after_the_fetch_it_goes_on_without_fetching_again(settings, commands, stop):
    commands.stop_at = {"checkout": stop}
    with pytest.raises((KeyboardInterrupt, SourceUnreachable)):
        fetch_source(target_of(settings), settings, source="git")
    work = settings.cache / "sources" / "v2.6.0" / ".work-git"
    (work / "repo" / "index.lock").touch()  # what a killed git leaves
    (work / "tree" / "torch").mkdir(parents=True)
    (work / "tree" / "version.txt").write_bytes(b"half a fi")
    commands.clear()
    tree = fetch_source(target_of(settings), settings, source="git")
    assert commands.count("fetch") == 0
    assert contents(tree.root) == WANTED
    assert not work.exists()


def test_what_was_fetched_survives_a_time_without_network(settings, remote, commands):
    commands.stop_at = {"checkout": KeyboardInterrupt()}
    with pytest.raises(KeyboardInterrupt):
        fetch_source(target_of(settings), settings, source="git")
    away = remote.rename(remote.with_name("away"))
    with pytest.raises(SourceUnreachable, match=f"could not check {TAG} out"):
        fetch_source(target_of(settings), settings, source="git")
    away.rename(remote)
    commands.clear()
    assert contents(fetch_source(target_of(settings), settings, source="git").root) == WANTED
    assert not {"init", "fetch"} & set(commands)


FETCHES_FOR_LONG = """
import signal
import sys
from pathlib import Path
from m8d_build.gitrepo.fetch import fetch_tag
signal.signal(signal.SIGINT, signal.default_int_handler)  # who started us in the background may have it ignored
base = Path(sys.argv[2])
fetch_tag(sys.argv[1], "v2.6.0", repo=base / "r", tree=base / "t", folders=(), timeout=60)
"""


def test_ctrl_c_ends_git_too(tmp_path):
    build = Path(door.__file__).resolve().parents[2]
    environment = {**os.environ, "PYTHONPATH": f"{build}{os.pathsep}{build.parent}"}
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        subprocess.Popen(
            [
                sys.executable,
                "-c",
                FETCHES_FOR_LONG,
                f"git://127.0.0.1:{server.getsockname()[1]}/p.git",
                tmp_path,
            ],
            env=environment,
            stderr=subprocess.PIPE,
        ) as process,
    ):
        server.settimeout(60)
        connection, _ = server.accept()
        with connection:
            connection.settimeout(60)
            asked = connection.recv(4096)
            while b"p.git" not in asked:
                asked += connection.recv(4096)
            deadline = time.monotonic() + 60
            while len(list(Path(f"/proc/{process.pid}/task").iterdir())) < 2:
                assert time.monotonic() < deadline
                time.sleep(0.01)  # git may be faster than who started it: until its watch is there
            process.send_signal(signal.SIGINT)  # git waits for our answer now
            while connection.recv(4096):  # until git is gone; a timeout if it never is
                pass
        assert b"KeyboardInterrupt" in process.communicate(timeout=30)[1]


def test_stopped_during_the_fetch_it_fetches_in_the_same_place(settings, commands):
    commands.stop_at = {"fetch": KeyboardInterrupt()}
    with pytest.raises(KeyboardInterrupt):
        fetch_source(target_of(settings), settings, source="git")
    commands.clear()
    assert contents(fetch_source(target_of(settings), settings, source="git").root) == WANTED
    assert commands.count("init") == 0
    assert commands.count("fetch") == 1


def damage_packs(repo):
    for pack in (repo / "objects" / "pack").iterdir():
        pack.chmod(0o644)
        pack.write_bytes(pack.read_bytes()[:40])


def damage_config(repo):
    (repo / "config").write_bytes(b"[core\n")


def lose_head(repo):
    (repo / "HEAD").unlink()


@pytest.mark.parametrize("damage", [damage_packs, damage_config, lose_head])
def test_a_broken_leftover_is_thrown_away_and_everything_starts_over(tmp_path, remote, commands, damage):
    commands.stop_at = {"checkout": KeyboardInterrupt()}
    with pytest.raises(KeyboardInterrupt):
        fetched(tmp_path, remote)
    damage(tmp_path / "repo")
    commands.clear()
    fetched(tmp_path, remote)
    assert contents(tmp_path / "tree") == WANTED
    assert commands.count("init") == 1


def test_a_leftover_of_another_url_is_not_used(tmp_path, remote, commands):
    fetched(tmp_path, remote)
    other = shutil.copytree(remote, tmp_path / "other")
    commit(other, {CPP: b"int other;\n"}, tag=TAG)
    fetched(tmp_path, other)
    assert contents(tmp_path / "tree")[CPP] == b"int other;\n"


def test_a_tag_with_other_contents_is_refused(settings, remote):
    commit(remote, {CPP: b"int moved;\n"}, tag=TAG)
    with pytest.raises(BlobMismatch) as caught:
        fetch_source(target_of(settings), settings, source="auto")
    assert f"{CPP}: found {blob_id(b'int moved;' + bytes([10]))}, expected {blob_id(WANTED[CPP])}" in str(
        caught.value
    )
    folder = settings.cache / "sources" / "v2.6.0"
    assert [p.name for p in folder.iterdir()] == [".m8d.lock"]
    tree = fetch_source(target_of(settings), settings, source="git", allow_unverified=True)
    assert not tree.verified


def test_another_commit_with_the_same_files_is_fine(settings, remote):
    moved = commit(remote, {"docs/guide.md": b"another guide\n"}, tag=TAG)
    tree = fetch_source(target_of(settings), settings, source="git")
    assert tree.verified
    assert tree.origin.endswith(moved)


def test_the_git_of_the_settings_is_asked(settings, remote):
    places = sources_for("git", target_of(settings), settings)
    assert places[1].url == f"file://{remote}"
