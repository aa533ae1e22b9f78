from __future__ import annotations

import pytest
from kits.sourcekit import (
    CPP,
    ENOSPC,
    FILES,
    Fake,
    contents,
    get,
    left,
    make_settings,
    write_target,
    write_tree,
)

from m8d_build.errors import (
    BlobMismatch,
    BuildBusy,
    CommandFailed,
    DiskFull,
    OutputUnwritable,
    PrerequisiteMissing,
    SourceUnreachable,
    WrongTree,
)
from m8d_build.files.blobs import blob_id
from m8d_build.files.lock import hold
from m8d_build.progress import Silent
from m8d_build.sources import SPARSE, fallback, fetch_source, sources_for
from m8d_build.sources.base import Provided, Unavailable, last_words, without_password
from m8d_build.sources.cache import CacheSource
from m8d_build.sources.distro import DistroSource
from m8d_build.sources.git import GitSource
from m8d_build.sources.path import PathSource


@pytest.fixture
def target(tmp_path):
    return write_target(tmp_path / "patches")


@pytest.fixture
def settings(tmp_path):
    return make_settings(tmp_path)


@pytest.fixture
def folder(settings):
    return settings.cache / "sources" / "v2.6.0"


@pytest.mark.parametrize(
    ("choice", "kinds"),
    [
        ("auto", [CacheSource, GitSource, DistroSource]),
        ("cache", [CacheSource]),
        ("git", [CacheSource, GitSource]),
        ("distro", [CacheSource, DistroSource]),
        ("/some/folder", [PathSource]),
        ("./git", [PathSource]),
    ],
)
def test_each_choice_asks_its_places_in_order(target, settings, choice, kinds):
    assert [type(place) for place in sources_for(choice, target, settings)] == kinds


def test_a_folder_given_with_auto_is_asked_first(target, settings, tmp_path):
    places = sources_for("auto", target, settings, path=tmp_path)
    assert [place.name for place in places] == ["path", "cache", "git", "distro"]


def test_a_chosen_place_uses_only_its_own_kept_tree(target, settings):
    assert sources_for("git", target, settings)[0].kinds == ("git",)
    assert sources_for("distro", target, settings)[0].kinds == ("distro",)


def test_the_first_place_that_has_them_ends_the_search(target, settings, folder):
    first, second, third = Fake("first", ["no net"]), Fake("second", [FILES]), Fake("third", [FILES])
    reporter = Silent()
    tree = get(target, settings, first, second, third, reporter=reporter)
    assert (first.calls, second.calls, third.calls) == (1, 1, 0)
    assert tree.root == folder / "second" / "tree"
    assert tree.origin == "second at 123"
    assert tree.verified
    assert tree.target is target
    assert contents(tree.root) == FILES
    assert left(folder) == ["second"]
    assert reporter.notes == ["first somewhere: no net"]


def test_when_nothing_works_every_place_and_reason_is_told(target, settings, folder):
    with pytest.raises(SourceUnreachable) as caught:
        get(target, settings, Fake("first", ["no net"]), Fake("second", ["no such package"]))
    text = str(caught.value)
    assert "first somewhere: no net" in text
    assert "second somewhere: no such package" in text
    assert "--source PATH" in caught.value.next_step
    assert "v2.6.0" in caught.value.next_step
    assert left(folder) == []


def test_a_kept_tree_is_used_again_without_asking_anyone(target, settings, folder):
    place = Fake("git", [FILES])
    get(target, settings, place)
    again = get(target, settings, CacheSource(folder, ("distro", "git")), place)
    assert place.calls == 1
    assert again.root == folder / "git" / "tree"
    assert again.origin == "git at 123"


def damage_file(root):
    (root / CPP).write_bytes(b"int nccL;\n")  # the same size


def lose_file(root):
    (root / "c10/util.h").unlink()  # the target does not name it


def cut_file(root):
    (root / "c10/util.h").write_bytes(b"")


