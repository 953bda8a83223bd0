"""Horovod's ``horovod.tensorflow.elastic``, in a job of fixed size; see `ringplug.elastic`.

::

    state = ring.elastic.TensorFlowKerasState(model, optimizer, epoch=0, batch=0)

    @ring.elastic.run
    def train(state):
        for state.epoch in range(state.epoch, 10):
            ...
            state.commit()
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

from ringplug.backend.errors import CollectiveError, NotSupportedError, UsageError
from ringplug.elastic import ObjectState, State
from ringplug.elastic import run as run_state
from ringplug.tensorflow.failures import latched
from ringplug.tensorflow.functions import broadcast_variables

__all__ = ["ObjectState", "State", "TensorFlowKerasState", "TensorFlowState", "run"]

F = TypeVar("F", bound=Callable[..., Any])


def run(func: F) -> F:
    """Decorator of a training function whose first argument is a state; see `ringplug.elastic`.

    A collective that fails inside of a ``tf.function`` is known to TensorFlow by a code and a
    text only; here it becomes ringplug's error again.
    """

    @functools.wraps(func)
    def training(state: Any, *args: Any, **kwargs: Any) -> Any:
        latched.take()
        try:
            return func(state, *args, **kwargs)
        except tf.errors.OpError as error:
            cause = latched.take()
            if not isinstance(cause, CollectiveError) or str(cause) not in str(error):
                raise
            raise cause from error

    return run_state(training)  # type: ignore[return-value]


class _VariablesState(ObjectState):
    """Variables, and ordinary objects that become attributes."""

    def __init__(self, **kwargs: Any) -> None:
        if not tf.executing_eagerly():
            raise NotSupportedError("elastic states work in eager mode only")
        super().__init__(**kwargs)
        self._values: list[Any] = []
        self._save_variables()

    def _tracked(self) -> Sequence[Any]:
        raise NotImplementedError

    def save(self) -> None:
        """Keep copies of the variables' values and of the attributes."""
        self._save_variables()
        super().save()

    def restore(self) -> None:
        """Set variables and attributes to what was saved last."""
        tracked = self._tracked()
        if len(tracked) != len(self._values):
            raise UsageError(
                f"there were {len(self._values)} variables when the state was saved, and are "
                f"{len(tracked)} now"
            )
        for variable, value in zip(tracked, self._values, strict=True):
            variable.assign(value)
        super().restore()

    def sync(self) -> None:
        """Give all ranks the variables and attributes of rank 0, and save them. A collective."""
        broadcast_variables(self._tracked(), root_rank=0)
        self._save_variables()
        super().sync()

    def _save_variables(self) -> None:
        self._values = [np.array(variable.numpy()) for variable in self._tracked()]


class TensorFlowState(_VariablesState):
    """Variables and ordinary objects.

    Args:
        variables: ``tf.Variable`` or Keras variables.
        session: For ``tf.compat.v1``, which is not supported: None.
        **kwargs: Objects that become attributes; see `ringplug.elastic.ObjectState`.

    Raises:
        NotSupportedError: A session, or outside of eager mode.
    """

    def __init__(
        self, variables: Sequence[Any] | None = None, session: Any = None, **kwargs: Any
    ) -> None:
        if session is not None:
            raise NotSupportedError("elastic states work without a session of tf.compat.v1")
        self.variables = list(variables or ())
        super().__init__(**kwargs)

    def _tracked(self) -> Sequence[Any]:
        return self.variables


class TensorFlowKerasState(_VariablesState):
    """A Keras model, its optimizer, and ordinary objects.

    Args:
        model: A built model.
        optimizer: Its optimizer; the one it was compiled with by default. It is built here if
            it was not.
        backend: Horovod's, for TensorFlow 1; without effect.
        **kwargs: Objects that become attributes; see `ringplug.elastic.ObjectState`.

    Raises:
        UsageError: The model is not built.
    """

    def __init__(
        self, model: Any, optimizer: Any = None, backend: Any = None, **kwargs: Any
    ) -> None:
        del backend
        if not getattr(model, "built", True):
            raise UsageError("the model has no variables yet: call model.build(input_shape) first")
        self.model = model
        self.optimizer = optimizer if optimizer is not None else getattr(model, "optimizer", None)
        if self.optimizer is not None and not getattr(self.optimizer, "built", True):
            self.optimizer.build(model.trainable_variables)
        super().__init__(**kwargs)

    def _tracked(self) -> Sequence[Any]:
        owned = getattr(self.optimizer, "variables", ())
        return [*self.model.variables, *(owned() if callable(owned) else owned)]
