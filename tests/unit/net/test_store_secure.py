"""What a file has to be for a store in secure mode."""

from __future__ import annotations

import os

import pytest

pytest.importorskip("torch")

from multiworld._net.stores.secure import check_file
from multiworld.errors import InvalidJoinError

ANOTHER = 4321
"""Id of a user."""


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