def lose_record(root):
    (root.parent / "origin.json").unlink()


def spoil_record(root):
    (root.parent / "origin.json").write_text('{"schema": 1, "origin"', encoding="utf-8")


def add_file(root):
    (root / "torch/csrc/new.h").write_bytes(b"")


@pytest.mark.parametrize("damage", [damage_file, lose_file, cut_file, add_file, lose_record, spoil_record])
@pytest.mark.parametrize("allow_unverified", [False, True])
def test_a_kept_tree_that_was_damaged_is_fetched_again(target, settings, folder, damage, allow_unverified):
    place = Fake("git", [FILES, FILES])
    damage(get(target, settings, place).root)
    cache = CacheSource(folder, ("git",), allow_unverified)
    tree = get(target, settings, cache, place, allow_unverified=allow_unverified)
    assert place.calls == 2
    assert contents(tree.root) == FILES
    assert left(folder) == ["git"]


def test_a_damaged_kept_tree_alone_says_what_is_wrong(target, settings, folder):
    damage_file(get(target, settings, Fake("git", [FILES])).root)
    with pytest.raises(SourceUnreachable, match=blob_id(FILES[CPP])):
        get(target, settings, CacheSource(folder, ("git",)))


def test_a_kept_tree_without_a_wanted_folder_is_not_enough(target, settings, folder):
    place = Fake("git", [FILES, FILES])
    get(target, settings, place, wanted=("torch/csrc",))
    get(target, settings, CacheSource(folder, ("git",)), place, wanted=("torch/csrc", "c10"))
    get(target, settings, CacheSource(folder, ("git",)), place, wanted=("c10",))
    assert place.calls == 2


def test_a_wrong_blob_id_is_refused_and_nothing_is_kept(target, settings, folder):
    wrong = {**FILES, CPP: b"int other;\n"}
    with pytest.raises(BlobMismatch) as caught:
        get(target, settings, Fake("git", [wrong], resumable=True), Fake("distro", [FILES]))
    text = str(caught.value)
    assert f"{CPP}: found {blob_id(wrong[CPP])}, expected {blob_id(FILES[CPP])}" in text
    assert "1 of 2 files" in text
    assert "git at 123" in text
    assert left(folder) == []


def test_every_wrong_or_missing_file_is_listed(target, settings):
    with pytest.raises(BlobMismatch) as caught:
        get(target, settings, Fake("git", [{"version.txt": b"2.7.0\n"}]))
    assert f"{CPP}: found no such file" in str(caught.value)
    assert f"version.txt: found {blob_id(b'2.7.0' + bytes([10]))}" in str(caught.value)


def test_changed_line_endings_are_named_as_the_cause(target, settings):
    crlf = {**FILES, CPP: FILES[CPP].replace(b"\n", b"\r\n")}
    with pytest.raises(BlobMismatch, match="only its line endings differ: CRLF"):
        get(target, settings, Fake("git", [crlf]))


def test_allow_unverified_accepts_a_wrong_blob_id_with_a_note(target, settings, folder):
    wrong = {**FILES, CPP: b"int other;\n"}
    reporter, place = Silent(), Fake("git", [wrong])
    tree = get(target, settings, place, allow_unverified=True, reporter=reporter)
    assert not tree.verified
    assert any(note.startswith(f"unverified: {CPP}") for note in tree.notes)
    assert reporter.notes == list(tree.notes)
    # It was kept as what it is: used again when allowed, and only then.
    again = get(target, settings, CacheSource(folder, ("git",), allow_unverified=True), allow_unverified=True)
    assert not again.verified
    with pytest.raises(SourceUnreachable):
        get(target, settings, CacheSource(folder, ("git",)))


def test_a_file_without_a_recorded_id_is_noted_not_guessed(tmp_path, settings):
    target = write_target(tmp_path / "patches", blobs={CPP: "", "version.txt": blob_id(FILES["version.txt"])})
    tree = get(target, settings, Fake("git", [FILES]))
    assert tree.notes == (f"no blob id is recorded for {CPP}: not checked",)


