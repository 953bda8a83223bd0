"""What Keras leaves out when it loads an optimizer from an HDF5 file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["complete_optimizer"]


def complete_optimizer(model: Any, filepath: Any) -> Any:
    """The model's optimizer, with the state that an HDF5 file has of it.

    Keras 3 builds it for no variable at all, where it can neither take the saved slots nor make
    a step. Any other optimizer is returned as it is.
    """
    optimizer = model.optimizer
    half_built = optimizer.built and not optimizer._trainable_variables
    if not half_built or not model.trainable_variables:
        return optimizer
    import h5py
    from keras.src.legacy.saving import legacy_h5_format

    made = type(optimizer).from_config(optimizer.get_config())
    made.build(model.trainable_variables)
    if Path(str(filepath)).is_file() and h5py.is_hdf5(filepath):
        with h5py.File(filepath) as file:
            if "optimizer_weights" in file:
                saved = legacy_h5_format.load_optimizer_weights_from_hdf5_group(file)
                values = [np.asarray(value) for value in saved]
                if [v.shape for v in values] == [tuple(v.shape) for v in made.variables]:
                    made.set_weights(values)
    return made
