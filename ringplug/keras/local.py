"""Variables that belong to one rank: their gradients and values are not exchanged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from ringplug.backend.errors import UsageError

__all__ = ["LocalVariables", "variables_of"]


class LocalVariables:
    """The variables, and the layers whose trainable weights, stay on each rank."""

    def __init__(self) -> None:
        self._variables: list[Any] = []
        self._layers: list[Any] = []

    def add(self, variable: Any) -> None:
        """Make a variable local: Keras' own, or one of the backend."""
        variables_of(variable)
        self._variables.append(variable)

    def add_layers(self, layers: Sequence[Any]) -> None:
        """Make the trainable weights of layers local; the layers need not be built yet."""
        self._layers += layers

    def among(self, variables: Sequence[Any]) -> frozenset[int]:
        """Which of `variables` are local, by their indices."""
        if not self._variables and not self._layers:
            return frozenset()
        weights = [weight for layer in self._layers for weight in layer.trainable_weights]
        known = {key for variable in [*self._variables, *weights] for key in _keys(variable)}
        return frozenset(i for i, v in enumerate(variables) if not known.isdisjoint(_keys(v)))


def variables_of(given: Any) -> list[Any]:
    """A variable, or several, as a list.

    Raises:
        UsageError: Something else is among them.
    """
    found = [given] if is_variable(given) or not isinstance(given, (list, tuple, set)) else given
    for one in found:
        if not is_variable(one):
            raise UsageError(f"a variable is expected, not {type(one).__name__}: {one!r}")
    return list(found)


def is_variable(value: Any) -> bool:
    """Whether it is a Keras variable, or one of TensorFlow or torch."""
    return hasattr(value, "assign") or type(value).__name__ == "Parameter"


def _keys(variable: Any) -> set[int]:
    """Identities: a Keras variable may be named by the backend's variable below it."""
    below = getattr(variable, "_value", None) if isinstance(variable, keras.Variable) else None
    return {id(variable)} if below is None else {id(variable), id(below)}