@pytest.mark.parametrize(("resumable", "remains"), [(False, []), (True, [".work-git"])])
def test_ctrl_c_leaves_only_what_can_be_resumed(target, settings, folder, resumable, remains):
    place = Fake("git", [KeyboardInterrupt(), FILES], resumable=resumable)
    with pytest.raises(KeyboardInterrupt):
        get(target, settings, place)
    assert left(folder) == remains
    get(target, settings, place)
    assert place.found == [[], ["half"] if resumable else []]
    assert left(folder) == ["git"]


@pytest.mark.parametrize(("resumable", "found"), [(False, []), (True, ["half"])])
def test_what_a_killed_run_left_is_resumed_or_removed(target, settings, folder, resumable, found):
    write_tree(folder / ".work-git", {"half": b"ha"})
    write_tree(folder / ".new-git", {"tree/half": b"ha"})
    write_tree(folder / ".old-git", {"tree/half": b"ha"})
    place = Fake("git", [FILES], resumable=resumable)
    get(target, settings, place)
    assert place.found == [found]
    assert left(folder) == ["git"]


@pytest.mark.parametrize("resumable", [False, True])
def test_a_full_disk_is_told_as_such_and_its_half_tree_is_removed(target, settings, folder, resumable):
    other = Fake("distro", [FILES])
    with pytest.raises(DiskFull, match="MiB free"):
        get(target, settings, Fake("git", [DiskFull("no room (0 MiB free)")], resumable=resumable), other)
    with pytest.raises(DiskFull, match="MiB free"):
        get(target, settings, Fake("other", [ENOSPC]), other)
    assert other.calls == 0  # it would fill the same disk
    assert left(folder) == []


@pytest.mark.parametrize("stop", [ENOSPC, KeyboardInterrupt()])
def test_stopped_while_it_is_kept_the_earlier_tree_stays(target, settings, folder, monkeypatch, stop):
    get(target, settings, Fake("git", [FILES]))

    def stopped(*_):
        raise stop

    with monkeypatch.context() as patched:
        patched.setattr("m8d_build.sources.cache._measure", stopped)
        with pytest.raises((DiskFull, KeyboardInterrupt)):
            get(target, settings, Fake("git", [{**FILES, "c10/new.h": b""}]))
    assert left(folder) == ["git"]
    assert contents(get(target, settings, CacheSource(folder, ("git",))).root) == FILES


def test_two_fetches_of_one_version_do_not_meet(target, settings, folder, monkeypatch):
    monkeypatch.setattr(fallback, "WAIT", 0)
    place = Fake("git", [FILES])
    with hold(folder, what="fetch elsewhere"), pytest.raises(BuildBusy, match="fetch elsewhere"):
        get(target, settings, place)
    assert place.calls == 0


def test_an_unwritable_cache_is_told_as_such(target, settings):
    settings.cache.parent.mkdir(parents=True, exist_ok=True)
    settings.cache.write_text("a file", encoding="utf-8")
    with pytest.raises(OutputUnwritable):
        get(target, settings, Fake("git", [FILES]))


# a folder


def test_a_given_folder_is_used_in_place_and_never_changed(target, settings, tmp_path):
    root = write_tree(tmp_path / "mine", FILES)
    tree = fetch_source(target, settings, source=str(root))
    assert tree.root == root
    assert tree.origin == f"folder {root}"
    assert contents(root) == FILES
    assert not settings.cache.exists()


def test_a_given_folder_needs_its_blob_ids_too(target, settings, tmp_path):
    root = write_tree(tmp_path / "mine", {**FILES, CPP: b"patched\n"})
    with pytest.raises(BlobMismatch):
        fetch_source(target, settings, source=str(root))
    assert not fetch_source(target, settings, source=str(root), allow_unverified=True).verified
    assert contents(root)[CPP] == b"patched\n"


