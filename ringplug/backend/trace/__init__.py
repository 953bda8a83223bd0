"""The timeline: what this rank did when, as events of a Chrome trace. Layer 1.

Whoever does something puts an entry into a queue, which never waits; a writer thread turns
entries into events of balanced spans (`spans`) and writes them (`recording`, `file`). Without a
recording there is no thread, no queue, and one attribute to look at::

    if (recording := timeline.recording) is not None:
        recording.begin(name, kind, dtype, shape)
"""

from __future__ import annotations

import os
import threading

from ringplug.backend.errors import ConfigError, UsageError
from ringplug.backend.trace.recording import Recording

__all__ = ["Recording", "Timeline"]


class Timeline:
    """One rank's timeline, recorded or not.

    Args:
        rank: This rank.
        size: Number of ranks.

    Attributes:
        recording: Takes events while a timeline is recorded on this rank, else None.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.recording: Recording | None = None
        self._rank = rank
        self._size = size
        self._running = ""
        self._lock = threading.Lock()

    def start(self, file_path: str | os.PathLike[str], mark_cycles: bool = False) -> None:
        """Begin to record; see `ringplug.start_timeline`.

        Raises:
            UsageError: A timeline is being recorded already, or the file cannot be written.
        """
        path = os.fspath(file_path)
        if not isinstance(path, str) or not path:
            raise UsageError(f"timeline: expected the path of a file, got {file_path!r}")
        with self._lock:
            if self._running:
                raise UsageError(
                    f"a timeline is being recorded already, to {self._running}; call "
                    "stop_timeline() first"
                )
            own = path.replace("{rank}", str(self._rank))
            if self._rank == 0 or own != path:
                about = {"rank": self._rank, "size": self._size}
                try:
                    self.recording = Recording(own, mark_cycles, about)
                except OSError as error:
                    raise UsageError(f"timeline {own}: {error.strerror or error}") from error
            self._running = own

    def follow_setting(self, timeline: str, mark_cycles: bool) -> None:
        """Begin as the settings say: ``DYNAMIC`` waits for `start`, nothing means never.

        Raises:
            ConfigError: The file cannot be written.
        """
        if timeline and timeline.upper() != "DYNAMIC":
            try:
                self.start(timeline, mark_cycles)
            except UsageError as error:
                raise ConfigError(str(error)) from error

    def stop(self) -> None:
        """End the recording and complete its file; see `ringplug.stop_timeline`.

        Raises:
            UsageError: No timeline is being recorded.
        """
        if not self.close():
            raise UsageError("no timeline is being recorded; call start_timeline() first")

    def close(self) -> bool:
        """End the recording, if there is one; whether there was."""
        with self._lock:
            running, self._running = self._running, ""
            recording, self.recording = self.recording, None
            if recording is not None:
                recording.close()
        return bool(running)
