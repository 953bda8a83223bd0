"""The output of ranks: each line tagged with its rank, the last ones kept, files if asked for."""

from __future__ import annotations

import contextlib
import os
import re
import time
import tty
from collections import deque
from pathlib import Path
from typing import BinaryIO

__all__ = ["Console", "Stream", "launcher_lines", "open_streams"]

_KEPT = 50
_CHUNK = 2**16
# How launchers mark lines of ranks on other hosts: Open MPI, MPICH.
_MARK = re.compile(rb"\[\d+,(\d+)\]<(stdout|stderr)>: ?|^\[(\d+)\] ")


class Console:
    """Writes tagged lines, whole, to ringrun's own streams and to files by rank.

    Args:
        out: For standard output.
        err: For standard error.
        folder: Where files by rank go, too, without tags.
        timestamps: Put the time before each tagged line.
    """

    def __init__(
        self, out: BinaryIO, err: BinaryIO, folder: Path | None = None, timestamps: bool = False
    ) -> None:
        self._targets = {"stdout": out, "stderr": err}
        self._timestamps = timestamps
        self._folder = folder
        self._files: dict[tuple[int, str], BinaryIO] = {}
        self._tails: dict[int, deque[str]] = {}

    def line(self, rank: int, stream: str, line: bytes) -> None:
        """Show one line (without its end) of a rank; rank -1 is the launcher itself."""
        # What a terminal would show of a progress bar that redraws its line.
        shown = line.rstrip(b"\r").rpartition(b"\r")[2]
        target = self._targets[stream]
        if rank < 0:
            target.write(shown + b"\n")
        else:
            now = time.strftime("%Y-%m-%d %H:%M:%S ").encode() if self._timestamps else b""
            target.write(b"%s[%d] %s\n" % (now, rank, shown))
            self._tails.setdefault(rank, deque(maxlen=_KEPT)).append(shown.decode(errors="replace"))
            if self._folder is not None:
                self._file(rank, stream).write(line + b"\n")

    def _file(self, rank: int, stream: str) -> BinaryIO:
        key = (rank, stream)
        if key not in self._files:
            assert self._folder is not None
            path = self._folder / f"rank.{rank}" / stream
            path.parent.mkdir(parents=True, exist_ok=True)
            self._files[key] = path.open("wb")
        return self._files[key]

    def tail(self, rank: int) -> list[str]:
        """The last lines that a rank wrote, on either stream."""
        return list(self._tails.get(rank, ()))

    def flush(self) -> None:
        """Let all lines so far reach their readers."""
        for stream in (*self._targets.values(), *self._files.values()):
            stream.flush()

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()


class Stream:
    """The reading end of one stream of one rank; cuts what comes into lines.

    Attributes:
        descriptor: For a selector.
    """

    def __init__(self, rank: int, stream: str, descriptor: int, held: int = -1) -> None:
        self.rank = rank
        self.stream = stream
        self.descriptor = descriptor
        self._held = held
        self._rest = b""

    def read(self) -> list[bytes] | None:
        """Whole lines that have come; None at the end of the stream."""
        try:
            data = os.read(self.descriptor, _CHUNK)
        except BlockingIOError:
            return []
        except OSError:
            return None
        if not data:
            return None
        *lines, self._rest = (self._rest + data).split(b"\n")
        return lines

    def rest(self) -> list[bytes]:
        """A last line without an end, if there is one."""
        rest, self._rest = self._rest, b""
        return [rest] if rest else []

    def close(self) -> None:
        """Release the descriptors."""
        for descriptor in (self.descriptor, self._held):
            if descriptor >= 0:
                with contextlib.suppress(OSError):
                    os.close(descriptor)
        self.descriptor = self._held = -1


def open_streams(directory: Path, ranks: range, terminals: dict[str, bool]) -> list[Stream]:
    """One channel per rank and stream, under the name where the rank will look for it.

    Args:
        directory: The job's.
        ranks: Ranks on this host, or ranks that may be.
        terminals: For ``stdout`` and ``stderr``, whether ringrun's own is a terminal: then the
            rank gets one too, since programs format their output by that.
    """
    streams = []
    for rank in ranks:
        for stream in ("stdout", "stderr"):
            path = directory / f"rank.{rank}.{stream}"
            if terminals[stream]:
                ours, theirs = os.openpty()
                tty.setraw(theirs)
                path.symlink_to(os.ttyname(theirs))
                os.set_blocking(ours, False)
                # Held open, so that reading before the rank opens it is not an error.
                streams.append(Stream(rank, stream, ours, theirs))
            else:
                os.mkfifo(path, 0o600)
                # Open for writing too: without a writer a pipe reads as ended.
                streams.append(Stream(rank, stream, os.open(path, os.O_RDWR | os.O_NONBLOCK)))
    return streams


def launcher_lines(line: bytes, stream: str) -> list[tuple[int, str, bytes]]:
    """Split a line of the launcher's output at its marks: rank (-1: its own), stream, text."""
    marks = list(_MARK.finditer(line))
    if not marks:
        return [(-1, stream, line)]
    parts = [(-1, stream, line[: marks[0].start()])] if marks[0].start() else []
    for mark, following in zip(marks, [*marks[1:], None], strict=True):
        text = line[mark.end() : following.start() if following else len(line)]
        parts.append((int(mark[1] or mark[3]), (mark[2] or stream.encode()).decode(), text))
    return parts
