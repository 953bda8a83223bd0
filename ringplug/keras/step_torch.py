"""Keras on torch: steps are eager, and gradients are reduced where they lie."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import torch

from ringplug.backend.adapters import adapter_for
from ringplug.backend.buffers import Array
from ringplug.backend.errors import UsageError
from ringplug.keras.exchange import DenseExchange, SparseExchange

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


def is_tensor(value: Any) -> bool:
    """Whether it is a torch tensor."""
    return isinstance(value, torch.Tensor)


def is_sparse(value: Any) -> bool:
    """Whether it is a tensor with a sparse layout."""
    return isinstance(value, torch.Tensor) and value.layout != torch.strided


def densify(value: Any) -> Any:
    """A strided tensor of the same values."""
    return value.to_dense()


def times(value: Any, factor: float) -> Any:
    """The tensor, sparse or not, times `factor`, in its own dtype."""
    return value * factor


def is_eager(tensors: Sequence[Any]) -> bool:
    """Always: ``torch.compile`` breaks its graph where an exchange is made."""
    del tensors
    return True


def run(exchange: DenseExchange, tensors: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
    """The reduced tensors."""
    return _run(exchange, list(tensors), list(variables), [])[0]


def run_flagged(
    exchange: DenseExchange, tensors: Sequence[Any], variables: Sequence[Any], flags: Array
) -> tuple[list[Any], Array]:
    """The reduced tensors and flags."""
    reduced, extra = _run(exchange, list(tensors), list(variables), [flags])
    return reduced, extra[0]


def summed(exchanges: tuple[DenseExchange, DenseExchange], tensor: Any) -> Any:
    """The sum over the ranks, differentiable; what arrives at a rank's tensor is summed too."""
    return uncompiled(_Summed.apply)(tensor, *exchanges)


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Any, forward: DenseExchange, backward: DenseExchange) -> Any:
        ctx.exchange = backward
        return run(forward, [tensor], [])[0]

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> Any:
        return _Summed.apply(upstream[0], ctx.exchange, ctx.exchange), None, None


def _run(
    exchange: DenseExchange, tensors: list[Any], variables: list[Any], extra: list[Array]
) -> tuple[list[Any], list[Array]]:
    results: list[Any] = []
    sources: list[Array] = []
    targets: list[Array] = []
    view = adapter_for(tensors[0]).view
    with torch.no_grad():
        for index, tensor in enumerate(tensors):
            source = tensor.detach().contiguous()
            owner = variables[index] if index < len(variables) else None
            # A gradient that its variable owns is reduced in place, as it would be by DDP;
            # anything else may be used elsewhere.
            # Keras' `value` looks up devices; this is the tensor below it.
            value = getattr(owner, "_value", None)
            owned = isinstance(value, torch.Tensor) and value.grad is tensor
            copied = source.data_ptr() != tensor.data_ptr()
            result = source if owned or copied else torch.empty_like(source)
            results.append(result)
            sources.append(view(source))
            targets.append(sources[-1] if result is source else view(result))
        more = [np.empty_like(array) for array in extra]
        exchange([*sources, *extra], [*targets, *more])
    return results, more


def gather(exchange: SparseExchange, gradient: Any) -> Any:
    """Not possible: Keras' optimizers on torch take dense gradients only.

    Raises:
        UsageError: Always.
    """
    raise UsageError(
        f"a gradient with layout {gradient.layout} reached the optimizer; "
        "use DistributedOptimizer(..., sparse_as_dense=True)"
    )


def refuse() -> None:
    """Raise where Keras would distribute by itself.

    Raises:
        UsageError: ``torch.distributed`` is initialised on a Keras that then wraps the model
            in DDP and averages metrics.
    """
    version = tuple(int(part) for part in keras.__version__.split(".")[:2])
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if version >= (3, 16) and distributed:
        raise UsageError(
            "torch.distributed is initialised, and Keras 3.16 and later then averages "
            "gradients itself; use either that or ringplug"
        )


def settle(optimizer: Any) -> bool:
    """Nothing to wait for."""
    del optimizer
    return True


def settle_model(model: Any) -> bool:
    """Nothing to wait for; see `settle`."""
    del model
    return True


def translate_errors(model: Any) -> None:
    """Nothing to do: steps are eager."""


def uncompiled(function: Any) -> Any:
    """The function, run eagerly amid a compiled step."""
    return torch.compiler.disable(function)
