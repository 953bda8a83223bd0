"""Learning rates times the world size, on request, once."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["scale_learning_rates"]

_GROUP_KEYS = ("lr", "initial_lr", "max_lr", "min_lr")
_SCHEDULER_LISTS = ("base_lrs", "max_lrs", "_last_lr")
_MARK = "_ringplug_scaled_lr"


def scale_learning_rates(optimizers: list[Any], schedulers: list[Any], factor: float) -> list[str]:
    """Multiply the learning rates of optimizers and the base rates of their schedulers.

    An optimizer that was scaled before is left alone, so that fitting twice with the same
    object does not scale twice. A resumed run loads the saved, scaled rates over these.

    Args:
        optimizers: torch's optimizers.
        schedulers: torch's schedulers on them.
        factor: The world size.

    Returns:
        One line per optimizer that was scaled: its rates before and after.
    """
    lines: list[str] = []
    scaled: list[Any] = []
    for optimizer in optimizers:
        if getattr(optimizer, _MARK, None) is not None:
            continue
        setattr(optimizer, _MARK, factor)
        scaled.append(optimizer)
        before = _rates(optimizer)
        for group in optimizer.param_groups:
            for key in _GROUP_KEYS:
                if key in group:
                    group[key] = _times(group[key], factor)
        lines.append(f"{type(optimizer).__name__}: {before} -> {_rates(optimizer)}")
    for scheduler in schedulers:
        if any(getattr(scheduler, "optimizer", None) is one for one in scaled):
            _scale_scheduler(scheduler, factor)
    return lines


def _rates(optimizer: Any) -> str:
    return ", ".join(f"{float(group['lr']):g}" for group in optimizer.param_groups)


def _times(value: Any, factor: float) -> Any:
    if isinstance(value, torch.Tensor):
        # In place: a captured optimizer step reads this very tensor.
        return value.mul_(factor)
    return value * factor


def _scale_scheduler(scheduler: Any, factor: float) -> None:
    for name in _SCHEDULER_LISTS:
        values = getattr(scheduler, name, None)
        if isinstance(values, list):
            setattr(
                scheduler,
                name,
                [v * factor for v in values],
            )
    for inner in getattr(scheduler, "_schedulers", ()):
        _scale_scheduler(inner, factor)
