"""ringplug for TensorFlow 2: Horovod's names, in eager code, in ``tf.function`` and under XLA.

::

    import ringplug.tensorflow as ring

    ring.init()

    @tf.function
    def step(x, y, first):
        with tf.GradientTape() as tape:
            loss = loss_of(model(x, training=True), y)
        tape = ring.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        if first:
            ring.broadcast_variables(model.variables, root_rank=0)
            ring.broadcast_variables(optimizer.variables, root_rank=0)
        return loss

For ``model.fit`` there is ``ringplug.keras``, also under the name ``ringplug.tensorflow.keras``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ringplug.tensorflow import elastic, mpi_ops
from ringplug.tensorflow.compression import (
    BF16Compressor,
    Compression,
    Compressor,
    FP16Compressor,
    NoneCompressor,
)
from ringplug.tensorflow.functions import (
    BroadcastGlobalVariablesHook,
    allgather_object,
    broadcast_global_variables,
    broadcast_object,
    broadcast_object_fn,
    broadcast_variables,
)
from ringplug.tensorflow.mpi_ops import *  # noqa: F403 - all that __all__ has from there
from ringplug.tensorflow.optimizer import DistributedOptimizer
from ringplug.tensorflow.tape import DistributedGradientTape, PartialDistributedGradientTape

if TYPE_CHECKING:
    from ringplug.keras.batch_norm import SyncBatchNormalization as SyncBatchNormalization

__all__ = [
    *mpi_ops.__all__,
    "BF16Compressor",
    "BroadcastGlobalVariablesHook",
    "Compression",
    "Compressor",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "FP16Compressor",
    "NoneCompressor",
    "PartialDistributedGradientTape",
    "SyncBatchNormalization",
    "allgather_object",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
    "elastic",
]


def __getattr__(name: str) -> Any:
    # A Keras layer: Keras is imported when it is asked for.
    if name == "SyncBatchNormalization":
        from ringplug.keras.batch_norm import SyncBatchNormalization as layer

        return layer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
