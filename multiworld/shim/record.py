"""RECORD of an installed distribution, edited by line: other rows keep their bytes and order."""

from __future__ import annotations

import base64
import csv
import hashlib
import io

from multiworld.errors import InstallError

__all__ = ["Record", "digest"]


def digest(data: bytes) -> str:
    """Return a file's hash as RECORD writes it: ``sha256=`` and URL-safe base64 without padding."""
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


class Record:
    """The rows of a RECORD (PEP 376, PEP 627): path, hash, size.

    pip writes CRLF, wheels and uv LF, and not every file ends its last line: rows that are added follow the
    file's own habit, rows that are not touched stay as they are, byte by byte. A file whose last line has no
    end has none after a change either, so that taking the change back gives the same bytes.

    Args:
        data: the file's bytes.
        where: its path, for messages.

    Raises:
        InstallError: it is no RECORD.
    """

    def __init__(self, data: bytes, where: str = "RECORD") -> None:
        self._where = where
        try:
            self._lines = data.decode("utf-8").splitlines(keepends=True)
        except UnicodeDecodeError as exc:
            raise self._unreadable("is not UTF-8") from exc
        self._end = "\r\n" if self._lines and self._lines[0].endswith("\r\n") else "\n"
        self._paths = [self._path_of(line) for line in self._lines]
        self._ended = not self._lines or self._lines[-1].endswith(("\n", "\r"))
        if not self._ended:
            self._lines[-1] += self._end

    @property
    def data(self) -> bytes:
        """The file's bytes now."""
        text = "".join(self._lines)
        if not self._ended:
            text = text.removesuffix("\n").removesuffix("\r")
        return text.encode()

    def line(self, path: str) -> str | None:
        """Return a row as it stands in the file, with a line end; None without one."""
        return self._lines[self._paths.index(path)] if path in self._paths else None

    def says(self, path: str, data: bytes) -> bool:
        """Whether there is one row of the path, with this content's hash and size."""
        rows = [line for line, at in zip(self._lines, self._paths, strict=True) if at == path]
        return len(rows) == 1 and next(csv.reader(rows))[1:] == [digest(data), str(len(data))]

    def put(self, path: str, data: bytes) -> None:
        """Write the row of a file: in its place, or at the end."""
        buffer = io.StringIO()
        csv.writer(buffer, lineterminator=self._end).writerow((path, digest(data), len(data)))
        self.restore(path, buffer.getvalue())

    def restore(self, path: str, line: str | None) -> None:
        """Put back a row as `line` gave it; None takes the path's rows away."""
        if line is not None and not line.endswith(("\n", "\r")):  # m8d 1.0.0 and older kept it without
            line += self._end
        if line is None:
            kept = [(row, at) for row, at in zip(self._lines, self._paths, strict=True) if at != path]
            self._lines, self._paths = [row for row, _ in kept], [at for _, at in kept]
        elif path in self._paths:
            first = self._paths.index(path)
            self.restore(path, None)
            self._lines.insert(first, line)
            self._paths.insert(first, path)
        else:
            self._lines.append(line)
            self._paths.append(path)

    def below(self, folder: str) -> tuple[str, ...]:
        """Return the paths that stand below a folder."""
        return tuple(path for path in self._paths if path.startswith(f"{folder}/"))

    def __contains__(self, path: str) -> bool:
        return path in self._paths

    def _path_of(self, line: str) -> str:
        try:
            row = next(csv.reader([line], strict=True), [])
        except csv.Error as exc:
            raise self._unreadable(f"has a line that cannot be read: {line.strip()!r}") from exc
        if not row:
            return ""
        if len(row) != 3:
            raise self._unreadable(f"has a line with {len(row)} fields: {line.strip()!r}")
        return row[0].replace("\\", "/")

    def _unreadable(self, what: str) -> InstallError:
        return InstallError(
            f"{self._where} {what}",
            rule="RECORD has a path, a hash and a size in each line",
            next_step="Install torch again",
        )