def test_a_folder_that_is_not_there_or_is_a_file(target, settings, tmp_path):
    with pytest.raises(SourceUnreachable, match="no such folder"):
        fetch_source(target, settings, source=str(tmp_path / "gone"))
    (tmp_path / "archive.tar").write_bytes(b"")
    with pytest.raises(SourceUnreachable, match="unpack it"):
        fetch_source(target, settings, source=str(tmp_path / "archive.tar"))


@pytest.mark.parametrize("version", [b"2.7.0a0\n", b"2.6.01\n", b"2.6.0.1\n", b"12.6.0\n"])
def test_a_folder_of_another_version_is_the_wrong_tree(target, settings, tmp_path, version):
    root = write_tree(tmp_path / "mine", {**FILES, "version.txt": version})
    with pytest.raises(WrongTree, match=version.decode().strip()):
        fetch_source(target, settings, source=str(root), allow_unverified=True)


@pytest.mark.parametrize("version", [b"2.6.0\n", b"2.6.0a0+git2236df1\n"])
def test_what_follows_the_numbers_of_a_version_does_not_count(target, settings, tmp_path, version):
    root = write_tree(tmp_path / "mine", {**FILES, "version.txt": version})
    assert fetch_source(target, settings, source=str(root), allow_unverified=True).root == root


def test_a_folder_without_pytorch_is_the_wrong_tree(target, settings, tmp_path):
    with pytest.raises(WrongTree, match="torch/csrc"):
        fetch_source(target, settings, source=str(write_tree(tmp_path / "x", {"setup.py": b""})))


# git, with another fetch in its place


def test_git_tells_the_commit_and_hides_the_password(target, tmp_path):
    def fetch(url, tag, *, repo, tree, folders, timeout):
        assert (url, tag, tuple(folders)) == ("https://me:secret@host/p.git", "v2.6.0", SPARSE)
        write_tree(tree, FILES)
        return "c0ffee"

    answer = GitSource("https://me:secret@host/p.git", fetch=fetch).provide(target, SPARSE, tmp_path)
    assert answer == Provided(tmp_path / "tree", "git https://host/p.git at c0ffee")


@pytest.mark.parametrize(
    "error",
    [
        CommandFailed("could not fetch", tail="fatal: unable to access https://me:secret@host/p.git"),
        PrerequisiteMissing("git cannot be used: Bad git executable."),
    ],
)
def test_git_that_fails_is_a_reason_not_an_error(target, tmp_path, error):
    def fetch(url, tag, *, repo, tree, folders, timeout):
        raise error

    answer = GitSource("https://me:secret@host/p.git", fetch=fetch).provide(target, SPARSE, tmp_path)
    assert isinstance(answer, Unavailable)
    assert answer.place == "git https://host/p.git, tag v2.6.0"
    assert answer.reason.startswith(error.value)
    assert "secret" not in answer.reason


def test_git_on_a_full_disk(target, tmp_path):
    def fetch(url, tag, *, repo, tree, folders, timeout):
        raise CommandFailed("could not fetch", tail="fatal: write error: No space left on device")

    with pytest.raises(DiskFull):
        GitSource("u", fetch=fetch).provide(target, SPARSE, tmp_path)


# small things


def test_last_words_are_what_the_program_said_of_its_failure():
    assert last_words(CommandFailed("could not x", tail="Get:1\nE: bad\nW: hm\nE: worse\n")) == (
        "could not x: E: bad / E: worse"
    )
    assert last_words(CommandFailed("could not x", tail="\nonly this \n\n")) == "could not x: only this"
    assert last_words(CommandFailed("could not x")) == "could not x"


def test_passwords_are_left_out_of_urls():
    assert without_password("https://u:p@host:1/x.git") == "https://host:1/x.git"
    assert without_password("git@host:x.git") == "git@host:x.git"
    assert without_password("file:///a/b") == "file:///a/b"
