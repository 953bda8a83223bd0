"""What every callback of ringplug does besides its own work: watch over the training run."""

from __future__ import annotations

from typing import Any

import keras

from ringplug.backend import ops, runtime
from ringplug.backend.errors import MismatchError, NotReducedError
from ringplug.keras import step
from ringplug.keras.guard import check_compilation
from ringplug.keras.optimizer import Distributed, reseat
from ringplug.keras.progress import check_reduced, forget_progress, raise_latched

__all__ = ["RingCallback"]

_SHARED = "ringplug_watch"


class RingCallback(keras.callbacks.Callback):
    """Base of ringplug's callbacks.

    Whichever of them are used, together they make sure that the model's optimizer is
    distributed, that every rank has the same number of batches, that gradients were combined
    in every epoch, and that an error of a compiled step is raised. Subclasses override
    `on_train_begin` and so on and call ``super()`` first.
    """

    def set_model(self, model: Any) -> None:
        super().set_model(model)
        self._watched = model
        if self.distributed and getattr(model, "optimizer", None) is not None:
            reseat(model)
            check_compilation(model)

    @property
    def distributed(self) -> bool:
        """Whether there is more than one rank."""
        return runtime.current().world.size > 1

    @property
    def watch(self) -> Watch:
        """What this run's callbacks share."""
        found: Watch = self.params.setdefault(_SHARED, Watch())
        return found

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        if self.distributed:
            self.watch.begin(self._watched, self.params)

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        # Not through self.model, which makes JAX reassemble the model's state.
        optimizer = self._watched.optimizer
        if isinstance(optimizer, Distributed):
            raise_latched(optimizer)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if self.distributed:
            self.watch.epoch_end(self._watched, epoch)


class Watch:
    """The checks of one run, made once, by whichever callback comes first."""

    def __init__(self) -> None:
        self._begun = False
        self._checked = -1

    def begin(self, model: Any, params: dict[str, Any]) -> None:
        """At train begin: the optimizer and the number of batches.

        Raises:
            NotReducedError: The optimizer is not distributed.
            MismatchError: The ranks have different numbers of batches in an epoch, and some
                would wait for ever in the others' last ones.
        """
        if self._begun:
            return
        self._begun = True
        step.refuse()
        optimizer = model.optimizer
        if not isinstance(optimizer, Distributed):
            raise NotReducedError(
                f"the model's optimizer, {type(optimizer).__name__}, does not combine gradients "
                "over the ranks: compile the model with DistributedOptimizer(optimizer)"
            )
        steps = ops.allgather_object(params.get("steps"), "keras.steps")
        if len(set(steps)) > 1:
            shown = ", ".join(f"rank {rank}: {count}" for rank, count in enumerate(steps))
            raise MismatchError(
                f"the ranks have different numbers of batches per epoch ({shown}). Give all the "
                "same number of samples, drop the remainder, or pass steps_per_epoch to fit"
            )
        forget_progress(optimizer)
        step.translate_errors(model)

    def epoch_end(self, model: Any, epoch: int) -> None:
        """At epoch end: whether updates were combined."""
        if epoch == self._checked:
            return
        self._checked = epoch
        optimizer = model.optimizer
        if not isinstance(optimizer, Distributed):
            raise NotReducedError(
                f"the model's optimizer was replaced by {type(optimizer).__name__}, which does "
                "not combine gradients over the ranks"
            )
        check_reduced(optimizer)
