"""What every callback of ringplug does besides its own work: watch over the training run."""

from __future__ import annotations

import warnings
from typing import Any

import keras

from ringplug.backend import runtime
from ringplug.backend.errors import MismatchError, NotReducedError, UsageError
from ringplug.keras import step
from ringplug.keras.exchange import gather_numbers, mark
from ringplug.keras.guard import check_compilation
from ringplug.keras.optimizer import Distributed, reseat
from ringplug.keras.options import ranks_of
from ringplug.keras.progress import check_reduced, forget_progress, raise_latched

__all__ = ["RingCallback", "check_root"]

_SHARED = "ringplug_watch"


class RingCallback(keras.callbacks.Callback):
    """Base of ringplug's callbacks.

    Whichever of them are used, together they make sure that the model's optimizer is
    distributed, that every rank has the same number of batches, that gradients were combined
    in every epoch, and that an error of a compiled step is raised. Subclasses override
    `on_train_begin` and so on and call ``super()`` first.

    Args:
        process_set: Whom the callback's own work is about; None: all ranks.
    """

    def __init__(self, process_set: Any = None) -> None:
        super().__init__()
        self.process_set = process_set

    def set_model(self, model: Any) -> None:
        super().set_model(model)
        self._watched = model
        if self._watches and getattr(model, "optimizer", None) is not None:
            reseat(model)
            check_compilation(model)

    @property
    def distributed(self) -> bool:
        """Whether this rank has others to do the callback's work with."""
        ranks = ranks_of(self.process_set)
        world = runtime.current().world
        if ranks is None:
            return world.size > 1
        return len(ranks) > 1 and world.rank in ranks

    @property
    def _watches(self) -> bool:
        return runtime.current().world.size > 1

    @property
    def watch(self) -> Watch:
        """What this run's callbacks share."""
        found: Watch = self.params.setdefault(_SHARED, Watch())
        return found

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        if self._watches:
            self.watch.begin(self._watched, self.params)

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        # Not through self.model, which makes JAX reassemble the model's state.
        optimizer = self._watched.optimizer
        if isinstance(optimizer, Distributed):
            raise_latched(optimizer)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if self._watches:
            self.watch.epoch_end(self._watched, epoch)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        if self._watches:
            self.watch.train_end(self._watched)

    def check_root(self, root_rank: int) -> None:
        """Raise where there is no rank `root_rank`.

        Raises:
            UsageError: Names this callback.
        """
        check_root(type(self).__name__, root_rank)


def check_root(who: str, root_rank: int) -> None:
    """Raise UsageError where the world, if it is known yet, has no rank `root_rank`."""
    size = runtime.current().world.size if runtime.is_initialized() else None
    if root_rank < 0 or (size is not None and root_rank >= size):
        there = "expected 0 or more" if size is None else f"there are the ranks 0..{size - 1}"
        raise UsageError(f"{who}(root_rank={root_rank}): {there}")


class Watch:
    """The checks of one run, made once, by whichever callback comes first."""

    def __init__(self) -> None:
        self._begun = False
        self._checked = -1
        self._ended = False
        self._distributed = False
        self._earlier = 0

    def begin(self, model: Any, params: dict[str, Any]) -> None:
        """At train begin: the optimizer and the number of batches.

        Raises:
            NotReducedError: The optimizer is not distributed, though Keras' own training step
                gives it gradients.
            MismatchError: The ranks have different numbers of batches in an epoch, and some
                would wait for ever in the others' last ones.
        """
        if self._begun:
            return
        self._begun = True
        step.refuse()
        optimizer = model.optimizer
        self._distributed = isinstance(optimizer, Distributed)
        if not isinstance(optimizer, Distributed):
            self._allow_plain(model)
            return
        self._compare_steps(optimizer.ringplug, params.get("steps"))
        self._earlier = optimizer.ringplug.meter.updates
        forget_progress(optimizer)
        step.translate_errors(model)

    def _allow_plain(self, model: Any) -> None:
        """Where an optimizer need not be distributed; raises anywhere else."""
        name = type(model.optimizer).__name__
        if not model.built or model.trainable_variables:
            if type(model).train_step is keras.Model.train_step:
                raise NotReducedError(
                    f"the model's optimizer, {name}, does not combine gradients over the ranks: "
                    "compile the model with DistributedOptimizer(optimizer)"
                )
            if runtime.current().world.rank == 0:
                warnings.warn(
                    f"the model's optimizer, {name}, does not combine gradients over the ranks: "
                    "its train_step has to do that (DistributedGradientTape)",
                    stacklevel=2,
                )

    def _compare_steps(self, reduction: Any, mine: int | None) -> None:
        if not reduction.active:
            return
        steps = gather_numbers(-1 if mine is None else mine, reduction.options.ranks)
        if len(set(steps)) > 1:
            ranks = reduction.options.ranks or range(len(steps))
            shown = ", ".join(
                f"rank {rank}: {None if count < 0 else count}"
                for rank, count in zip(ranks, steps, strict=True)
            )
            raise MismatchError(
                f"the ranks have different numbers of batches per epoch ({shown}). Give all the "
                "same number of samples, drop the remainder, or pass steps_per_epoch to fit"
            )

    def epoch_end(self, model: Any, epoch: int) -> None:
        """Before what all ranks do at epoch end: whether they are there, and reduced.

        Raises:
            MismatchError: Another rank has more batches, or has ended its training.
        """
        if epoch == self._checked:
            return
        self._checked = epoch
        self.mark(model, f"end of epoch {epoch + 1}")
        optimizer = model.optimizer
        if not self._distributed:
            return
        if not isinstance(optimizer, Distributed):
            raise NotReducedError(
                f"the model's optimizer was replaced by {type(optimizer).__name__}, which does "
                "not combine gradients over the ranks"
            )
        check_reduced(optimizer)

    def train_end(self, model: Any) -> None:
        """At train end: whether no other rank goes on."""
        if not self._ended:
            self._ended = True
            self.mark(model, "end of training")

    def mark(self, model: Any, what: str) -> None:
        """Let ranks that are still in a step, or at another place, meet this one and raise.

        Steps and callbacks use lanes of their own: without this, a rank that waits in a
        callback and one that waits in a step would never learn of each other.

        Args:
            model: Its steps that were started have run afterwards.
            what: The place in the training that every rank must have reached.
        """
        optimizer = model.optimizer
        if not isinstance(optimizer, Distributed) or not optimizer.ringplug.active:
            return
        well = step.settle_model(model)
        raise_latched(optimizer)
        if well:
            done = optimizer.ringplug.meter.updates - self._earlier
            ranks = optimizer.ringplug.options.ranks
            mark(f"{what}, after {done} exchanges of gradients in this fit", ranks)
