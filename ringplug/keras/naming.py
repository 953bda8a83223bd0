"""The name under which Keras saves a distributed optimizer: that of the plain one.

Keras writes module, class name and registered name of an object's class into a saved model. A
distributed class shows those of its base, in the form that any Keras backend can load, so that
a saved model does not know ringplug.
"""

from __future__ import annotations

import re

import keras

__all__ = ["masquerade", "without_counters"]

_TORCH_VARIANTS = "keras.src.backend.torch.optimizers"


def masquerade(made: type, base: type) -> None:
    """Give `made` the names under which `base` is saved."""
    made.__module__ = "keras.optimizers" if _is_public(base) else base.__module__
    made.__name__ = base.__name__
    made.__qualname__ = base.__qualname__
    registered = keras.saving.get_registered_name(base)
    if registered != base.__name__:
        # The user's own optimizer. The public way to set a name would replace the class that
        # loading looks up.
        from keras.src.saving import object_registration

        object_registration.GLOBAL_CUSTOM_NAMES[made] = registered


def _is_public(base: type) -> bool:
    """Whether it is one of ``keras.optimizers``, or the variant of one for torch."""
    candidates = base.__mro__ if base.__module__.startswith(_TORCH_VARIANTS) else (base,)
    return any(getattr(keras.optimizers, kind.__name__, None) is kind for kind in candidates)


def without_counters(path: str) -> str:
    """A path without Keras' counters of equal names, which may differ between ranks."""
    return re.sub(r"_\d+(?=/|:|$)", "", path)
