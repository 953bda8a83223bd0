"""Callbacks that set the learning rate, batch by batch."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any

import keras

from ringplug.backend import runtime
from ringplug.backend.errors import UsageError
from ringplug.keras import learning_rate, schedules
from ringplug.keras.callbacks.base import RingCallback
from ringplug.keras.callbacks.scaling import scale_for_all
from ringplug.keras.momentum import correct_momentum
from ringplug.keras.optimizer import reduction_of

__all__ = ["LearningRateScheduleCallback", "LearningRateWarmupCallback"]


class LearningRateScheduleCallback(RingCallback):
    """Set the learning rate to ``initial_lr * multiplier`` between two epochs.

    Args:
        initial_lr: The learning rate that is multiplied, already as large as it should be for
            all ranks together. Giving it takes back what `DistributedOptimizer` multiplied the
            learning rate by, since it says what the learning rate is to be.
        multiplier: A function of the epoch, or a number m, which means
            ``m ** (epoch - start_epoch)``.
        start_epoch: First epoch (from 0) in which this callback acts.
        end_epoch: First epoch in which it does not any more; None for never.
        staircase: Set it once per epoch, at whole epochs; False: before every batch, where the
            epoch that `multiplier` gets has a fraction. With ``steps_per_execution`` that is
            before every execution.
        momentum_correction: The velocities of SGD and RMSprop are multiplied by what the
            learning rate changes by; see `ringplug.keras.momentum`.
        steps_per_epoch: Batches per epoch, where `fit` cannot know them.

    Raises:
        UsageError: The learning rate is a schedule (see `ringplug.keras.schedules`), or the
            number of batches is needed and not known.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        if initial_lr is None:
            raise UsageError("initial_lr is needed: the learning rate that is multiplied")
        who = type(self).__name__
        require(start_epoch >= 0, who, "start_epoch", start_epoch, "0 or more")
        if end_epoch is not None:
            wanted = f"start_epoch ({start_epoch}) or more"
            require(end_epoch >= start_epoch, who, "end_epoch", end_epoch, wanted)
        check_rate_and_steps(who, initial_lr, steps_per_epoch)
        self.initial_lr = initial_lr
        self.start_epoch = start_epoch
        self.end_epoch = end_epoch
        self.staircase = staircase
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch
        if callable(multiplier):
            self.multiplier = multiplier
        else:
            constant = float(multiplier)
            self.multiplier = lambda epoch: constant ** (epoch - start_epoch)
        self._epoch = 0

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        super().on_train_begin(logs)
        optimizer = self.model.optimizer
        _refuse_schedule(optimizer, type(self).__name__)
        undo_scaling(optimizer)
        if not self.staircase:
            self.steps_per_epoch = steps_of(self)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        super().on_epoch_begin(epoch, logs)
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        super().on_train_batch_begin(batch, logs)
        ended = self.end_epoch is not None and self._epoch >= self.end_epoch
        if self._epoch < self.start_epoch or ended:
            return
        if self.staircase:
            if batch == 0:
                self._set(self.initial_lr * self.multiplier(self._epoch))
        else:
            assert self.steps_per_epoch is not None
            epoch = self._epoch + batch / self.steps_per_epoch
            self._set(self.initial_lr * self.multiplier(epoch))

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        super().on_epoch_end(epoch, logs)
        _log(logs, self.model.optimizer)

    def _set(self, rate: float) -> None:
        optimizer = self.model.optimizer
        rates = [rate] * len(learning_rate.leaves(optimizer))
        assign_rates(optimizer, rates, self.momentum_correction)


