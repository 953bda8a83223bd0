"""What a training step asks of the backend: lists of gradients, reduced over the ranks.

An exchange is fixed by its tensors' shapes and dtypes. It is made while a step is traced, or in
an eager step, and called with numpy views of the framework's memory while the step runs. All
traffic of steps uses one lane of its own, so that it cannot meet a callback's.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ringplug.backend import runtime
from ringplug.backend.buffers import Array, ReduceOp, scale_into
from ringplug.backend.errors import MismatchError
from ringplug.backend.fusion import TensorSpec, digest
from ringplug.backend.lane import Lane
from ringplug.backend.plan import Plan
from ringplug.backend.transport import Transport
from ringplug.keras.latch import Latch

__all__ = ["DenseExchange", "Meter", "SparseExchange", "gather_numbers", "mark", "step_lane"]

_lanes: weakref.WeakKeyDictionary[Any, dict[Any, Lane]] = weakref.WeakKeyDictionary()


def step_lane(ranks: tuple[int, ...] | None = None) -> Lane:
    """The lane of compiled steps; made on first use, which is collective over its ranks.

    Args:
        ranks: Whose lane, this rank among them; None: all ranks'.
    """
    current = runtime.current()
    lanes = _lanes.setdefault(current, {})
    if ranks not in lanes:
        name = "keras" if ranks is None else f"keras of ranks {', '.join(map(str, ranks))}"
        lanes[ranks] = current.lane(name, ranks)
    return lanes[ranks]


def mark(what: str, ranks: tuple[int, ...] | None = None) -> None:
    """Say on the lane of steps where this rank is; its own steps have run.

    Args:
        what: The place that all ranks must have reached.
        ranks: Whose lane; None: all ranks'.

    Raises:
        MismatchError: On every rank, when another is elsewhere: in the gradients of a step,
            for example.
    """
    text = (
        f"{what} (the ranks have unequal numbers of batches or epochs: give them equal shards "
        "or pass steps_per_epoch; or training stopped on one rank only: see "
        "StopTogetherCallback)"
    )
    signature = digest(text)
    step_lane(ranks).run(lambda transport: transport.agree(signature, text), what)


def gather_numbers(mine: int, ranks: tuple[int, ...] | None = None) -> list[int]:
    """A number of every rank, over the lane of steps.

    Args:
        mine: 64 bits.
        ranks: Whose lane; None: all ranks'.
    """
    what = "comparison of numbers"

    def job(transport: Transport) -> list[int]:
        transport.agree(digest(what), what)
        found = np.empty(transport.size, np.int64)
        transport.allgather(np.array([mine], np.int64), found, [1] * transport.size)
        return [int(number) for number in found]

    return step_lane(ranks).run(job, what)


class Meter:
    """What became of one optimizer's reductions.

    Attributes:
        updates: Reductions of gradients that have been completed.
        latch: The first error of a reduction, until it is raised.

    Args:
        latch: One that others share; an own one by default.
    """

    def __init__(self, latch: Latch | None = None) -> None:
        self.updates = 0
        self.latch = Latch() if latch is None else latch

    def run(self, work: Callable[[], None], counts: bool) -> None:
        """Do `work` unless an error waits; latch what it raises, and raise it."""
        earlier = self.latch.waiting()
        if earlier is not None:
            raise earlier
        try:
            work()
        except BaseException as error:
            self.latch.put(error)
            raise
        if counts:
            self.updates += 1


class DenseExchange:
    """Reduces a fixed list of tensors, all at once."""

    def __init__(
        self,
        meter: Meter,
        specs: Sequence[TensorSpec],
        name: str,
        op: ReduceOp,
        compression: Any,
        ranks: tuple[int, ...] | None = None,
    ) -> None:
        self.meter = meter
        self.specs = tuple(specs)
        self._ranks = ranks
        self._name = name
        self._op = op
        self._compression = compression
        self._plan: Plan | None = None
        self._runtime: object = None

    def __call__(self, sources: Sequence[Array], targets: Sequence[Array]) -> None:
        """Reduce `sources` into `targets`, which may be the same arrays.

        Raises:
            RingplugError: What the plan raises; kept in the meter's latch as well.
        """
        self.meter.run(lambda: self._current().run(sources, targets), self._op != ReduceOp.MAX)

    def _current(self) -> Plan:
        current = runtime.current()
        if self._plan is None or self._runtime is not current:
            self._plan = current.plan(
                self.specs,
                name=self._name,
                op=self._op,
                compression=self._compression,
                lane=step_lane(self._ranks),
            )
            self._runtime = current
        return self._plan


class SparseExchange:
    """Gathers one sparse gradient: rows and their indices, of every rank, in rank order.

    One update has several of them, and at most one of these counts as the update.

    The sum over ranks of sparse gradients is exactly the sparse gradient with all their rows.
    """

    def __init__(
        self,
        meter: Meter,
        row: tuple[int, ...],
        dtype: str,
        name: str,
        op: ReduceOp,
        ranks: tuple[int, ...] | None = None,
        counts: bool = False,
    ) -> None:
        self._ranks = ranks
        self._counts = counts
        self.meter = meter
        self.row = row
        self._name = name
        self._op = op
        self._dtype = dtype

    @property
    def size(self) -> int:
        """How many ranks take part."""
        return runtime.current().world.size if self._ranks is None else len(self._ranks)

    def __call__(self, values: Array, indices: Array) -> tuple[Array, Array]:
        """All ranks' rows, divided by the number of ranks for an average, and their indices.

        Args:
            values: ``[rows, *row]``; the number of rows may differ between ranks.
            indices: ``[rows]``, the same integer type on all ranks.
        """
        gathered: list[Array] = []
        self.meter.run(lambda: gathered.extend(self._gather(values, indices)[:2]), self._counts)
        return gathered[0], gathered[1]

    def into(self, sources: Sequence[Array], targets: Sequence[Array]) -> None:
        """The same with memory for the result, where it must be known beforehand.

        Raises:
            MismatchError: Ranks have different numbers of rows, which needs a result of
                another size than the compiled program has.
        """

        def work() -> None:
            all_values, all_indices, rows = self._gather(*sources)
            # Seen alike by all ranks, so all of them raise.
            if len(set(rows)) > 1:
                raise MismatchError(
                    f"{self._name}: ranks have {', '.join(map(str, rows))} rows, and a program "
                    "compiled with jit_compile=True needs the same number on all. Give all ranks "
                    "batches of one size, or use DistributedOptimizer(..., sparse_as_dense=True) "
                    "or jit_compile=False"
                )
            targets[0][...] = all_values
            targets[1][...] = all_indices

        self.meter.run(work, self._counts)

    def _gather(self, values: Array, indices: Array) -> tuple[Array, Array, list[int]]:
        factor = 1.0 / self.size if self._op == ReduceOp.AVERAGE else 1.0
        width = int(np.prod(self.row, dtype=np.int64))
        what = f"gather of {self._name}: rows {self.row} {self._dtype}, {indices.dtype}"
        signature = digest(what)

        def job(transport: Transport) -> tuple[Array, Array, list[int]]:
            transport.agree(signature, what)
            mine = np.array([len(indices)], np.int64)
            counts = np.empty(transport.size, np.int64)
            transport.allgather(mine, counts, [1] * transport.size)
            rows = [int(count) for count in counts]
            all_values = np.empty(sum(rows) * width, values.dtype)
            flat = np.ascontiguousarray(values).reshape(-1)
            transport.allgather(flat, all_values, [count * width for count in rows])
            all_indices = np.empty(sum(rows), indices.dtype)
            transport.allgather(np.ascontiguousarray(indices), all_indices, rows)
            scale_into(all_values, factor, all_values)
            return all_values.reshape(-1, *self.row), all_indices, rows

        return step_lane(self._ranks).run(job, self._name)
