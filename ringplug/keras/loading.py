"""Loading, pickling and copying of distributed optimizers and of models that have one."""

from __future__ import annotations

import json
import types
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import keras
import numpy as np

from ringplug.backend.buffers import Array, ReduceOp
from ringplug.backend.errors import UsageError
from ringplug.keras.distribute import DistributedOptimizer
from ringplug.keras.hdf5 import complete_optimizer
from ringplug.keras.optimizer import Distributed, swap
from ringplug.keras.options import Options
from ringplug.keras.progress import restore
from ringplug.keras.reduce import Reduction

__all__ = ["load_model", "pickled", "unpickle"]


def load_model(  # noqa: PLR0913 - Horovod's signature, and ours
    filepath: Any,
    custom_optimizers: Iterable[type] | None = None,
    custom_objects: dict[str, Any] | None = None,
    compression: Any = None,
    legacy_opts: bool = False,
    *,
    name: str | None = None,
    op: Any = ReduceOp.AVERAGE,
    gradient_predivide_factor: float = 1.0,
    sparse_as_dense: bool = False,
    process_set: Any = None,
    **kwargs: Any,
) -> Any:
    """Load a saved model and make its optimizer distributed, of whatever class it is.

    Every rank loads the file, or one that was saved alike; `BroadcastGlobalVariablesCallback`
    then makes sure of equal states. The learning rate is taken as it was saved: it is not
    scaled again.

    Args:
        filepath: What ``keras.models.load_model`` takes.
        custom_optimizers: Classes of optimizers that Keras does not know by itself.
        custom_objects: As for Keras. A function under the name of an optimizer's class is
            called with that optimizer's configuration, and returns the optimizer.
        compression: As for `DistributedOptimizer`, like `name`, `op`,
            `gradient_predivide_factor`, `sparse_as_dense` and `process_set`.
        legacy_opts: Horovod's switch for Keras 2's older optimizers, which Keras 3 has not.
        name: See there.
        op: See there.
        gradient_predivide_factor: See there.
        sparse_as_dense: See there.
        process_set: See there.
        **kwargs: For ``keras.models.load_model``.

    Returns:
        The model; one that was saved uncompiled, or is loaded with ``compile=False``, has no
        optimizer to distribute.

    Raises:
        UsageError: `legacy_opts`.
        ValueError: From Keras: the file cannot be loaded, or has a class that is not known.
    """
    if legacy_opts:
        raise UsageError("legacy_opts=True: Keras 3 has no legacy optimizers")
    objects = {kind.__name__: kind for kind in custom_optimizers or ()}
    objects.update(custom_objects or {})
    saved = _optimizer_class(filepath) if objects else None
    if saved is not None and isinstance(objects.get(saved), types.FunctionType):
        objects[saved] = _from_function(saved, objects[saved])
    model = keras.models.load_model(filepath, custom_objects=objects or None, **kwargs)
    if getattr(model, "optimizer", None) is None:
        return model
    model.optimizer = optimizer = complete_optimizer(model, filepath)
    if isinstance(optimizer, Distributed):
        return model
    # LossScaleOptimizer is part of what was compiled, so nothing new is put around it.
    model.optimizer = DistributedOptimizer(
        optimizer,
        name=name,
        compression=compression,
        op=op,
        gradient_predivide_factor=gradient_predivide_factor,
        sparse_as_dense=sparse_as_dense,
        process_set=process_set,
        scale_lr=None,
    )
    model.train_function = None
    return model


def _optimizer_class(filepath: Any) -> str | None:
    """The class of the optimizer in a saved model, if that can be told without loading it."""
    path = Path(str(filepath))
    found: Any = None
    if path.is_file() and zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            if "config.json" in archive.namelist():
                found = json.loads(archive.read("config.json")).get("compile_config")
                found = (found or {}).get("optimizer")
    elif path.is_file() and path.suffix in (".h5", ".hdf5"):
        import h5py

        with h5py.File(path) as file:
            found = json.loads(file.attrs.get("training_config", "{}")).get("optimizer_config")
    name = found.get("class_name") if isinstance(found, dict) else None
    return name if isinstance(name, str) else None


def _from_function(name: str, make: Callable[..., Any]) -> type:
    """A class that Keras can load an optimizer by, and that calls `make` instead."""

    def from_config(config: dict[str, Any], custom_objects: Any = None) -> Any:
        del custom_objects
        rate = config.get("learning_rate")
        if isinstance(rate, dict):
            config = {**config, "learning_rate": keras.saving.deserialize_keras_object(rate)}
        return make(**config)

    return type(name, (), {"from_config": staticmethod(from_config)})


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
