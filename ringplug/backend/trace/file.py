"""A JSON array on disk that is whole at any time. Layer 1."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Sequence

__all__ = ["TraceFile"]

_PAGE = 4096
_ROOM = 64 * _PAGE


class TraceFile:
    """A growing JSON array, one event on a line.

    The closing bracket lies ahead, at the beginning of a page, with spaces before it, which
    events replace. An event does not cross the border of a page (unless its name is longer than
    that), and every call of the system writes into one page, which the kernel does as a whole
    even when the process is being killed. So the file is an array that is whole after each
    call, and whatever pages a reader sees earlier than others. Only when the bracket moves on,
    every 256 KiB, there is a moment without one.

    A file that grew to its limit makes room: it is kept under another name, in the place of the
    one before.

    Args:
        path: Overwritten.
        header: The first events, at least one; those of every file that takes over, too.
        limit: Bytes after which the file is `full`.

    Raises:
        OSError: It cannot be written.
    """

    def __init__(self, path: str, header: Sequence[str], limit: int) -> None:
        self.path = path
        root, extension = os.path.splitext(path)
        self.earlier = f"{root}.earlier{extension}"
        self._start = ("[\n" + ",\n".join(header)).encode()
        self._limit = limit
        self._file = self._at = self._bracket = -1
        self._open()

    @property
    def full(self) -> bool:
        """Whether it is time to `make_room`."""
        # A device, such as /dev/null, keeps nothing and must not be renamed.
        return self._at >= self._limit and self._regular

    def append(self, events: Sequence[str]) -> None:
        """Add events, each one line of JSON.

        Raises:
            OSError: They could not all be written; the array is whole.
        """
        data = b""
        for event in events:
            text = b",\n" + event.encode()
            if self._at % _PAGE + len(data) + len(text) > _PAGE:
                self._fill(data)
                self._at += -self._at % _PAGE
                data = b""
            data += text
        self._fill(data)

    def make_room(self) -> None:
        """Keep what there is as `earlier` and begin anew under the same name.

        Raises:
            OSError: That could not be done.
        """
        before = self._file
        self._finish()
        os.replace(self.path, self.earlier)
        self._open()
        os.close(before)

    def close(self) -> None:
        """Cut off the spaces and let the file go."""
        try:
            self._finish()
        finally:
            os.close(self._file)

    @property
    def _regular(self) -> bool:
        return stat.S_ISREG(os.fstat(self._file).st_mode)

    def _open(self) -> None:
        # Without a reader, opening a pipe would wait for one.
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NONBLOCK
        file = os.open(self.path, flags, 0o666)
        try:
            _write(file, self._start.ljust(_ROOM) + b"]\n", 0)
        except OSError:
            os.close(file)
            raise
        self._file, self._at, self._bracket = file, len(self._start), _ROOM

    def _fill(self, data: bytes) -> None:
        """Put events, all in one page, in the place of spaces."""
        if not data:
            return
        if self._at + len(data) > self._bracket:
            _write(self._file, b" " * _ROOM, self._bracket + 1)
            _write(self._file, b" ", self._bracket)
            self._bracket += _ROOM
            _write(self._file, b"]", self._bracket)
        try:
            _write(self._file, data, self._at)
        except OSError:
            _write(self._file, b" " * len(data), self._at)
            raise
        self._at += len(data)

    def _finish(self) -> None:
        if self._regular:
            os.ftruncate(self._file, self._at)
            _write(self._file, b"\n]\n", self._at)


def _write(file: int, data: bytes, at: int) -> None:
    if os.pwrite(file, data, at) < len(data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
