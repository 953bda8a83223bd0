"""What one named lane tells the timeline. Layer 1."""

from __future__ import annotations

from collections.abc import Sequence

from ringplug.backend.handle import Handle
from ringplug.backend.trace import Timeline

__all__ = ["Operations"]


class Operations:
    """The operations of one named lane; does nothing while no timeline is recorded.

    Args:
        timeline: This rank's.
        own_rank: This rank where others decide, None where this rank hears of all requests.
        where: Tells apart operations of the same name in other lanes; empty for all ranks'.
    """

    def __init__(self, timeline: Timeline, own_rank: int | None, where: str = "") -> None:
        self.timeline = timeline
        self._own_rank = own_rank
        self._where = f" in {where}" if where else ""

    def track(self, name: str) -> str:
        """What the timeline calls an operation."""
        return name + self._where

    def submitted(self, kind: str, handle: Handle) -> None:
        """This rank asks for an operation."""
        recording = self.timeline.recording
        if recording is None:
            return
        track = self.track(handle.name)
        if self._own_rank is not None:
            recording.tick(track, kind, self._own_rank)

        def given_up() -> None:
            # What runs is ended where it runs: by now, the next of its name may have begun.
            if handle.exception() is not None or kind == "join":
                recording.end((track,))

        handle.then(given_up)

    def asked(self, rank: int, name: str, kind: str) -> None:
        """A rank's request has come in."""
        if (recording := self.timeline.recording) is not None:
            recording.tick(self.track(name), kind, rank)

    def agreed(
        self, name: str, kind: str, dtypes: Sequence[str], shapes: Sequence[Sequence[int]]
    ) -> None:
        """An operation is about to run, in its turn."""
        if (recording := self.timeline.recording) is not None:
            shape = shapes[0] if len(shapes) == 1 else [list(each) for each in shapes]
            recording.begin(self.track(name), kind, ", ".join(dtypes), shape)
            recording.activity((self.track(name),), "QUEUE")

    def dropped(self, name: str) -> None:
        """Nobody waits for an operation any more."""
        if (recording := self.timeline.recording) is not None:
            recording.end((self.track(name),))

    def round(self) -> None:
        """This rank lets operations begin, on all ranks."""
        if (recording := self.timeline.recording) is not None:
            recording.cycle()
