"""From the gradients that reach an optimizer to the exchanges that reduce them."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from ringplug.backend import runtime
from ringplug.backend.buffers import Array, ReduceOp
from ringplug.backend.errors import UsageError
from ringplug.backend.fusion import TensorSpec
from ringplug.keras import step
from ringplug.keras.dtypes import numpy_dtype
from ringplug.keras.exchange import DenseExchange, Meter, SparseExchange
from ringplug.keras.fingerprint import MARKS, fingerprint

__all__ = ["Options", "Reduction"]

_UNMARKED = np.zeros(MARKS, np.float32)


@dataclass(frozen=True)
class Options:
    """What `DistributedOptimizer` was asked for; see there."""

    name: str | None = None
    compression: str | None = None
    op: ReduceOp = ReduceOp.AVERAGE
    gradient_predivide_factor: float = 1.0
    sparse_as_dense: bool = False

    def __post_init__(self) -> None:
        if self.compression not in (None, "none", "fp16", "bf16"):
            raise UsageError(
                f"compression={self.compression!r}: expected None, 'none', 'fp16' or 'bf16'"
            )
        if self.op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
            raise UsageError(f"op={self.op!r}: gradients can be combined by Average or Sum")
        if self.gradient_predivide_factor <= 0:
            raise UsageError("gradient_predivide_factor must be above 0")
        if self.gradient_predivide_factor != 1.0 and self.op != ReduceOp.AVERAGE:
            raise UsageError("gradient_predivide_factor needs op=Average")


class Reduction:
    """The reductions of one optimizer.

    Attributes:
        options: What the user asked for.
        meter: Counts and errors.
        scaled: By how much the learning rate was multiplied because of the world's size.
        checked: Optimizer iterations and completed reductions when they were last compared.
        target: The learning rates that an unfinished warm-up leads to.
        compared: Whether the ranks' weights were compared before the first update; eager only.
        pending: What the optimizer's variables are to be once it is built.
    """

    def __init__(self, options: Options, label: str) -> None:
        self.options = options
        self.meter = Meter()
        self.scaled = 1.0
        self.checked: tuple[int, int] | None = None
        self.target: list[float] | None = None
        self.compared = False
        self.pending: Sequence[Array] = ()
        self._label = options.name or label
        self._exchanges: dict[Any, Any] = {}

    @property
    def active(self) -> bool:
        """Whether there is anybody to exchange gradients with."""
        return runtime.current().world.size > 1

    @step.uncompiled
    def reduce(
        self, gradients: Sequence[Any], variables: Sequence[Any] | None, overwritten: bool = True
    ) -> list[Any]:
        """The gradients, combined over all ranks.

        Args:
            gradients: Tensors, arrays, IndexedSlices, or None where there is no gradient.
            variables: Which variable each belongs to. None: gradients are dense and complete,
                and nothing is known about variables.
            overwritten: Variables that Keras overwrites with their gradients (float8 scales)
                are combined as well, by their maximum.

        Returns:
            As `gradients`; a gradient that is missing here and present on another rank is
            present everywhere.
        """
        result = list(gradients)
        known = variables if variables is not None else [None] * len(result)
        fill, maxima, sparse = [], [], []
        for index, variable in enumerate(known):
            gradient = result[index]
            if gradient is not None and not step.is_tensor(gradient):
                dtype = None if variable is None else variable.dtype
                gradient = result[index] = keras.ops.convert_to_tensor(gradient, dtype=dtype)
            if getattr(variable, "overwrite_with_gradient", False):
                if gradient is not None:
                    maxima.append(index)
            elif gradient is not None and step.is_sparse(gradient):
                sparse.append(index)
            else:
                fill.append(index)
        if self.options.sparse_as_dense:
            for index in sparse:
                result[index] = step.densify(result[index])
            fill, sparse = sorted(fill + sparse), []
        self._dense(result, known, fill, variables is not None)
        for index in sparse:
            result[index] = self._gather(index, result[index], known[index])
        if overwritten and maxima:
            exchange = self._dense_exchange(result, known, maxima, ReduceOp.MAX)
            self._store(result, maxima, step.run(exchange, [result[i] for i in maxima], []))
        return result

    @step.uncompiled
    def overwrite(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Combine only what Keras overwrites variables with; see `reduce`."""
        result = list(gradients)
        maxima = [
            index
            for index, variable in enumerate(variables)
            if getattr(variable, "overwrite_with_gradient", False) and result[index] is not None
        ]
        if maxima:
            exchange = self._dense_exchange(result, variables, maxima, ReduceOp.MAX)
            self._store(result, maxima, step.run(exchange, [result[i] for i in maxima], []))
        return result

    def _dense(
        self, result: list[Any], variables: Sequence[Any], indices: list[int], flagged: bool
    ) -> None:
        present = [index for index in indices if result[index] is not None]
        if not step.is_eager([result[index] for index in present]):
            # Which gradients exist was decided while tracing: the same on every rank, or the
            # plans differ and all ranks raise.
            if present:
                exchange = self._dense_exchange(result, variables, present, self.options.op)
                tensors = self._predivide([result[index] for index in present])
                owned = [variables[index] for index in present]
                self._store(result, present, self._postmultiply(step.run(exchange, tensors, owned)))
            return
        if not indices:
            return
        flags = np.array([result[index] is not None for index in indices], np.float32)
        marks = fingerprint(variables) if flagged and not self.compared else _UNMARKED
        for index in indices:
            if result[index] is None:
                variable = variables[index]
                result[index] = keras.ops.zeros(variable.shape, variable.dtype)
        exchange = self._dense_exchange(result, variables, indices, self.options.op, flagged)
        tensors = self._predivide([result[index] for index in indices])
        owned = [variables[index] for index in indices]
        if flagged:
            both = np.concatenate([flags, marks])
            reduced, combined = step.run_flagged(exchange, tensors, owned, both)
            counts = combined[: len(flags)]
            if not self.compared:
                self._compare(marks, combined[len(flags) :])
        else:
            reduced, counts = step.run(exchange, tensors, owned), flags
        self._store(result, indices, self._postmultiply(reduced))
        for index, count in zip(indices, counts, strict=True):
            if count == 0:
                result[index] = None

    def _compare(self, mine: Array, combined: Array) -> None:
        """Warn, once, where ranks came to their first update with other weights."""
        self.compared = True
        world = runtime.current().world
        expected = mine * world.size if self.options.op == ReduceOp.SUM else mine
        if world.rank == 0 and not np.array_equal(expected, combined):
            warnings.warn(
                "the ranks start from different weights and will keep different models: pass "
                "BroadcastGlobalVariablesCallback (or callbacks.default()) to fit, or call "
                "broadcast_global_variables(0, model) before the first step",
                stacklevel=2,
            )

    def _store(self, result: list[Any], indices: Sequence[int], values: Sequence[Any]) -> None:
        for index, value in zip(indices, values, strict=True):
            result[index] = value

    def _predivide(self, tensors: list[Any]) -> list[Any]:
        factor = self.options.gradient_predivide_factor
        return tensors if factor == 1.0 else [tensor / factor for tensor in tensors]

    def _postmultiply(self, tensors: list[Any]) -> list[Any]:
        factor = self.options.gradient_predivide_factor
        return tensors if factor == 1.0 else [tensor * factor for tensor in tensors]

    def _dense_exchange(
        self,
        tensors: Sequence[Any],
        variables: Sequence[Any],
        indices: Sequence[int],
        op: ReduceOp,
        flagged: bool = False,
    ) -> DenseExchange:
        # Described once: looking at hundreds of Keras variables takes milliseconds.
        kinds = tuple((tensors[index].shape, tensors[index].dtype) for index in indices)
        key = (op, flagged, kinds)
        found: DenseExchange | None = self._exchanges.get(key)
        if found is None:
            specs = []
            for position, index in enumerate(indices):
                variable = variables[index]
                shape = (tensors[index] if variable is None else variable).shape
                name = f"{position}:{_name(variable)}"
                specs.append(TensorSpec(name, tuple(shape), numpy_dtype(tensors[index].dtype)))
            if flagged:
                specs.append(TensorSpec("present", (len(indices) + MARKS,), np.dtype(np.float32)))
            compression = self.options.compression if op != ReduceOp.MAX else "none"
            name = f"gradients of {self._label}" if op != ReduceOp.MAX else f"fp8 of {self._label}"
            found = DenseExchange(self.meter, specs, name, op, compression)
            self._exchanges[key] = found
        return found

    def _gather(self, index: int, gradient: Any, variable: Any) -> Any:
        row = tuple(variable.shape[1:])
        dtype = numpy_dtype(gradient.dtype).name
        key = (index, row, dtype)
        if key not in self._exchanges:
            name = f"sparse gradient {index}:{_name(variable)} of {self._label}"
            self._exchanges[key] = SparseExchange(self.meter, row, dtype, name, self.options.op)
        return step.gather(self._exchanges[key], gradient)


def _name(variable: Any) -> str:
    """A variable's path without Keras' counters, which may differ between ranks."""
    path = getattr(variable, "path", None) or getattr(variable, "name", None) or "tensor"
    return re.sub(r"_\d+(?=/|:|$)", "", str(path))
