"""Moving statistics of batch normalisation, averaged."""

from __future__ import annotations

from typing import Any

import keras

from ringplug.keras.callbacks.base import RingCallback
from ringplug.keras.state import averaged

__all__ = ["SyncBatchNormStatsCallback"]


class SyncBatchNormStatsCallback(RingCallback):
    """Average the moving means and variances of BatchNormalization over the ranks.

    Each rank's layers see its own batches, so their statistics drift apart; weights do not.
    This happens at the end of every epoch: put it before callbacks that save the model.

    Args:
        before_validation: Also before each validation in `fit`, so that it uses the averages.
            Only where every rank validates: one that does not would be waited for.
        process_set: Whose statistics; the other ranks keep theirs. None: all ranks.
    """

    def __init__(self, before_validation: bool = False, process_set: Any = None) -> None:
        super().__init__(process_set)
        self.before_validation = before_validation
        self._training = False

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        super().on_epoch_begin(epoch, logs)
        self._training = True

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        super().on_test_begin(logs)
        if self.before_validation and self._training and self.distributed:
            self.watch.mark(self._watched, "validation")
            self._average()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        super().on_epoch_end(epoch, logs)
        self._average()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        super().on_train_end(logs)
        self._training = False

    def _average(self) -> None:
        if not self.distributed:
            return
        variables = [
            variable
            for layer in self.model._flatten_layers()
            if isinstance(layer, keras.layers.BatchNormalization)
            for variable in (layer.moving_mean, layer.moving_variance)
        ]
        if not variables:
            return
        values = [keras.ops.convert_to_numpy(variable) for variable in variables]
        means = averaged(values, "keras.batch_norm", self.process_set)
        for variable, mean in zip(variables, means, strict=True):
            variable.assign(mean)
