"""Loading, pickling and copying of distributed optimizers and of models that have one."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from ringplug.backend.buffers import Array, ReduceOp
from ringplug.keras.optimizer import DistributedOptimizer, swap
from ringplug.keras.progress import restore
from ringplug.keras.reduce import Options, Reduction

__all__ = ["load_model", "pickled", "unpickle"]


def load_model(
    path: Any,
    custom_objects: dict[str, Any] | None = None,
    compression: str | None = None,
    *,
    name: str | None = None,
    op: ReduceOp = ReduceOp.AVERAGE,
    gradient_predivide_factor: float = 1.0,
    sparse_as_dense: bool = False,
    **kwargs: Any,
) -> Any:
    """Load a saved model and make its optimizer distributed.

    Every rank loads the file, or one that was saved alike; `BroadcastGlobalVariablesCallback`
    then makes sure of equal states. The learning rate is taken as it was saved: it is not
    scaled again.

    Args:
        path: What ``keras.models.load_model`` takes.
        custom_objects: As there.
        compression: As for `DistributedOptimizer`, like `name`, `op`,
            `gradient_predivide_factor` and `sparse_as_dense`.
        name: See there.
        op: See there.
        gradient_predivide_factor: See there.
        sparse_as_dense: See there.
        **kwargs: For ``keras.models.load_model``.

    Returns:
        The model; one that was saved uncompiled, or is loaded with ``compile=False``, has no
        optimizer to distribute.
    """
    model = keras.models.load_model(path, custom_objects=custom_objects, **kwargs)
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None:
        # LossScaleOptimizer is part of what was compiled, so nothing new is put around it.
        model.optimizer = DistributedOptimizer(
            optimizer,
            name=name,
            compression=compression,
            op=op,
            gradient_predivide_factor=gradient_predivide_factor,
            sparse_as_dense=sparse_as_dense,
            scale_lr=None,
        )
        model.train_function = None
    return model


def pickled(optimizer: Any) -> tuple[Any, tuple[dict[str, Any], Options, float, list[Array]]]:
    """What `pickle` and `copy` keep of a distributed optimizer: its slots too."""
    config = keras.saving.serialize_keras_object(optimizer)
    values = [np.array(keras.ops.convert_to_numpy(v)) for v in optimizer.variables]
    return unpickle, (config, optimizer.ringplug.options, optimizer.ringplug.scaled, values)


def unpickle(config: dict[str, Any], options: Options, scaled: float, values: list[Array]) -> Any:
    """The optimizer that `pickled` kept: distributed, with its learning rate as it was.

    Slots belong to variables, which a copy does not know; they are set when it is built.
    """
    optimizer = keras.saving.deserialize_keras_object(config, safe_mode=False)
    swap(optimizer, options)
    reduction: Reduction = optimizer.ringplug
    reduction.scaled = scaled
    restore(optimizer, values)
    return optimizer
