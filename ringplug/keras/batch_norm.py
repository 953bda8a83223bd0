"""Batch normalisation over the batches of all ranks."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import ops

from ringplug.backend import runtime
from ringplug.backend.buffers import ReduceOp
from ringplug.backend.errors import UsageError
from ringplug.backend.fusion import TensorSpec
from ringplug.keras import step
from ringplug.keras.dtypes import numpy_dtype
from ringplug.keras.exchange import DenseExchange, Meter
from ringplug.keras.latch import OF_LAYERS
from ringplug.keras.naming import without_counters
from ringplug.keras.options import ranks_of

__all__ = ["SyncBatchNormalization"]


@keras.saving.register_keras_serializable(package="ringplug")
class SyncBatchNormalization(keras.layers.BatchNormalization):
    """`keras.layers.BatchNormalization` with the statistics of all ranks' batches together.

    In training, outputs, gradients and moving statistics are those of one process with the whole
    batch, whose parts may differ in size from rank to rank, even be empty; masks are respected.
    Every rank must call the layer equally often. Without training, and in a world of one, it is
    the layer of Keras. Works on all backends of Keras, in eager and compiled steps.

    Per call, ranks exchange two numbers per channel, once forward and once backward.

    A model with this layer is saved under its name, and loads where ``ringplug.keras`` is
    imported.

    Args:
        fused: Must be False: Horovod's argument, of Keras 2's fused kernels.
        process_set: Whose batches; None: all ranks'. Saved as the list of ranks.
        ranks: That list, when a model is loaded.
        **kwargs: As for ``keras.layers.BatchNormalization``, without `synchronized`.

    Raises:
        UsageError: `fused` is not False, or `synchronized` is.
    """

    def __init__(
        self,
        fused: bool | None = False,
        process_set: Any = None,
        ranks: Any = None,
        **kwargs: Any,
    ) -> None:
        if fused is not False:
            raise UsageError("SyncBatchNormalization does not support fused=True")
        if kwargs.pop("synchronized", True) is not True:
            raise UsageError("SyncBatchNormalization(synchronized=False): that is what it is for")
        super().__init__(**kwargs)
        self._ranks = ranks_of(process_set) if ranks is None else tuple(ranks)
        self._exchanges = Exchanges()

    def get_config(self) -> dict[str, Any]:
        config: dict[str, Any] = super().get_config()
        del config["synchronized"]
        if self._ranks is not None:
            config["ranks"] = list(self._ranks)
        return config

    def _moments(self, inputs: Any, mask: Any) -> Any:
        world = runtime.current().world
        ranks = tuple(range(world.size)) if self._ranks is None else self._ranks
        if world.rank not in ranks or len(ranks) == 1:
            return super()._moments(inputs, mask)
        count, mean, squares = self._own_moments(inputs, mask)
        row = ops.concatenate([ops.reshape(count, (1,)), mean, squares])
        # Each rank fills its own row of a table; the sum of the tables has all of them. Means
        # and squares around them are combined without a loss of digits to large means.
        at = ranks.index(world.rank)
        table = ops.pad(row[None], [[at, len(ranks) - 1 - at], [0, 0]])
        pair = self._exchanges.pair(self, tuple(table.shape), table.dtype, self._ranks)
        table = step.summed(pair, table)
        channels = mean.shape[0]
        counts = table[:, :1]
        means, squares = table[:, 1 : channels + 1], table[:, channels + 1 :]
        total = ops.maximum(ops.sum(counts), 1)
        mean = ops.sum(means * counts, axis=0) / total
        squares = ops.sum(squares + counts * ops.square(means - mean), axis=0)
        return mean, squares / total

    def _own_moments(self, inputs: Any, mask: Any) -> tuple[Any, Any, Any]:
        """Number of samples, mean, and sum of squares around it, per channel."""
        axes = self._reduction_axes
        if mask is None:
            sizes = [ops.shape(inputs)[axis] for axis in axes]
            count = ops.cast(ops.prod(ops.stack(sizes)), inputs.dtype)
            weights = None
        else:
            weights = ops.cast(ops.expand_dims(mask, -1), "bool")
            weights = ops.broadcast_to(weights, ops.shape(inputs))
            inputs = ops.where(weights, inputs, 0)
            marked = ops.cast(weights, inputs.dtype)
            count = ops.max(ops.sum(marked, axes))
        at_least_one = ops.maximum(count, 1)
        mean = ops.sum(inputs, axes, keepdims=True) / at_least_one
        distance = inputs - mean
        if weights is not None:
            distance = ops.where(weights, distance, 0)
        squares = ops.sum(ops.square(distance), axes)
        return count, ops.reshape(mean, (-1,)), squares


class Exchanges:
    """The exchanges of one layer: one pair for each shape of its table."""

    def __init__(self) -> None:
        self._pairs: dict[Any, tuple[DenseExchange, DenseExchange]] = {}

    def pair(
        self, layer: Any, shape: tuple[int, ...], dtype: Any, ranks: tuple[int, ...] | None
    ) -> tuple[DenseExchange, DenseExchange]:
        """The exchange of the statistics, and that of their gradients."""
        kind: np.dtype[Any] = numpy_dtype(dtype)
        key = (shape, kind)
        if key not in self._pairs:
            name = without_counters(layer.path or layer.name)
            spec = [TensorSpec("statistics", shape, kind)]
            forward, backward = (
                DenseExchange(
                    Meter(OF_LAYERS), spec, f"{what} of {name}", ReduceOp.SUM, "none", ranks
                )
                for what in ("statistics", "gradients of the statistics")
            )
            self._pairs[key] = (forward, backward)
        return self._pairs[key]
