"""Stores in secure mode: which ones are refused, and what a file has to be."""

from __future__ import annotations

import dataclasses
import errno
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed

from multiworld import settings
from multiworld.errors import InvalidJoinError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from multiworld._net.stores.etcd_address import EtcdAddress

dist: Any = torch.distributed  # it exports the stores without saying so to type checkers

__all__ = ["check_etcd", "check_file", "check_object"]

_OTHERS_READ_OR_WRITE = stat.S_IRWXG | stat.S_IRWXO
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_LINKS = 40  # Linux's limit


def check_object(store: Any, world: str) -> None:
    """Refuse a torch Store that other processes reach: torch's own have no TLS.

    Raises:
        InvalidJoinError: it is refused.
    """
    inner = store
    while isinstance(inner, dist.PrefixStore):
        inner = inner.underlying_store
    if not isinstance(inner, dist.HashStore):
        raise InvalidJoinError(
            world,
            f"store={store!r}",
            rule="In secure mode (M8D_TLS_CERT is set) every connection is TLS, which torch's stores do not "
            "speak; of them only a HashStore, which is of one process, is taken",
            next_step='Give an address, such as "tcp://host:port": it is served and reached over TLS',
        )


def check_file(path: str, opened: int, world: str) -> None:
    """Refuse a file that is not the user's own alone, or that another user could replace.

    Args:
        path: absolute.
        opened: a descriptor of it.
        world: for messages.

    Raises:
        InvalidJoinError: it is refused.
    """
    found = os.fstat(opened)
    mode = stat.S_IMODE(found.st_mode)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or mode & _OTHERS_READ_OR_WRITE:
        raise InvalidJoinError(
            world,
            f"store='file://{path}' (mode {mode:04o}, user {found.st_uid})",
            rule="In secure mode (M8D_TLS_CERT is set) the file is the user's own, and others can neither "
            "read nor write it",
            next_step=f"Remove it, or chmod 600 {path}",
        )
    own = {0, os.geteuid()}
    # The store opens the path again: a user who can replace a folder or a link on it can replace the file.
    for entry in dict.fromkeys(_entries(Path(path).absolute())):
        folder = entry.parent
        of = folder.stat()
        if of.st_uid not in own:
            raise InvalidJoinError(
                world,
                f"store='file://{path}': its folder {folder} is of user {of.st_uid}",
                rule="In secure mode (M8D_TLS_CERT is set) each folder on the path is the user's own or "
                "root's: its owner can replace what is in it",
                next_step="Put the file into a folder of your own",
            )
        # The sticky bit leaves an entry to its owner, and to the folder's.
        if of.st_mode & _OTHERS_WRITE and not (of.st_mode & stat.S_ISVTX and entry.lstat().st_uid in own):
            raise InvalidJoinError(
                world,
                f"store='file://{path}': its folder {folder} has the mode {stat.S_IMODE(of.st_mode):04o}, "
                f"and {entry.name} in it is of user {entry.lstat().st_uid}",
                rule="In secure mode (M8D_TLS_CERT is set) others cannot replace the file, nor a folder or "
                "link on its path",
                next_step=f"chmod go-w {folder}, or put the file into a folder of your own",
            )


def _entries(path: Path) -> Iterator[Path]:
    """Yield each folder, link and file on the way to a file, and what the links lead to, but for `/`.

    Raises:
        OSError: there are more links than the system follows.
    """
    at, left, links = Path(path.anchor), list(reversed(path.parts[1:])), 0
    while left:
        entry = at / left.pop()
        if entry.name == "..":
            at = at.parent
            continue
        yield entry
        if not entry.is_symlink():
            at = entry
            continue
        links += 1
        if links > _LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
        target = entry.readlink()
        at = Path(target.anchor) if target.is_absolute() else at
        left += reversed(target.parts[1:] if target.is_absolute() else target.parts)


def check_etcd(address: EtcdAddress, world: str) -> EtcdAddress:
    """Return an etcd cluster's address with this process's files, where it names none.

    Raises:
        InvalidJoinError: the cluster would not know this process: neither by a certificate nor as a user.
    """
    if not address.secure:
        chosen = settings.load()
        return dataclasses.replace(address, ca=chosen.tls_ca, cert=chosen.tls_cert, key=chosen.tls_key)
    if not address.cert and not address.user:
        raise InvalidJoinError(
            world,
            f"store={str(address)!r} with ca={address.ca!r}",
            rule="In secure mode (M8D_TLS_CERT is set) the cluster knows its clients by a certificate, or by "
            "user and password",
            next_step="Give cert and key as well, or no file: then M8D_TLS_CERT, M8D_TLS_KEY and M8D_TLS_CA "
            "are used",
        )
    return address
