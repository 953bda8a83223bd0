"""What operations look like in a timeline. Layer 4.

Horovod's names: an operation begins with its kind in capitals; inside, it waits in a ``QUEUE``,
its tensors are copied to and from the buffer in which they travel
(``MEMCPY_IN_FUSION_BUFFER``, ``MEMCPY_OUT_FUSION_BUFFER``), and in between the transport works
(``RING_ALLREDUCE``, for example).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from ringplug.backend.buffers import Array, Buffer, ReduceOp
from ringplug.backend.execution import Work, execute
from ringplug.backend.fusion import Bucket, TensorSpec
from ringplug.backend.trace import Recording, Timeline
from ringplug.backend.trace.operations import Operations
from ringplug.backend.transport import Piece, Transport

__all__ = ["PlanTrace", "enact"]

_QUEUE = "QUEUE"
_COPY_IN = "MEMCPY_IN_FUSION_BUFFER"
_COPY_OUT = "MEMCPY_OUT_FUSION_BUFFER"
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


def enact(transport: Transport, works: Sequence[Work], operations: Operations) -> list[list[Array]]:
    """`execute`, seen by the timeline, if one is recorded."""
    recording = operations.timeline.recording
    if recording is None:
        return execute(transport, works)
    names = [operations.track(work.request.name) for work in works]
    fused = works[0].request.kind in ("allreduce", "broadcast")
    if fused:
        recording.activity(names, _COPY_IN)
    # Other reductions consist of several collectives.
    single = isinstance(works[0].op, ReduceOp) and works[0].op is not ReduceOp.ADASUM
    try:
        watched = _Traced(transport, recording, names, _COPY_OUT if fused and single else "")
        return execute(cast(Transport, watched), works)
    finally:
        recording.end(names)


class _Traced:
    """A transport whose collectives are activities of operations.

    Args:
        transport: Does the work.
        recording: Where it is recorded.
        names: Operations that have begun there.
        after: What they do once a collective is over; nothing else when empty.
    """

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
            recording.activity(self._members[number], _QUEUE)

    def all_ready(self) -> None:
        """All tensors are there at once, and their turn has come."""
        if (recording := self._timeline.recording) is not None:
            for index in range(len(self._specs)):
                self._begin(recording, index)
            recording.activity(self._names, _QUEUE)

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
        inside: Callable[[int, slice], Sequence[int]],
    ) -> tuple[Piece, Piece]:
        """`fill` and `drain` of a bucket, which from now on belongs to the transport.

        Args:
            number: The bucket.
            carrier: Name of the transport.
            fill: Copies into the buffer.
            drain: Copies out of it.
            inside: Indices of the tensors that have a part in a place of a bucket.
        """
        recording = self._timeline.recording
        if recording is None:
            return fill, drain
        moves = f"{carrier.upper()}_ALLREDUCE"

        def shown(copy: Piece, what: str) -> Piece:
            def copies(memory: Buffer, place: slice) -> None:
                names = [self._names[index] for index in inside(number, place)]
                recording.activity(names, what)
                copy(memory, place)
                recording.activity(names, moves)

            return copies

        return shown(fill, _COPY_IN), shown(drain, _COPY_OUT)

    def reduced(self, number: int) -> None:
        """A bucket is done; parts of its tensors may be in later ones."""
        if (recording := self._timeline.recording) is not None:
            recording.end(self._ending[number])
            recording.activity(self._members[number], _QUEUE)

    def over(self) -> None:
        """The step has ended, well or not."""
        if (recording := self._timeline.recording) is not None:
            recording.end(self._names)

    def _begin(self, recording: Recording, index: int) -> None:
        spec = self._specs[index]
        recording.begin(spec.name, "allreduce", spec.dtype, spec.shape)
