"""``horovod.tensorflow.util``: the one name of it that scripts and tests borrow."""

from __future__ import annotations

from importlib import import_module

__all__ = ["_executing_eagerly"]


def _executing_eagerly() -> bool:
    """Whether TensorFlow operations run at once here, rather than become part of a graph."""
    return bool(import_module("tensorflow").executing_eagerly())
