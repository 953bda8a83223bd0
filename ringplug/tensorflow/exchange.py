"""The gradients of a step, reduced by a plan: no negotiation, no memory of its own."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from ringplug.backend import ops, runtime
from ringplug.backend.buffers import Array, ReduceOp
from ringplug.backend.fusion import TensorSpec
from ringplug.backend.plan import Plan
from ringplug.tensorflow import collectives
from ringplug.tensorflow.aligned import aligned_empty
from ringplug.tensorflow.bridge import Result, ordered, run
from ringplug.tensorflow.collectives import Options

__all__ = ["GradientExchange", "exchange"]

_PLANNED = (ReduceOp.AVERAGE, ReduceOp.SUM)

_plans: dict[Any, Plan] = {}
_owner: weakref.ref[Any] | None = None


def exchange(gradients: Sequence[Any], options: Options) -> list[Any]:
    """Dense gradients reduced over the ranks; gradients flow through them.

    Args:
        gradients: The same shapes and dtypes on every rank.
        options: Those of an allreduce.
    """
    scaled = (options.prescale, options.postscale) != (1.0, 1.0)
    if options.op not in _PLANNED or scaled or not ordered():
        return collectives.allreduce(gradients, options)
    job = GradientExchange(options)
    results = [Result(gradient.dtype, gradient.shape) for gradient in gradients]
    return collectives.differentiable(
        gradients,
        lambda given: run(job, given, results, "gradients"),
        lambda grads: collectives.allreduce(grads, options.back()),
    )


class GradientExchange:
    """Reduces arrays of fixed shapes; one for each list of gradients in a graph.

    The first exchange of a process set is a named operation: ranks that have joined already,
    without a single step, can take part in that. It counts the ranks; when all are there, they
    make a plan, and so does whoever comes with other shapes later. A rank that joins then knows
    the plans that the others follow.

    Args:
        options: Those of an allreduce, without factors.
    """

    def __init__(self, options: Options) -> None:
        self._options = options

    def __call__(self, sources: Sequence[Array]) -> list[Array]:
        """The arrays, reduced."""
        targets = [aligned_empty(source.shape, source.dtype) for source in sources]
        self.into(sources, targets)
        return targets

    def into(self, sources: Sequence[Array], targets: Sequence[Array]) -> None:
        """Reduce `sources` into `targets`."""
        current = runtime.current()
        if current.groups.find(self._options.process_set).plans is not None:
            self._plan(sources).run(sources, targets)
            return
        *reduced, count = ops.grouped_allreduce(
            [*sources, np.ones(1, np.float32)],
            name=self._options.name,
            op=self._options.op,
            compression=self._options.compression,
            process_set=self._options.process_set,
        )
        for target, array in zip(targets, reduced, strict=True):
            target[...] = array
        members = current.size_of(self._options.process_set)
        everybody = 1 if self._options.op is ReduceOp.AVERAGE else members
        # All ranks that took part see the same number.
        if count[0] > everybody * (1 - 0.5 / members):
            self._plan(sources)

    def _plan(self, arrays: Sequence[Array]) -> Plan:
        global _owner  # noqa: PLW0603 - what is left of a world that is gone is forgotten
        current = runtime.current()
        if _owner is None or _owner() is not current:
            _plans.clear()
            _owner = weakref.ref(current)
        options = self._options
        key = (
            options.name,
            options.op,
            options.compression,
            getattr(options.process_set, "process_set_id", options.process_set),
            *((array.shape, array.dtype) for array in arrays),
        )
        plan = _plans.get(key)
        if plan is None:
            plan = _plans[key] = current.plan(
                [TensorSpec(str(n), a.shape, a.dtype) for n, a in enumerate(arrays)],
                name=str(options.name),
                op=options.op,
                compression="none" if options.compression is None else options.compression,
                process_set=options.process_set,
            )
        return plan
