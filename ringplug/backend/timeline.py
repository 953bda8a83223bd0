"""Recording a timeline while a program runs. Layer 7."""

from __future__ import annotations

import os

from ringplug.backend.runtime import current

__all__ = ["start_timeline", "stop_timeline"]


def start_timeline(file_path: str | os.PathLike[str], mark_cycles: bool = False) -> None:
    """Begin to record a timeline, a Chrome trace of all operations from now on.

    Ranks may call this at different times, or only some of them: it says nothing to the
    others. Rank 0 writes; the other ranks too where `file_path` has ``{rank}`` in it. A program
    whose timeline was started by ``RINGPLUG_TIMELINE`` must stop it first.

    Args:
        file_path: The file, which is overwritten; ``{rank}`` in it stands for this rank.
        mark_cycles: Whether to mark rounds of named operations and steps of plans with
            ``CYCLE_START``.

    Raises:
        UsageError: A timeline is being recorded already, or the file cannot be written.
        NotInitializedError: Before `ringplug.init`.
    """
    current().timeline.start(file_path, mark_cycles)


def stop_timeline() -> None:
    """End the recording; the file is complete when this returns.

    Raises:
        UsageError: No timeline is being recorded.
        NotInitializedError: Before `ringplug.init`.
    """
    current().timeline.stop()
