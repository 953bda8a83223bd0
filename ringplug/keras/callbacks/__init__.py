"""Callbacks for `fit`, with Horovod's names, and `default`, which puts them in order."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import keras

from ringplug.keras.callbacks.base import RingCallback
from ringplug.keras.callbacks.batch_norm import SyncBatchNormStatsCallback
from ringplug.keras.callbacks.broadcast import BroadcastGlobalVariablesCallback
from ringplug.keras.callbacks.learning_rate import (
    LearningRateScheduleCallback,
    LearningRateWarmupCallback,
)
from ringplug.keras.callbacks.metrics import MetricAverageCallback
from ringplug.keras.callbacks.root_only import BestModelCheckpoint, RootOnly
from ringplug.keras.callbacks.scaling import ScaleLearningRateCallback
from ringplug.keras.callbacks.stop import StopTogetherCallback

__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
    "RingCallback",
    "RootOnly",
    "ScaleLearningRateCallback",
    "StopTogetherCallback",
    "SyncBatchNormStatsCallback",
    "default",
]

_WRITERS = ("BackupAndRestore", "CSVLogger", "ModelCheckpoint", "TensorBoard")


def default(
    callbacks: Iterable[Any] = (), root_rank: int = 0, scale_lr: str | None = "linear"
) -> list[Any]:
    """The callbacks that nearly every run needs, around the user's own, rightly ordered.

    The learning rate is scaled. Restoring comes first, then the broadcast, then what changes logs
    and statistics, then the user's callbacks in their order, and last the one that lets all ranks
    stop together. Keras' callbacks that write files are made to run on `root_rank` only. A
    ringplug callback that is passed takes the place of the one that would be made here.

    Args:
        callbacks: The user's.
        root_rank: Whose state everybody gets, and who writes files.
        scale_lr: The learning rate is multiplied by the number of ranks (``"linear"``), by its
            square root (``"sqrt"``), or left alone (None). Once, and not where
            `DistributedOptimizer` was told, or where one of `callbacks` has `initial_lr`.

    Returns:
        A list for ``fit(callbacks=...)``.
    """
    given = [_on_root(callback, root_rank) for callback in callbacks]
    restoring = [one for one in given if _restores(one)]
    if any(getattr(one, "initial_lr", None) is not None for one in given):
        scale_lr = None
    chosen: dict[type, Any] = {
        BroadcastGlobalVariablesCallback: BroadcastGlobalVariablesCallback(root_rank),
        MetricAverageCallback: MetricAverageCallback(),
        SyncBatchNormStatsCallback: SyncBatchNormStatsCallback(),
        ScaleLearningRateCallback: ScaleLearningRateCallback(scale_lr),
        StopTogetherCallback: StopTogetherCallback(),
    }
    rest = []
    for callback in given:
        kind = next((kind for kind in chosen if isinstance(callback, kind)), None)
        if kind is not None:
            chosen[kind] = callback
        elif not _restores(callback):
            rest.append(callback)
    *first, last = chosen.values()
    return [*restoring, *first, *rest, last]


def _on_root(callback: Any, root_rank: int) -> Any:
    kinds = tuple(
        getattr(keras.callbacks, name) for name in _WRITERS if hasattr(keras.callbacks, name)
    )
    return RootOnly(callback, root_rank) if isinstance(callback, kinds) else callback


def _restores(callback: Any) -> bool:
    inner = callback.callback if isinstance(callback, RootOnly) else callback
    return isinstance(inner, keras.callbacks.BackupAndRestore)
