"""A JSON array on disk that is complete after every write. Layer 1."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence

__all__ = ["TraceFile"]

_CLOSING = b"\n]\n"


class TraceFile:
    """A growing JSON array, one event on a line.

    Every write replaces the closing bracket by further events and a new closing bracket, in one
    call, so whoever reads the file at any time, or after the process was killed, finds an array
    that is whole. (A kill within the microseconds of that call can cut it short.) A file that
    grew to its limit makes room: it is kept under another name, in the place of the one before.

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
        self._header = list(header)
        self._limit = limit
        self._file, self._end = -1, 0
        self._open()

    @property
    def full(self) -> bool:
        """Whether it is time to `make_room`."""
        # A device, such as /dev/null, keeps nothing and must not be renamed.
        return self._end >= self._limit and stat.S_ISREG(os.fstat(self._file).st_mode)

    def append(self, events: Sequence[str]) -> None:
        """Add events, each one line of JSON.

        Raises:
            OSError: They could not all be written; the file is as it was before.
        """
        data = b",\n" + ",\n".join(events).encode() + _CLOSING
        at = self._end - len(_CLOSING)
        try:
            _write(self._file, data, at)
        except OSError:
            os.ftruncate(self._file, at)
            _write(self._file, _CLOSING, at)
            raise
        self._end = at + len(data)

    def make_room(self) -> None:
        """Keep what there is as `earlier` and begin anew under the same name.

        Raises:
            OSError: That could not be done.
        """
        before = self._file
        os.replace(self.path, self.earlier)
        self._open()
        os.close(before)

    def close(self) -> None:
        """The array is complete already; only lets the file go."""
        os.close(self._file)

    def _open(self) -> None:
        # Without a reader, opening a pipe would wait for one.
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NONBLOCK
        file = os.open(self.path, flags, 0o666)
        data = b"[\n" + ",\n".join(self._header).encode() + _CLOSING
        try:
            _write(file, data, 0)
        except OSError:
            os.close(file)
            raise
        self._file, self._end = file, len(data)


def _write(file: int, data: bytes, at: int) -> None:
    while data:
        written = os.pwrite(file, data, at)
        data, at = data[written:], at + written
