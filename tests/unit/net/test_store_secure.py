"""What a file has to be for a store in secure mode."""

from __future__ import annotations

import contextlib
import functools
import os

import pytest

pytest.importorskip("torch")

from multiworld._net.stores import store
from multiworld._net.stores.secure import check_file
from multiworld._net.stores.store import open_store
from multiworld.errors import InvalidJoinError

ANOTHER = 4321
"""Id of a user."""


@pytest.fixture
def secure(monkeypatch):
    monkeypatch.setattr(store, "current", object)


@pytest.fixture
def usual_umask():
    before = os.umask(0o022)
    yield
    os.umask(before)


def check(path):
    opened = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        check_file(str(path), opened, "w")
    finally:
        os.close(opened)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("mode", [0o755, 0o1777])
def test_the_folder_of_another_user_is_refused(tmp_path, mode):
    folder = tmp_path / "theirs"
    folder.mkdir()
    folder.chmod(mode)
    check(folder / "store")
    os.chown(folder, ANOTHER, ANOTHER)
    with pytest.raises(InvalidJoinError, match=rf"{folder} is of user {ANOTHER}") as caught:
        check(folder / "store")
    assert "folder of your own" in caught.value.next_step


@pytest.mark.parametrize("loose", ["of the link", "of the file"])
def test_a_links_folder_and_that_of_its_file_are_both_looked_at(tmp_path, loose):
    folders = {each: tmp_path / each for each in ("of the link", "of the file")}
    for folder in folders.values():
        folder.mkdir()
    link = folders["of the link"] / "store"
    link.symlink_to(folders["of the file"] / "store")
    check(link)
    folders[loose].chmod(0o777)
    with pytest.raises(InvalidJoinError, match="has the mode 0777") as caught:
        check(link)
    assert str(folders[loose]) in caught.value.next_step
    folders[loose].chmod(0o1777)
    check(link)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("mode", [0o755, 0o777])
def test_all_folders_on_the_path_are_looked_at(tmp_path, mode):
    """A user who can rename one of them can put another one in its place."""
    above, own = tmp_path / "above", tmp_path / "above" / "own"
    own.mkdir(parents=True)
    check(own / "store")
    above.chmod(mode)
    if mode == 0o755:
        os.chown(above, ANOTHER, ANOTHER)
    with pytest.raises(InvalidJoinError, match=rf"its folder {above} (is of user|has the mode)"):
        check(own / "store")
    os.chown(above, os.geteuid(), -1)
    above.chmod(0o1777)
    check(own / "store")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_the_sticky_bit_keeps_nothing_of_others_in_its_place(tmp_path):
    tmp_path.chmod(0o1777)
    (tmp_path / "folder").mkdir()
    link = tmp_path / "link"
    link.symlink_to("folder")
    check(link / "store")
    os.chown(link, ANOTHER, ANOTHER, follow_symlinks=False)
    with pytest.raises(
        InvalidJoinError, match=rf"{tmp_path} has the mode 1777, and link in it is of user {ANOTHER}"
    ):
        check(link / "store")


def test_links_that_lead_to_links_are_looked_at(tmp_path):
    own, loose = tmp_path / "own", tmp_path / "loose"
    for folder in (own, loose):
        folder.mkdir()
    (own / "link").symlink_to("../loose/second")
    (loose / "second").symlink_to(own / "store")
    check(own / "link")
    loose.chmod(0o777)
    with pytest.raises(InvalidJoinError, match=f"its folder {loose} has the mode 0777"):
        check(own / "link")


def test_a_join_has_the_links_of_its_address_looked_at(tmp_path, secure):
    (tmp_path / "own").mkdir()
    loose = tmp_path / "loose"
    loose.mkdir()
    (loose / "link").symlink_to(tmp_path / "own")
    opened = functools.partial(open_store, f"file://{loose}/link/store", world="w", serve=True, deadline=0.0)
    opened().close()
    loose.chmod(0o777)
    with pytest.raises(InvalidJoinError, match=f"its folder {loose} has the mode 0777"):
        opened()


def test_each_join_looks_at_the_file_also_where_another_world_holds_the_store(tmp_path, secure, usual_umask):
    """It may have been removed: torch makes it anew then, and lets all users read it."""
    path = tmp_path / "store"
    opened = functools.partial(open_store, f"file://{path}", world="w", serve=True, deadline=0.0)
    with contextlib.closing(opened()) as held:
        path.unlink()
        with contextlib.closing(opened()) as another:
            assert another.store is held.store
            assert path.stat().st_mode & 0o777 == 0o600
        path.unlink()
        held.store.set("key", "value")
        assert path.stat().st_mode & 0o777 == 0o644, "torch's"
        with pytest.raises(InvalidJoinError, match="mode 0644"):
            opened()
    path.unlink()
    with contextlib.closing(opened()) as new:
        assert new.store is not held.store, "no hold is left"
