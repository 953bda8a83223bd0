"""How a training step reaches the backend; one implementation for each Keras backend.

`step_torch`, `step_tensorflow` and `step_jax` offer the same functions; the names here are
those of the Keras backend in use.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

import keras

from ringplug.backend.buffers import Array
from ringplug.backend.errors import UnavailableError

__all__ = [
    "densify",
    "gather",
    "is_eager",
    "is_sparse",
    "is_tensor",
    "refuse",
    "run",
    "run_flagged",
    "settle",
    "settle_model",
    "summed",
    "times",
    "translate_errors",
    "uncompiled",
]

Tensors: TypeAlias = Sequence[Any]
F = TypeVar("F", bound=Callable[..., Any])

_NAME = keras.backend.backend()
if _NAME not in ("tensorflow", "jax", "torch"):
    raise UnavailableError(
        f"Keras runs on {_NAME}, which cannot train; "
        "ringplug.keras works on tensorflow, jax and torch"
    )
_here = importlib.import_module(f"ringplug.keras.step_{_NAME}")

is_tensor: Callable[[Any], bool] = _here.is_tensor
"""Whether it is a tensor of this backend, sparse ones included."""

is_sparse: Callable[[Any], bool] = _here.is_sparse
"""Whether it is a sparse gradient."""

densify: Callable[[Any], Any] = _here.densify
"""A sparse gradient as a dense tensor."""

times: Callable[[Any, float], Any] = _here.times
"""``times(gradient, factor)``: a gradient, sparse or not, multiplied."""

is_eager: Callable[[Tensors], bool] = _here.is_eager
"""Whether the tensors' values are here, as opposed to a program being traced."""

run: Callable[[Any, Tensors, Tensors], list[Any]] = _here.run
"""``run(exchange, tensors, variables)``: the reduced tensors, now or in the program."""

run_flagged: Callable[[Any, Tensors, Tensors, Array], tuple[list[Any], Array]] = _here.run_flagged
"""Eager only: ``run`` with one more array at the end, whose reduction is returned too."""

_summed: Callable[[Any, Any], Any] = _here.summed

gather: Callable[[Any, Any], Any] = _here.gather
"""``gather(exchange, sparse)``: the sparse gradient with the rows of all ranks."""

refuse: Callable[[], None] = _here.refuse
"""Raises UsageError where another kind of distribution is active."""

settle: Callable[[Any], bool] = _here.settle
"""``settle(optimizer)``: waits until started steps have run; whether they went well."""

settle_model: Callable[[Any], bool] = _here.settle_model
"""``settle_model(model)``: the same for the steps of a `fit` that is under way."""

translate_errors: Callable[[Any], None] = _here.translate_errors
"""``translate_errors(model)``: lets `fit` raise what a compiled step met as it was."""


def summed(exchanges: Any, tensor: Any) -> Any:
    """The sum of a tensor over the ranks, differentiable.

    Args:
        exchanges: That of the tensors, and that of their gradients; each with one tensor.
        tensor: In an eager step, or in a program being traced.
    """
    try:
        return _summed(exchanges, tensor)
    except BaseException:
        # An eager exchange has failed, or tracing: either way it is being raised now.
        exchanges[0].meter.latch.take()
        raise


def uncompiled(function: F) -> F:
    """Keep ``torch.compile`` out of `function`; other backends trace it as it is."""
    kept: F = _here.uncompiled(function)
    return kept