class LearningRateWarmupCallback(RingCallback):
    """Raise the learning rate linearly, from 1/size of its target to all of it.

    Before batch b of epoch e (both from 0), the learning rate is
    ``target / size * (1 + (e + (b + 1) / steps) * (size - 1) / warmup_epochs)``, which is the
    target in the last batch of the warm-up. Afterwards this callback does nothing.

    With `initial_lr` not given, the target is the optimizer's learning rate times the number of
    ranks; nothing is scaled twice, and ``DistributedOptimizer(scale_lr=None)`` keeps it as it is.
    A script that scales by itself passes its scaled learning rate as `initial_lr`: that is then
    the target, and what ringplug has multiplied is taken back.

    A learning rate that is a ``LearningRateSchedule`` is warmed up inside the step: the
    schedule is replaced by `ringplug.keras.schedules.Warmup` of it until training ends after
    the warm-up.

    Args:
        initial_lr: The target; by default the optimizer's learning rate for all ranks.
        warmup_epochs: Number of epochs, which may be fractional.
        momentum_correction: The velocities of SGD and RMSprop are multiplied by what the
            learning rate changes by; see `ringplug.keras.momentum`. Warns that it is not done
            where the learning rate is a schedule.
        steps_per_epoch: Batches per epoch, where `fit` cannot know them.
        verbose: 1: rank 0 prints a line when the warm-up ends.

    Raises:
        UsageError: The number of batches is not known; or `initial_lr` and a schedule.
    """

    def __init__(
        self,
        initial_lr: float | None = None,
        warmup_epochs: float = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        super().__init__()
        who = type(self).__name__
        require(0 <= warmup_epochs < float("inf"), who, "warmup_epochs", warmup_epochs, "0 or more")
        check_rate_and_steps(who, initial_lr, steps_per_epoch)
        self.initial_lr = initial_lr
        self.warmup_epochs = warmup_epochs
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self.verbose = verbose
        self._epoch = 0
        self._steps = 0
        self._targets: list[float] | None = None
        self._scheduled = False

    def set_model(self, model: Any) -> None:
        super().set_model(model)
        reduction = reduction_of(model.optimizer)
        if self.initial_lr is not None or not self.distributed:
            return
        scale_for_all(model, "linear")
        if reduction is None or _has_schedule(model.optimizer):
            return
        if reduction.target is None:
            # Taken before a checkpoint is restored, which may be from amid a warm-up.
            reduction.target = learning_rate.current(model.optimizer)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        super().on_train_begin(logs)
        if self.warmup_epochs <= 0 or not (self.distributed or self.initial_lr is not None):
            return
        self._steps = steps_of(self)
        optimizer = self.model.optimizer
        reduction = reduction_of(optimizer)
        if _has_schedule(optimizer):
            if self.momentum_correction:
                warn_about_momentum(optimizer)
            if self.initial_lr is not None:
                _refuse_schedule(optimizer, "LearningRateWarmupCallback(initial_lr=...)")
            self._schedule(optimizer)
        elif self.initial_lr is not None:
            undo_scaling(optimizer)
            self._targets = [self.initial_lr] * len(learning_rate.leaves(optimizer))
        else:
            self._targets = reduction.target if reduction else learning_rate.current(optimizer)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        super().on_epoch_begin(epoch, logs)
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        super().on_train_batch_begin(batch, logs)
        if self._targets is None or self._epoch >= self.warmup_epochs:
            return
        self._set((self._epoch * self._steps + batch + 1) / (self.warmup_epochs * self._steps))

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        super().on_epoch_end(epoch, logs)
        warming = self.distributed or self._targets is not None
        if warming and epoch < self.warmup_epochs <= epoch + 1:
            if self._targets is not None:
                # With several steps per execution the last batch was not seen by itself.
                self._set(1.0)
                self._done()
            rates = learning_rate.current(self.model.optimizer)
            if self.verbose and runtime.current().world.rank == 0:
                shown = ", ".join(f"{rate:g}" for rate in rates)
                sys.stdout.write(
                    f"\nEpoch {epoch + 1}: finished learning rate warm-up to {shown}\n"
                )
                sys.stdout.flush()
        _log(logs, self.model.optimizer)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        super().on_train_end(logs)
        if not self._scheduled:
            return
        self._scheduled = False
        changed = False
        for leaf in learning_rate.leaves(self.model.optimizer):
            rate = leaf._learning_rate
            done = int(keras.ops.convert_to_numpy(leaf._iterations))
            if isinstance(rate, schedules.Warmup) and done >= rate.start + rate.steps:
                leaf._learning_rate = rate.schedule
                changed = True
        if changed:
            self.model.train_function = None

    def _set(self, progress: float) -> None:
        size = runtime.current().world.size
        factor = (1 + min(progress, 1.0) * (size - 1)) / size
        assert self._targets is not None
        rates = [target * factor for target in self._targets]
        assign_rates(self.model.optimizer, rates, self.momentum_correction)

    def _done(self) -> None:
        reduction = reduction_of(self.model.optimizer)
        if reduction is not None:
            reduction.target = None

    def _schedule(self, optimizer: Any) -> None:
        steps = max(1, round(self.warmup_epochs * self._steps))
        size = runtime.current().world.size
        changed = False
        for leaf in learning_rate.leaves(optimizer):
            rate = leaf._learning_rate
            if isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
                self._scheduled = True
                if not isinstance(rate, schedules.Warmup):
                    leaf._learning_rate = schedules.Warmup(rate, steps, size)
                    changed = True
        if changed:
            self.model.make_train_function(force=True)


def _log(logs: dict[str, Any] | None, optimizer: Any) -> None:
    rates = learning_rate.current(optimizer)
    if logs is not None and rates:
        logs["lr"] = rates[0]


def require(holds: bool, who: str, argument: str, value: Any, wanted: str) -> None:
    """Raise UsageError, naming the callback and its argument, unless the condition holds."""
    if not holds:
        raise UsageError(f"{who}({argument}={value!r}): expected {wanted}")


def check_rate_and_steps(who: str, initial_lr: float | None, steps: int | None) -> None:
    """Check what both callbacks accept."""
    if initial_lr is not None:
        require(0 <= initial_lr < float("inf"), who, "initial_lr", initial_lr, "0 or more")
    require(steps is None or steps >= 1, who, "steps_per_epoch", steps, "1 or more")


def steps_of(callback: RingCallback) -> int:
    """Batches per epoch."""
    given: int | None = getattr(callback, "steps_per_epoch", None)
    found = given or callback.params.get("steps")
    if not found:
        raise UsageError(
            f"{type(callback).__name__}(steps_per_epoch=...) is needed: "
            "the data do not say how many batches they are"
        )
    return int(found)


def assign_rates(optimizer: Any, rates: list[float], momentum_correction: bool) -> None:
    """Set the learning rates, and let velocities follow."""
    before = learning_rate.current(optimizer) if momentum_correction else []
    learning_rate.assign(optimizer, rates)
    if momentum_correction:
        correct_momentum(optimizer, before, rates)


def undo_scaling(optimizer: Any) -> None:
    """Take back the automatic scaling where the user says what the learning rate is to be."""
    reduction = reduction_of(optimizer)
    if reduction is None or reduction.scaled == 1.0:
        return
    learning_rate.scale(optimizer, 1.0 / reduction.scaled, announce=False)
    reduction.scaled = 1.0
    if runtime.current().world.rank == 0:
        sys.stdout.write("ringplug: initial_lr is given, so the automatic scaling is undone\n")
        sys.stdout.flush()


def warn_about_momentum(optimizer: Any) -> None:
    """Say, on rank 0, that velocities stay as they are while a schedule warms up."""
    world = runtime.current().world
    momentum = [getattr(leaf, "momentum", None) for leaf in learning_rate.leaves(optimizer)]
    if world.rank == 0 and any(isinstance(m, float) and m > 0 for m in momentum):
        warnings.warn(
            "momentum_correction is not possible where the learning rate is a schedule, which "
            "changes it inside the step (momentum_correction=False silences this)",
            stacklevel=2,
        )


def _has_schedule(optimizer: Any) -> bool:
    kind = keras.optimizers.schedules.LearningRateSchedule
    rates = [isinstance(one._learning_rate, kind) for one in learning_rate.leaves(optimizer)]
    if any(rates) and not all(rates):
        raise UsageError(
            "some of this optimizer's learning rates are schedules and some are not: set them "
            "yourself, with ringplug.keras.schedules.Warmup and Scaled"
        )
    return any(rates)


def _refuse_schedule(optimizer: Any, who: str) -> None:
    if _has_schedule(optimizer):
        raise UsageError(
            f"{who}: the optimizer's learning rate is a LearningRateSchedule, which cannot be "
            "set; give the optimizer a number, or build the schedule from "
            "ringplug.keras.schedules.Warmup and Scaled"
        )
