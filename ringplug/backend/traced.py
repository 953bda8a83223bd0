"""What operations look like in a timeline. Layer 4.

Horovod's names: an operation begins with its kind in capitals; inside, it waits in a ``QUEUE``,
its tensors are copied to and from the buffer in which they travel
(``MEMCPY_IN_FUSION_BUFFER``, ``MEMCPY_OUT_FUSION_BUFFER``), and in between the transport works
(``RING_ALLREDUCE``, for example).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from ringplug.backend.buffers import Buffer
from ringplug.backend.fusion import Bucket, TensorSpec
from ringplug.backend.trace import Recording, Timeline
from ringplug.backend.transport import Piece, Transport

__all__ = ["COPY_IN", "COPY_OUT", "QUEUE", "PlanTrace", "traced"]

QUEUE = "QUEUE"
COPY_IN = "MEMCPY_IN_FUSION_BUFFER"
COPY_OUT = "MEMCPY_OUT_FUSION_BUFFER"
_OTHERS = "WAIT_FOR_OTHER_TENSOR_DATA"
_RANKS = "WAIT_FOR_DATA"
_ENDINGS = {
    "allgather": "ALLGATHER",
    "allreduce": "ALLREDUCE",
    "alltoall": "ALLTOALL",
    "barrier": "BARRIER",
    "broadcast": "BCAST",
    "reducescatter": "REDUCESCATTER",
}


def traced(
    transport: Transport, recording: Recording, names: Sequence[str], after: str = ""
) -> Transport:
    """`transport`, for one job: its collectives are activities of the operations `names`.

    Args:
        transport: Not changed.
        recording: Where they are recorded.
        names: Operations that have begun there.
        after: What the operations do once a collective is over; nothing else by default.
    """
    return cast(Transport, _Traced(transport, recording, names, after))


class _Traced:
    def __init__(
        self, transport: Transport, recording: Recording, names: Sequence[str], after: str
    ) -> None:
        self._transport, self._recording = transport, recording
        self._names, self._after = names, after

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._transport, name)
        ending = _ENDINGS.get(name)
        if ending is None:
            return found

        def call(*arguments: Any, **options: Any) -> None:
            what = f"{self._transport.name.upper()}_{ending}"
            self._recording.activity(self._names, what)
            found(*arguments, **options)
            if self._after:
                self._recording.activity(self._names, self._after)

        return call


class PlanTrace:
    """Records a plan's steps, where a timeline is recorded.

    A plan negotiates nothing. A tensor's operation begins when it is ready; it waits for the
    tensors that share its bucket, for its turn, and, in a step's first bucket, for the ranks.

    Args:
        timeline: This rank's.
        specs: The plan's tensors.
        buckets: What travels together.
    """

    def __init__(
        self, timeline: Timeline, specs: Sequence[TensorSpec], buckets: Sequence[Bucket]
    ) -> None:
        self._timeline = timeline
        self._specs = specs
        self._names = [spec.name for spec in specs]
        indices = [sorted({slot.index for slot in bucket.slots}) for bucket in buckets]
        self._members = [[self._names[index] for index in each] for each in indices]
        # A large tensor ends with the last bucket that has a part of it.
        last = {index: number for number, each in enumerate(indices) for index in each}
        self._ending: list[list[str]] = [[] for _ in buckets]
        for index, number in last.items():
            self._ending[number].append(self._names[index])

    def ready(self, index: int) -> None:
        """A tensor is there."""
        if (recording := self._timeline.recording) is not None:
            self._begin(recording, index)
            recording.activity(self._names[index : index + 1], _OTHERS)

    def launched(self, number: int) -> None:
        """A bucket is full and waits for its turn."""
        if (recording := self._timeline.recording) is not None:
            recording.activity(self._members[number], QUEUE)

    def all_ready(self) -> None:
        """All tensors are there at once, and their turn has come."""
        if (recording := self._timeline.recording) is not None:
            for index in range(len(self._specs)):
                self._begin(recording, index)
            recording.activity(self._names, QUEUE)

    def meeting(self) -> None:
        """This rank waits for the others to come to this step."""
        if (recording := self._timeline.recording) is not None:
            recording.cycle()
            if self._members:
                recording.activity(self._members[0], _RANKS)

    def copies(
        self,
        number: int,
        carrier: str,
        fill: Piece,
        drain: Piece,
        inside: Callable[[slice], Sequence[int]],
    ) -> tuple[Piece, Piece]:
        """`fill` and `drain` of a bucket, which from now on belongs to the transport.

        Args:
            number: The bucket.
            carrier: Name of the transport.
            fill: Copies into the buffer.
            drain: Copies out of it.
            inside: Indices of the tensors that have a part in a place of the bucket.
        """
        recording = self._timeline.recording
        if recording is None:
            return fill, drain
        moves = f"{carrier.upper()}_ALLREDUCE"

        def shown(copy: Piece, what: str) -> Piece:
            def copies(memory: Buffer, place: slice) -> None:
                names = [self._names[index] for index in inside(place)]
                recording.activity(names, what)
                copy(memory, place)
                recording.activity(names, moves)

            return copies

        return shown(fill, COPY_IN), shown(drain, COPY_OUT)

    def reduced(self, number: int) -> None:
        """A bucket is done; parts of its tensors may be in later ones."""
        if (recording := self._timeline.recording) is not None:
            recording.end(self._ending[number])
            recording.activity(self._members[number], QUEUE)

    def over(self) -> None:
        """The step has ended, well or not."""
        if (recording := self._timeline.recording) is not None:
            recording.end(self._names)

    def _begin(self, recording: Recording, index: int) -> None:
        spec = self._specs[index]
        recording.begin(spec.name, "allreduce", spec.dtype, spec.shape)
