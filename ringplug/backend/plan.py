"""The hot lane: a fixed list of tensors, agreed once, reduced every step. Layer 5.

Tensors may become ready in any order on each rank; buckets leave in plan order on all. That
order is a contract, so a step negotiates nothing: one small check that all ranks run the same
plan, then the buckets; or one for each bucket where they leave one by one.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import numpy as np

from ringplug.backend.buffers import Array, Buffer, ReduceOp, check_reducible, neutral_array
from ringplug.backend.compression import Compressor
from ringplug.backend.config import Config
from ringplug.backend.errors import UsageError
from ringplug.backend.fusion import TensorSpec, digest, make_buckets
from ringplug.backend.handle import Handle
from ringplug.backend.lane import Lane
from ringplug.backend.trace import Timeline
from ringplug.backend.traced import PlanTrace
from ringplug.backend.transport import Transport

__all__ = ["Plan"]


class Plan:
    """A fixed list of tensors that every rank reduces together, step after step.

    Args:
        lane: Where it runs; plans that share a lane must run in the same order on every rank.
        specs: The tensors, in the order in which they are expected to become ready. The same
            on every rank.
        name: For errors.
        op: AVERAGE, SUM, MIN, MAX or PRODUCT.
        compressor: What the wire carries.
        config: Bucket sizes.
        timeline: Shows its steps.
    """

    def __init__(
        self,
        lane: Lane,
        specs: Sequence[TensorSpec],
        name: str,
        op: ReduceOp,
        compressor: Compressor,
        config: Config,
        timeline: Timeline,
    ) -> None:
        for spec in specs:
            check_reducible(spec.dtype, op)
        size = lane.transport.size
        self.specs = tuple(specs)
        self.name = name
        self.lane = lane
        self._compressor = compressor
        self._op = op
        self._size = size
        self.buckets = make_buckets(
            self.specs, config.fusion_bytes, config.first_bucket_bytes, compressor.wire_dtype
        )
        self.description = self._describe()
        self._signature = digest(self.description)
        self._layout: dict[tuple[int, int, int], list[tuple[int, slice, slice]]] = {}
        self._shown = PlanTrace(timeline, self.specs, self.buckets)
        self._members = [{slot.index for slot in bucket.slots} for bucket in self.buckets]
        self._begin()
        lane.partner(self._signature, self._follow)
        # Buckets that leave one by one are agreed on one by one: those of another plan, whose
        # tensors become ready in the same backward pass, may come between.
        self._tickets = [_Ticket(self, number) for number in range(len(self.buckets))]

    def _follow(self, transport: Transport) -> None:
        """This rank has joined: it contributes neutral values to a step of the others."""
        for number in range(len(self.buckets)):
            self.follow(transport, number)

    def follow(self, transport: Transport, number: int) -> None:
        """As a rank that has joined, contribute neutral values to one bucket of the others."""
        flat: list[Buffer | None] = [None] * len(self.specs)
        for index in self._members[number]:
            spec = self.specs[index]
            flat[index] = neutral_array(spec.shape, spec.dtype, self._op).reshape(-1)
        self._reduce(transport, number, flat, flat)

    # -- everything at once

    def run(self, sources: Sequence[Array], targets: Sequence[Array]) -> None:
        """Reduce all tensors, on the calling thread.

        Args:
            sources: This rank's C-contiguous arrays, as the specs say; not written.
            targets: C-contiguous arrays for the results; ``targets[i]`` may be
                ``sources[i]``.

        Raises:
            UsageError: An array is not what its spec says.
            MismatchError: On every rank, when the ranks' plans differ.
            RecoverableError: A rank is gone or late.
        """
        if len(sources) != len(self.specs) or len(targets) != len(self.specs):
            raise UsageError(
                f"{self.name}: {len(self.specs)} tensors are planned, got {len(sources)} sources "
                f"and {len(targets)} targets"
            )
        flat_sources = [self._flat(i, array) for i, array in enumerate(sources)]
        flat_targets = [self._flat(i, array) for i, array in enumerate(targets)]

        def job(transport: Transport) -> None:
            self._shown.all_ready()
            self._meet(transport)
            for number in range(len(self.buckets)):
                self._reduce(transport, number, flat_sources, flat_targets)

        try:
            self.lane.run(job, self.name)
        finally:
            self._shown.over()

    # -- as they become ready

    def ready(self, index: int, array: Array) -> None:
        """One tensor is ready; it is reduced in place once its bucket's turn has come.

        Args:
            index: Which of the specs.
            array: C-contiguous; belongs to the plan until `finish` returns.

        Raises:
            UsageError: It is not what its spec says, or was made ready twice.
        """
        if self._arrays[index] is not None:
            raise UsageError(
                f"{self.name}: tensor {self.specs[index].name} became ready twice in one step"
            )
        self._arrays[index] = self._flat(index, array)
        self._shown.ready(index)
        for missing in self._missing:
            missing.discard(index)
        while self._launched < len(self.buckets) and not self._missing[self._launched]:
            self._launch(self._launched)
            self._launched += 1

    def finish(self) -> None:
        """Wait until every tensor of this step is reduced.

        Raises:
            UsageError: Some tensor never became ready; names them. The lane ends with it, on
                all ranks.
            MismatchError, RecoverableError: As `run` raises them.
        """
        absent = [s.name for s, a in zip(self.specs, self._arrays, strict=True) if a is None]
        handles = self._handles
        self._begin()
        try:
            for handle in handles:
                handle.wait()
        finally:
            self._shown.over()
        if absent:
            shown = ", ".join(absent[:10]) + (" and more" if len(absent) > 10 else "")
            error = f"{self.name}: {len(absent)} tensors never became ready: {shown}"
            # Other ranks may have sent what this one did not: they must not go on waiting.
            self.lane.abandon(error)
            raise UsageError(error)

    def discard(self) -> bool:
        """Forget what became ready in this step, if nothing has left yet; whether so."""
        if self._launched:
            return False
        self._begin()
        self._shown.over()
        return True

    def pending(self) -> list[int]:
        """Indices of the tensors that are not ready yet in this step."""
        return [index for index, array in enumerate(self._arrays) if array is None]

    def _begin(self) -> None:
        self._arrays: list[Buffer | None] = [None] * len(self.specs)
        self._missing = [set(members) for members in self._members]
        self._handles: list[Handle] = []
        self._launched = 0

    def _launch(self, number: int) -> None:
        arrays = self._arrays
        earlier = self._handles[-1:]

        def job(transport: Transport) -> None:
            # What failed (a disagreement, on all ranks) ends the step: its other buckets would
            # not fit together.
            for handle in earlier:
                handle.wait()
            if number == 0:
                self._shown.meeting()
            self._tickets[number].meet(transport)
            self._reduce(transport, number, arrays, arrays)

        self._shown.launched(number)
        self._handles.append(self.lane.submit(job, f"{self.name} bucket {number}"))

    def _meet(self, transport: Transport) -> None:
        self._shown.meeting()
        transport.agree(self._signature, self.description)

    # -- one bucket

    def _reduce(
        self,
        transport: Transport,
        number: int,
        sources: Sequence[Buffer | None],
        targets: Sequence[Buffer | None],
    ) -> None:
        codec, bucket = self._compressor, self.buckets[number]

        def fill(memory: Buffer, place: slice) -> None:
            for index, elements, where in self._parts(number, place):
                source = sources[index]
                assert source is not None
                codec.encode(source[elements], memory[where])

        def drain(memory: Buffer, place: slice) -> None:
            for index, elements, where in self._parts(number, place):
                target = targets[index]
                assert target is not None
                codec.decode(memory[where], target[elements], factor)

        wire = codec.wire_dtype(bucket.dtype)
        wire_factor, factor = (1 / self._size if self._op is ReduceOp.AVERAGE else 1.0), 1.0
        if wire != bucket.dtype and self._op is ReduceOp.SUM:
            # On a narrow wire a sum travels as the mean, which fits wherever the values do.
            wire_factor, factor = 1 / self._size, float(self._size)
        copies = self._shown.copies(number, transport.name, fill, drain, self._inside)
        transport.allreduce_stream(bucket.count, wire, self._op, wire_factor, *copies)
        self._shown.reduced(number)

    def _inside(self, number: int, place: slice) -> list[int]:
        return [index for index, _, _ in self._parts(number, place)]

    def _parts(self, number: int, place: slice) -> list[tuple[int, slice, slice]]:
        """What lies in a place of a bucket; the places are the same in every step."""
        key = (number, place.start, place.stop)
        if key not in self._layout:
            self._layout[key] = list(self.buckets[number].parts(place))
        return self._layout[key]

    def _flat(self, index: int, array: Array) -> Buffer:
        spec = self.specs[index]
        if not isinstance(array, np.ndarray):
            raise UsageError(f"{self.name}: tensor {spec.name} is no array: {type(array).__name__}")
        if array.shape != spec.shape or array.dtype != spec.dtype:
            raise UsageError(
                f"{self.name}: tensor {spec.name} is planned as {spec.dtype}{list(spec.shape)}, "
                f"got {array.dtype}{list(array.shape)}"
            )
        if not array.flags.c_contiguous:
            raise UsageError(f"{self.name}: tensor {spec.name} is not contiguous")
        return array.reshape(-1)

    def _describe(self) -> str:
        nbytes = sum(spec.size * spec.dtype.itemsize for spec in self.specs)
        head = (
            f"{self._op.name.lower()} of {self.name}: {len(self.specs)} tensors, {nbytes} bytes, "
            f"compression {self._compressor.name}, {len(self.buckets)} buckets"
        )
        lines = [
            f"tensor {index} {spec.name}: {spec.dtype}{list(spec.shape)}"
            for index, spec in enumerate(self.specs)
        ]
        return "\n".join([head, *lines])


class _Ticket:
    """What the ranks agree on before one bucket of a plan whose buckets leave one by one."""

    def __init__(self, plan: Plan, number: int) -> None:
        # Weak: the plan owns its tickets, and goes when its owner does.
        self._plan = weakref.ref(plan)
        self._number = number
        self._signature = digest(self._describe(plan))
        plan.lane.partner(self._signature, self._follow)

    def meet(self, transport: Transport) -> None:
        """Wait for the other ranks, and check that they are about to send the same bucket."""
        plan = self._plan()
        assert plan is not None
        transport.agree(self._signature, self._describe(plan))

    def _describe(self, plan: Plan) -> str:
        return f"{plan.description}\nbucket {self._number}"

    def _follow(self, transport: Transport) -> None:
        if (plan := self._plan()) is not None:
            plan.follow(transport, self._number)
