"""What a distributed optimizer is asked for, checked."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import keras

from ringplug.backend import runtime
from ringplug.backend.buffers import ReduceOp
from ringplug.backend.errors import UsageError
from ringplug.backend.process_set import global_process_set
from ringplug.keras.compression import wire_codec

__all__ = ["Options", "check_groups", "layers_of", "ranks_of"]


@dataclass(frozen=True)
class Options:
    """What `DistributedOptimizer` was asked for; see there.

    Attributes:
        passes: Micro-batches whose gradients make one update.
        average_passes: Whether that update has their mean, or their sum.
        ranks: Who combines gradients, of which there may be only some; None: all.
    """

    name: str | None = None
    compression: Any = None
    op: ReduceOp = ReduceOp.AVERAGE
    gradient_predivide_factor: float = 1.0
    sparse_as_dense: bool = False
    passes: int = 1
    average_passes: bool = False
    ranks: tuple[int, ...] | None = None
    scale_local_gradients: bool = True

    def __post_init__(self) -> None:
        wire_codec(self.compression)
        if self.op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
            raise UsageError(f"op={self.op!r}: gradients can be combined by Average or Sum")
        if self.gradient_predivide_factor <= 0:
            raise UsageError("gradient_predivide_factor must be above 0")
        if self.gradient_predivide_factor != 1.0 and self.op != ReduceOp.AVERAGE:
            raise UsageError("gradient_predivide_factor needs op=Average")
        if self.passes < 1:
            raise UsageError(f"backward_passes_per_step={self.passes}: expected 1 or more")

    @property
    def sum_factor(self) -> float:
        """What Keras' mean over micro-batches is multiplied by."""
        return 1.0 if self.average_passes else float(self.passes)


def ranks_of(process_set: Any) -> tuple[int, ...] | None:
    """The ranks of a process set; None for all ranks.

    Raises:
        UsageError: It has not been added yet, or was removed.
    """
    if process_set is None or process_set is global_process_set:
        return None
    if getattr(process_set, "process_set_id", None) is None:
        raise UsageError(
            f"{process_set!r} is not known to ringplug: give it to init(process_sets=[...]) or "
            "add_process_set first"
        )
    ranks = tuple(sorted(process_set.ranks))
    return None if len(ranks) == runtime.current().world.size else ranks


def check_groups(num_groups: int, groups: Any) -> None:
    """Check what Horovod calls groups: which gradients must travel together.

    All gradients of an update travel as one operation here, so each group does.

    Raises:
        UsageError: It is neither a number above 0 nor a list of lists of variables, or a
            variable is in two of them.
    """
    if num_groups != 0:
        warnings.warn("num_groups is deprecated: use groups", DeprecationWarning, stacklevel=3)
        groups = num_groups if groups is None else groups
    if groups is None:
        return
    if isinstance(groups, int) and not isinstance(groups, bool):
        if groups < 1:
            raise UsageError(f"groups={groups}: expected a number above 0, or a list of lists")
        return
    is_lists = isinstance(groups, (list, tuple)) and all(
        isinstance(group, (list, tuple)) for group in groups
    )
    if not is_lists:
        raise UsageError(
            f"groups={groups!r}: expected a number above 0, or a list of lists of variables"
        )
    seen: set[int] = set()
    for variable in (variable for group in groups for variable in group):
        if id(variable) in seen:
            path = getattr(variable, "path", variable)
            raise UsageError(f"groups: the variable {path} is in two groups")
        seen.add(id(variable))


def layers_of(local_layers: Any) -> Sequence[Any]:
    """Layers as a list.

    Raises:
        UsageError: Something else is among them.
    """
    if local_layers is None:
        return []
    is_one = isinstance(local_layers, keras.layers.Layer)
    given = [local_layers] if is_one or not isinstance(local_layers, Iterable) else local_layers
    layers = list(given)
    for layer in layers:
        if not isinstance(layer, keras.layers.Layer):
            raise UsageError(f"local_layers: {layer!r} is not a Keras layer")
    return layers
