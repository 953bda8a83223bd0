"""Horovod's elastic training of Keras models, in jobs of fixed size.

`KerasState` keeps a model, its optimizer and further values; `run` brings rank 0's to all ranks
and calls a training function; the callbacks commit and count while `fit` runs. Ranks do not come
and go yet: see `ringplug.elastic`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

import keras
import numpy as np

from ringplug.backend.buffers import Array
from ringplug.backend.errors import UsageError
from ringplug.elastic import ObjectState, State, run_fn
from ringplug.keras.latch import take_latched
from ringplug.keras.optimizer import Distributed
from ringplug.keras.state import broadcast_variables

__all__ = [
    "CommitStateCallback",
    "KerasState",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "run",
]

P = ParamSpec("P")
T = TypeVar("T")
S = TypeVar("S", bound=State)


def run(func: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """Decorator of a training function whose first argument is a state; see `ringplug.elastic`."""
    return run_fn(func)


class KerasState(ObjectState):
    """A model, its optimizer and further values: committed, restored, and synchronised.

    What is saved are copies in memory of the process. Callbacks commit it while `fit` runs.

    Args:
        model: A Keras model, built or not; the attribute ``model``.
        optimizer: Its optimizer; by default that of the compiled model. The attribute
            ``optimizer``.
        backend: Accepted for Horovod's sake; without effect.
        **kwargs: Further attributes, such as ``epoch=0, batch=0``; see `ObjectState`.
    """

    def __init__(
        self, model: Any, optimizer: Any = None, backend: Any = None, **kwargs: Any
    ) -> None:
        del backend
        super().__init__(**kwargs)
        self.model = model
        self.optimizer = optimizer if optimizer is not None else getattr(model, "optimizer", None)
        self._values: list[Array] = []
        self._keep()

    def save(self) -> None:
        """Copy the variables and the further values."""
        self._keep()
        super().save()

    def restore(self) -> None:
        """Set the variables and the further values to what was saved last.

        Variables that came to be since, such as slots of an optimizer that was not built when
        the state was saved, start from zero.
        """
        take_latched(self.optimizer)
        variables = self._variables()
        saved = self._values + [
            np.zeros(variable.shape, np.float32) for variable in variables[len(self._values) :]
        ]
        for variable, value in zip(variables, saved, strict=False):
            variable.assign(value)
        super().restore()

    def sync(self) -> None:
        """Give all ranks the variables and further values of rank 0, and save them.

        Collective. The model has to be built, or unbuilt, on all ranks alike.
        """
        if self.optimizer is not None and self.model.built and not self.optimizer.built:
            self.optimizer.build(self.model.trainable_variables)
        broadcast_variables(self._variables(), 0)
        self._keep()
        super().sync()

    def reset(self) -> None:
        """Training starts over: have the step compiled anew."""
        if hasattr(self.model, "train_function"):
            self.model.train_function = None

    def _variables(self) -> list[Any]:
        own = list(self.model.variables)
        if self.optimizer is None:
            return own
        if isinstance(self.optimizer, Distributed):
            # Whatever a step met has been raised, or training would not be set back now.
            return own + list(self.optimizer.variables_quietly())
        return own + list(self.optimizer.variables)

    def _keep(self) -> None:
        self._values = [np.array(keras.ops.convert_to_numpy(v)) for v in self._variables()]


class _StateCallback(keras.callbacks.Callback):
    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state


class CommitStateCallback(_StateCallback):
    """Commit a state after every so many batches, and at the end of every epoch.

    Put it after the callbacks that change the state.

    Args:
        state: What has a method ``commit``.
        batches_per_commit: Batches from one commit to the next; with ``steps_per_execution``,
            the next execution that ends at or after that. A commit copies the model.
    """

    def __init__(self, state: Any, batches_per_commit: int = 1) -> None:
        super().__init__(state)
        if batches_per_commit < 1:
            raise UsageError(f"batches_per_commit={batches_per_commit}: expected 1 or more")
        self.batches_per_commit = batches_per_commit
        self.batches_remaining = batches_per_commit
        self._last = -1

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self.batches_remaining = self.batches_per_commit

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._last = -1

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self.batches_remaining -= batch - self._last
        self._last = batch
        if self.batches_remaining <= 0:
            self.batches_remaining = self.batches_per_commit
            self._commit()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._commit()

    def _commit(self) -> None:
        # Asking for the model makes Keras on JAX bring what it trains back into the variables.
        if self.model is not None:
            self.state.commit()


class UpdateBatchStateCallback(_StateCallback):
    """Keep ``state.batch``: how many batches of this epoch are done; 0 between epochs.

    A `fit` that goes on amid an epoch, from a committed state, is given the batches that are
    left by the script; the count goes on from ``state.batch``.

    Args:
        state: What has an attribute ``batch``.
    """

    def __init__(self, state: Any) -> None:
        super().__init__(state)
        self._before = 0

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._before = self.state.batch

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self.state.batch = self._before + batch + 1

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self.state.batch = 0


class UpdateEpochStateCallback(_StateCallback):
    """Keep ``state.epoch``: how many epochs are done.

    It counts right with ``fit(initial_epoch=state.epoch)``, and, where that is not passed and
    Keras counts from 0 again, from the ``state.epoch`` that training began with.

    Args:
        state: What has an attribute ``epoch``.
    """

    def __init__(self, state: Any) -> None:
        super().__init__(state)
        self._offset: int | None = None

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._offset = None

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if self._offset is None:
            self._offset = self.state.epoch - epoch

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self.state.epoch = (self._offset or 0) + epoch + 1
