"""Metrics of all ranks' data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import keras
import numpy as np

from ringplug.backend import ops
from ringplug.backend.buffers import Array
from ringplug.keras.callbacks.base import RingCallback

__all__ = ["MetricAverageCallback"]

_VALIDATION = "val_"


@dataclass
class States:
    """The variables of a model's metrics at one moment, as one rank sends them.

    Attributes:
        kinds: For each variable how replicas of it combine (Keras' ``aggregation``), its shape.
        values: The variables.
        results: What the metrics say with these values.
        weight: Number of samples seen, or 1 where that is not known.
    """

    kinds: list[tuple[str, tuple[int, ...]]]
    values: list[Array]
    results: dict[str, Any]
    weight: float


Part: TypeAlias = tuple[str, States | None, dict[str, Any]]


class MetricAverageCallback(RingCallback):
    """Make the logs of every epoch those of all ranks' data together.

    The *states* of the metrics are summed over the ranks and evaluated once, so that AUC,
    precision, recall and uneven shards are exact: the result is that of one process with all
    the data. Training and validation are treated alike, and all ranks get all keys, also those
    that only some ranks have (a validation on rank 0, say). Values that are not results of the
    model's metrics (a custom `train_step` may return them), or of metrics whose variables
    cannot be added, are averaged, weighted by the samples that each rank saw.

    The logs are changed in place: put this callback before every one that reads them.
    In a call of ``evaluate`` outside of `fit`, callbacks see the combined values in
    ``on_test_end``, but Keras computes what it returns before that.

    Args:
        device: Accepted for Horovod's sake; without effect.
        process_set: Whose data; logs of the other ranks stay their own. None: all ranks.
    """

    def __init__(self, device: str = "", process_set: Any = None) -> None:
        super().__init__(process_set)
        del device
        self._training = False
        self._train: States | None = None
        self._test: States | None = None

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        super().on_train_begin(logs)
        self._training = True

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        super().on_train_end(logs)
        self._training = False

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        super().on_epoch_begin(epoch, logs)
        self._training = True
        self._train = self._test = None

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        super().on_test_begin(logs)
        # Keras resets the metrics after this, and evaluates the epoch's training after that.
        if self._training and self.distributed:
            self._train = _snapshot(self.model)

    def on_test_end(self, logs: dict[str, Any] | None = None) -> None:
        super().on_test_end(logs)
        if not self.distributed:
            return
        states = _snapshot(self.model)
        if self._training:
            self._test = states
        elif logs:
            parts: list[Part] = [("", states, dict(logs))]
            logs.update(_combine(self.model, parts, self.process_set))

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        super().on_epoch_end(epoch, logs)
        if not self.distributed or logs is None:
            return
        train = self._train if self._train is not None else _snapshot(self.model)
        ours = {key: value for key, value in logs.items() if not key.startswith(_VALIDATION)}
        validated = {
            key.removeprefix(_VALIDATION): value
            for key, value in logs.items()
            if key.startswith(_VALIDATION)
        }
        if self._test is not None:
            # On torch, Keras' result of a counting metric is a view of its variable, which the
            # validation has overwritten since.
            for key, value in ours.items():
                if key in train.results and _same(value, self._test.results.get(key)):
                    ours[key] = train.results[key]
        parts: list[Part] = [("", train, ours), (_VALIDATION, self._test, validated)]
        logs.update(_combine(self.model, parts, self.process_set))


def _snapshot(model: Any) -> States:
    variables = model.metrics_variables
    return States(
        kinds=[(str(getattr(v, "aggregation", "none")), tuple(v.shape)) for v in variables],
        values=[np.array(keras.ops.convert_to_numpy(v)) for v in variables],
        results=_numbers(model.get_metrics_result()),
        weight=_samples(model),
    )


def _samples(model: Any) -> float:
    for metric in model.metrics:
        if metric.name == "loss" and hasattr(metric, "count"):
            count = float(keras.ops.convert_to_numpy(metric.count))
            return count if count > 0 else 1.0
    return 1.0


def _numbers(results: dict[str, Any]) -> dict[str, float]:
    """Results as `fit` reports them: nested ones side by side, each a float."""
    numbers: dict[str, float] = {}
    for key, value in results.items():
        if isinstance(value, dict):
            numbers.update(_numbers(value))
        else:
            number = np.asarray(keras.ops.convert_to_numpy(value))
            if number.size == 1:
                numbers[key] = float(number.reshape(()))
    return numbers


def _combine(model: Any, parts: Sequence[Part], process_set: Any) -> dict[str, Any]:
    """The logs of all ranks' data, the same on every rank. Collective."""
    ranks = ops.allgather_object(list(parts), "keras.metrics", process_set)
    combined: dict[str, Any] = {}
    for number, (prefix, _, _) in enumerate(parts):
        present = [
            (states, logs)
            for _, states, logs in (rank[number] for rank in ranks)
            if states is not None and logs
        ]
        if present:
            found = _combine_part(model, present)
            combined.update({prefix + key: value for key, value in found.items()})
    return combined


def _combine_part(model: Any, present: Sequence[tuple[States, dict[str, Any]]]) -> dict[str, Any]:
    results = _means(present)
    states = [state for state, _ in present]
    kinds = states[0].kinds
    additive = all(kind in _COMBINED for kind, _ in kinds)
    alike = all(state.kinds == kinds for state in states)
    if additive and alike and len(kinds) == len(model.metrics_variables):
        for key, value in _evaluate(model, states).items():
            # A custom train_step may report something else under a metric's name.
            if all(_same(log.get(key), state.results.get(key)) for state, log in present):
                results[key] = value
    return results


def _same(logged: Any, result: Any) -> bool:
    if not isinstance(logged, (int, float)) or result is None:
        return False
    return bool(np.isclose(logged, result, rtol=1e-5, atol=1e-8, equal_nan=True))


def _evaluate(model: Any, states: Sequence[States]) -> dict[str, float]:
    """What the metrics say when their variables are those of all ranks together."""
    mapping = []
    for index, variable in enumerate(model.metrics_variables):
        parts = [state.values[index] for state in states]
        combined = _COMBINED[states[0].kinds[index][0]](parts)
        value = keras.ops.convert_to_tensor(combined.astype(parts[0].dtype), variable.dtype)
        mapping.append((variable, value))
    with keras.StatelessScope(state_mapping=mapping):
        return _numbers(model.get_metrics_result())


def _wide(parts: Sequence[Array]) -> Array:
    stacked = np.stack(parts)
    return stacked.astype(np.float64) if stacked.dtype.kind == "f" else stacked


_COMBINED: dict[str, Callable[[Sequence[Array]], Array]] = {
    "sum": lambda parts: _wide(parts).sum(axis=0),
    "mean": lambda parts: _wide(parts).mean(axis=0),
    "only_first_replica": lambda parts: parts[0],
}


def _means(present: Sequence[tuple[States, dict[str, Any]]]) -> dict[str, Any]:
    """For each key, the mean over the ranks that have it, weighted by samples."""
    results: dict[str, Any] = {}
    for key in sorted({key for _, log in present for key in log}):
        found = [(log[key], state.weight) for state, log in present if key in log]
        if all(isinstance(value, (int, float)) for value, _ in found):
            values, weights = zip(*found, strict=True)
            results[key] = float(np.average(values, weights=weights))
    return results
