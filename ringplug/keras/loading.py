"""Loading, pickling and copying of distributed optimizers and of models that have one."""

from __future__ import annotations

import io
from typing import Any

import keras

from ringplug.backend.buffers import ReduceOp
from ringplug.keras.optimizer import DistributedOptimizer, distributed_class
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


def pickled(optimizer: Any) -> tuple[Any, tuple[bytes, Options, float]]:
    """What `pickle` and `copy` keep of a distributed optimizer."""
    from keras.src.saving import saving_lib

    buffer = io.BytesIO()
    saving_lib._save_model_to_fileobj(optimizer, buffer, "h5")
    options: Options = type(optimizer)._ringplug_options
    return unpickle, (buffer.getvalue(), options, optimizer.ringplug.scaled)


def unpickle(saved: bytes, options: Options, scaled: float) -> Any:
    """The optimizer that `pickled` kept: distributed, with its learning rate as it was."""
    from keras.src.saving import saving_lib

    optimizer = saving_lib._load_model_from_fileobj(
        io.BytesIO(saved), custom_objects=None, compile=True, safe_mode=False
    )
    base = type(optimizer)
    optimizer.__class__ = distributed_class(base, options)
    reduction = Reduction(options, base.__name__)
    reduction.scaled = scaled
    object.__setattr__(optimizer, "_ringplug_state", reduction)
    return optimizer
