"""From the gradients that reach an optimizer to the exchanges that reduce them."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from ringplug.backend import runtime
from ringplug.backend.buffers import Array, ReduceOp
from ringplug.backend.fusion import TensorSpec
from ringplug.keras import step
from ringplug.keras.compression import user_compressor, wire_codec
from ringplug.keras.dtypes import numpy_dtype
from ringplug.keras.exchange import DenseExchange, Meter, SparseExchange
from ringplug.keras.fingerprint import MARKS, fingerprint
from ringplug.keras.local import LocalVariables
from ringplug.keras.naming import without_counters
from ringplug.keras.options import Options

__all__ = ["Reduction"]

_UNMARKED = np.zeros(MARKS, np.float32)


class Reduction:
    """The reductions of one optimizer.

    Attributes:
        options: What the user asked for.
        meter: Counts and errors.
        scaled: By how much the learning rate was multiplied because of the world's size.
        may_scale: Whether callbacks may still multiply it: nobody has decided about it yet.
        local: Whose gradients stay on this rank.
        checked: Optimizer iterations and completed reductions when they were last compared.
        target: The learning rates that an unfinished warm-up leads to.
        idle: Whether there was nothing to combine when that was last looked at: every variable
            is local.
        compared: Whether the ranks' weights were compared before the first update; eager only.
        pending: What the optimizer's variables are to be once it is built.
    """

    def __init__(self, options: Options, label: str) -> None:
        self.options = options
        self.meter = Meter()
        self.scaled = 1.0
        self.may_scale = False
        self.local = LocalVariables()
        self.checked: tuple[int, int] | None = None
        self.target: list[float] | None = None
        self.idle = False
        self.compared = False
        self.pending: Sequence[Array] = ()
        self._label = options.name or label
        self._exchanges: dict[Any, Any] = {}

    def take_over(self, other: Reduction) -> None:
        """Go on from another reduction, of an optimizer inside this one's."""
        self.scaled, self.may_scale = other.scaled, other.may_scale
        self.local = other.local

    @property
    def size(self) -> int:
        """How many ranks combine their gradients; 1 on a rank that trains by itself."""
        world, ranks = runtime.current().world, self.options.ranks
        if ranks is None:
            return world.size
        return len(ranks) if world.rank in ranks else 1

    @property
    def active(self) -> bool:
        """Whether there is anybody to exchange gradients with."""
        return self.size > 1

    def alone(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """What becomes of the gradients of a micro-batch where nobody is there to combine them."""
        factor = self.options.sum_factor
        if factor == 1.0:
            return list(gradients)
        return [
            gradient
            if gradient is None or getattr(variable, "overwrite_with_gradient", False)
            else step.times(gradient, factor)
            for gradient, variable in zip(gradients, variables, strict=True)
        ]

    @step.uncompiled
    def reduce(
        self,
        gradients: Sequence[Any],
        variables: Sequence[Any] | None,
        owners: Sequence[Any] | None = None,
    ) -> list[Any]:
        """The gradients, combined over all ranks.

        Args:
            gradients: Tensors, arrays, IndexedSlices, or None where there is no gradient.
            variables: Which variable each belongs to. None: gradients are dense and complete.
                Variables that Keras overwrites with their gradients (float8 scales) are
                combined as well, by their maximum.
            owners: Without `variables`, which variable each belongs to, where that is known.

        Returns:
            As `gradients`; a gradient that is missing here and present on another rank is
            present everywhere. Those of local variables are not combined.
        """
        result = list(gradients)
        known = variables if variables is not None else [None] * len(result)
        local = self.local.among(variables if variables is not None else owners or ())
        fill, maxima, sparse = [], [], []
        for index, variable in enumerate(known):
            gradient = result[index]
            if gradient is not None and not step.is_tensor(gradient):
                dtype = None if variable is None else variable.dtype
                gradient = result[index] = keras.ops.convert_to_tensor(gradient, dtype=dtype)
            if getattr(variable, "overwrite_with_gradient", False):
                if gradient is not None and index not in local:
                    maxima.append(index)
            elif index in local:
                result[index] = self._local(gradient)
            elif gradient is not None and step.is_sparse(gradient):
                sparse.append(index)
            else:
                fill.append(index)
        # What is local may differ between ranks, and is not compared.
        known = [None if index in local else variable for index, variable in enumerate(known)]
        if self.options.sparse_as_dense:
            for index in sparse:
                result[index] = step.densify(result[index])
            fill, sparse = sorted(fill + sparse), []
        self.idle = not fill and not sparse
        self._dense(result, known, fill, variables is not None)
        for position, index in enumerate(sparse):
            counts = not fill and position == 0
            gathered = self._gather(index, result[index], known[index], counts)
            factor = self.options.sum_factor
            result[index] = gathered if factor == 1.0 else step.times(gathered, factor)
        self._maxima(result, known, maxima)
        return result

    def _local(self, gradient: Any) -> Any:
        """The gradient of a variable that this rank has for itself."""
        factor = self.options.sum_factor
        if self.options.scale_local_gradients:
            factor /= self.size
        return gradient if gradient is None or factor == 1.0 else step.times(gradient, factor)

    @step.uncompiled
    def overwrite(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Combine only what Keras overwrites variables with; see `reduce`."""
        result = list(gradients)
        local = self.local.among(variables)
        maxima = [
            index
            for index, variable in enumerate(variables)
            if getattr(variable, "overwrite_with_gradient", False)
            and result[index] is not None
            and index not in local
        ]
        self._maxima(result, variables, maxima)
        return result

    def _dense(
        self, result: list[Any], variables: Sequence[Any], indices: list[int], flagged: bool
    ) -> None:
        eager = step.is_eager([result[index] for index in indices if result[index] is not None])
        if not eager:
            # Which gradients exist was decided while tracing: the same on every rank, or the
            # plans differ and all ranks raise.
            indices = [index for index in indices if result[index] is not None]
        if not indices:
            return
        flags = np.array([result[index] is not None for index in indices], np.float32)
        marks = fingerprint(variables) if eager and flagged and not self.compared else _UNMARKED
        for index in indices:
            if result[index] is None:
                variable = variables[index]
                result[index] = keras.ops.zeros(variable.shape, variable.dtype)
        owned = [variables[index] for index in indices]
        sent, contexts = self._encode([result[index] for index in indices])
        # A user's own codec makes other tensors of the gradients.
        known = owned if contexts is None else [None] * len(owned)
        flagged = flagged and eager
        exchange = self._dense_exchange(sent, known, self.options.op, flagged)
        if flagged:
            both = np.concatenate([flags, marks])
            reduced, combined = step.run_flagged(exchange, sent, known, both)
            flags = combined[: len(flags)]
            if not self.compared:
                self._compare(marks, combined[len(flags) :])
        else:
            reduced = step.run(exchange, sent, known)
        self._store(result, indices, self._decode(reduced, contexts))
        for index, count in zip(indices, flags, strict=True):
            if count == 0:
                result[index] = None

    def _compare(self, mine: Array, combined: Array) -> None:
        """Warn, once, where ranks came to their first update with other weights."""
        self.compared = True
        expected = mine * self.size if self.options.op == ReduceOp.SUM else mine
        ranks, rank = self.options.ranks, runtime.current().world.rank
        first = 0 if ranks is None else ranks[0]
        if rank == first and not np.array_equal(expected, combined):
            warnings.warn(
                "the ranks start from different weights and will keep different models: pass "
                "BroadcastGlobalVariablesCallback (or callbacks.default()) to fit, or call "
                "broadcast_global_variables(0, model) before the first step",
                stacklevel=2,
            )

    def _store(self, result: list[Any], indices: Sequence[int], values: Sequence[Any]) -> None:
        for index, value in zip(indices, values, strict=True):
            result[index] = value

    def _encode(self, tensors: list[Any]) -> tuple[list[Any], list[Any] | None]:
        """What is exchanged in place of gradients, and what a user's codec remembers of each."""
        factor = self.options.gradient_predivide_factor
        if factor != 1.0:
            tensors = [tensor / factor for tensor in tensors]
        codec = user_compressor(self.options.compression)
        if codec is None:
            return tensors, None
        pairs = [codec.compress(tensor) for tensor in tensors]
        return [payload for payload, _ in pairs], [context for _, context in pairs]

    def _decode(self, tensors: list[Any], contexts: list[Any] | None) -> list[Any]:
        codec = user_compressor(self.options.compression)
        if contexts is not None:
            tensors = [codec.decompress(t, c) for t, c in zip(tensors, contexts, strict=True)]
        factor = self.options.gradient_predivide_factor * self.options.sum_factor
        return tensors if factor == 1.0 else [tensor * factor for tensor in tensors]

    def _maxima(self, result: list[Any], variables: Sequence[Any], indices: list[int]) -> None:
        """Combine what Keras overwrites variables with: scales of float8 layers."""
        if not indices:
            return
        given, owners = [result[i] for i in indices], [variables[i] for i in indices]
        exchange = self._dense_exchange(given, owners, ReduceOp.MAX)
        self._store(result, indices, step.run(exchange, given, []))

    def _dense_exchange(
        self,
        tensors: Sequence[Any],
        variables: Sequence[Any],
        op: ReduceOp,
        flagged: bool = False,
    ) -> DenseExchange:
        # Described once: looking at hundreds of Keras variables takes milliseconds.
        kinds = tuple((tensor.shape, tensor.dtype) for tensor in tensors)
        key = (op, flagged, kinds)
        found: DenseExchange | None = self._exchanges.get(key)
        if found is None:
            specs = []
            for position, (tensor, variable) in enumerate(zip(tensors, variables, strict=True)):
                shape = (tensor if variable is None else variable).shape
                name = f"{position}:{_name(variable)}"
                specs.append(TensorSpec(name, tuple(shape), numpy_dtype(tensor.dtype)))
            if flagged:
                specs.append(TensorSpec("present", (len(tensors) + MARKS,), np.dtype(np.float32)))
            compression = wire_codec(self.options.compression) if op != ReduceOp.MAX else "none"
            name = f"gradients of {self._label}" if op != ReduceOp.MAX else f"fp8 of {self._label}"
            ranks = self.options.ranks
            found = DenseExchange(self.meter, specs, name, op, compression, ranks)
            self._exchanges[key] = found
        return found

    def _gather(self, index: int, gradient: Any, variable: Any, counts: bool) -> Any:
        row = tuple(variable.shape[1:])
        dtype = numpy_dtype(gradient.dtype).name
        key = (index, row, dtype, counts)
        if key not in self._exchanges:
            name = f"sparse gradient {index}:{_name(variable)} of {self._label}"
            op, ranks = self.options.op, self.options.ranks
            made = SparseExchange(self.meter, row, dtype, name, op, ranks, counts)
            self._exchanges[key] = made
        return step.gather(self._exchanges[key], gradient)


def _name(variable: Any) -> str:
    """What errors call a variable."""
    path = getattr(variable, "path", None) or getattr(variable, "name", None) or "tensor"
    return without_counters(str(path))
