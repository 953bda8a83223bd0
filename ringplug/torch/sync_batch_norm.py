"""Batch normalisation over the batches of all ranks.

Each rank's count, mean and squared deviation per channel are gathered and merged in double
precision (Chan, Golub, LeVeque 1979), so batches of different sizes, also empty ones, count by
their elements. Only public operations of torch are used, so it works wherever tensors do.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ringplug.backend import ops, runtime
from ringplug.backend.buffers import ReduceOp
from ringplug.backend.errors import UsageError
from ringplug.backend.process_set import ProcessSet, global_process_set

__all__ = ["StatisticsExchange", "SyncBatchNorm", "normalize", "track"]


class StatisticsExchange(Protocol):
    """How ranks share the small tensors of one layer."""

    def gather(self, own: Tensor) -> Tensor:
        """All ranks' one-dimensional tensors as rows, in rank order."""
        ...

    def add(self, own: Tensor) -> Tensor:
        """The sum of all ranks' tensors."""
        ...


class _RingExchange:
    """Named operations over a process set.

    A layer waits for each of them, so one name serves all layers, whatever their number.
    """

    def __init__(self, process_set: ProcessSet | None) -> None:
        self._process_set = process_set

    def gather(self, own: Tensor) -> Tensor:
        name = "sync_batch_norm.statistics"
        rows: Tensor = ops.allgather(own.unsqueeze(0), name=name, process_set=self._process_set)
        return rows

    def add(self, own: Tensor) -> Tensor:
        total: Tensor = ops.allreduce(
            own,
            op=ReduceOp.SUM,
            name="sync_batch_norm.gradients",
            compression="none",
            process_set=self._process_set,
        )
        return total


class SyncBatchNorm(_BatchNorm):
    """Batch normalisation whose statistics are those of all ranks' batches together.

    As ``torch.nn.BatchNorm1d`` and relatives for inputs ``[N, C, ...]`` of 2 to 5 dimensions and
    more. Ranks may have batches of different sizes, also empty ones. 16-bit inputs give 16-bit
    outputs; their statistics are taken in wider types. In evaluation, with running statistics,
    and where there is one rank, it is the ordinary layer.

    Forward and backward are collectives in training: all ranks must run them, in the same order.

    Args:
        num_features: Channels C.
        eps: Added to the variance.
        momentum: Weight of the new value in the running statistics; None for the plain mean
            over all batches.
        affine: Whether there are a weight and a bias per channel.
        track_running_stats: Whether running statistics are kept for evaluation.
        process_set: The ranks whose batches belong together; a rank outside normalises its own.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_set: ProcessSet | None = global_process_set,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        # Not the object for all ranks: copies and pickles go without it.
        self.process_set = None if process_set is global_process_set else process_set

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise UsageError(f"expected at least 2D input (got {input.dim()}D input)")
        if input.shape[1] != self.num_features:
            raise UsageError(
                f"expected input with {self.num_features} channels, got {input.shape[1]}"
            )

    def forward(self, input: Tensor) -> Tensor:
        """Normalise `input` with the statistics of all ranks; a collective in training.

        Raises:
            ValueError: An input of fewer than 2 dimensions or with other channels; or one value
                per channel on all ranks together, which has no variance.
        """
        self._check_input_dim(input)
        running = self.running_mean is not None and self.running_var is not None
        batch = self.training or not running
        shares = self.process_set is None or self.process_set.included()
        if not batch or not shares or runtime.current().size_of(self.process_set) == 1:
            return super().forward(input)
        exchange = _RingExchange(self.process_set)
        out, mean, variance, total = normalize(input, self.weight, self.bias, self.eps, exchange)
        if self.training and self.track_running_stats and running:
            track(self, mean, variance, total)
        return out

    @classmethod
    def convert_sync_batchnorm(
        cls, module: nn.Module, process_set: ProcessSet | None = global_process_set
    ) -> nn.Module:
        """Replace all batch normalisation layers of `module`, which may be one itself.

        Args:
            module: Changed; its other layers stay.
            process_set: See the class.

        Returns:
            `module`, or what replaces it. Parameters and statistics are the same tensors.
        """
        converted = module
        if isinstance(module, _BatchNorm) and not isinstance(module, SyncBatchNorm):
            converted = cls(
                module.num_features,
                module.eps,
                module.momentum,
                module.affine,
                module.track_running_stats,
                process_set,
            )
            for name in ("weight", "bias"):
                setattr(converted, name, getattr(module, name))
            for name in ("running_mean", "running_var", "num_batches_tracked"):
                setattr(converted, name, getattr(module, name))
            converted.training = module.training
        for name, child in module.named_children():
            converted.add_module(name, cls.convert_sync_batchnorm(child, process_set))
        return converted


def normalize(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    exchange: StatisticsExchange,
) -> tuple[Tensor, Tensor, Tensor, float]:
    """Normalise with the ranks' common statistics. A collective, and so is its backward pass.

    Args:
        x: Input of shape ``[N, C, ...]``.
        weight: Per channel, or None.
        bias: Per channel, or None.
        eps: Added to the variance.
        exchange: How the ranks share statistics.

    Returns:
        The output; mean and biased variance per channel, in float64; and how many elements a
        channel has on all ranks.

    Raises:
        UsageError: On all ranks, when these are fewer than 2.
    """
    # Integers of an exact type: the backward pass needs the count, not a tensor of it.
    out, mean, variance, count = _Normalize.apply(x, weight, bias, eps, exchange)
    return out, mean, variance, float(count)


def track(layer: _BatchNorm, mean: Tensor, variance: Tensor, total: float) -> None:
    """Move the running statistics of a layer towards those of a batch.

    Args:
        layer: With running statistics.
        mean: Per channel.
        variance: Per channel, biased.
        total: Elements per channel.
    """
    assert layer.running_mean is not None
    assert layer.running_var is not None
    with torch.no_grad():
        if layer.num_batches_tracked is not None:
            layer.num_batches_tracked.add_(1)
        momentum = layer.momentum
        if momentum is None:
            momentum = 1.0 / float(layer.num_batches_tracked)  # type: ignore[arg-type]
        unbiased = variance * (total / (total - 1))
        layer.running_mean.lerp_(mean.to(layer.running_mean), momentum)
        layer.running_var.lerp_(unbiased.to(layer.running_var), momentum)


def _shape(x: Tensor) -> list[int]:
    return [1, x.shape[1]] + [1] * (x.ndim - 2)


def _other_axes(x: Tensor) -> list[int]:
    return [axis for axis in range(x.ndim) if axis != 1]


def _work_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _merge_statistics(x: Tensor, exchange: StatisticsExchange) -> tuple[Tensor, Tensor, float]:
    """Mean and biased variance per channel over all ranks, in float64, and the element count."""
    channels = x.shape[1]
    count = x.numel() // channels if channels else 0
    own = torch.zeros(2 * channels + 1, dtype=torch.float64)
    if count:
        variance, mean = torch.var_mean(x.double(), _other_axes(x), correction=0)
        own[:channels], own[channels:-1] = mean, variance * count
        own[-1] = count
    table = exchange.gather(own)
    counts = table[:, -1:]
    total = float(counts.sum())
    if total < 2:
        raise UsageError(
            "expected more than 1 value per channel when training; all ranks together have "
            f"{total:g}"
        )
    means = table[:, :channels]
    mean = (means * counts).sum(0) / total
    deviation = table[:, channels:-1].sum(0) + (counts * (means - mean) ** 2).sum(0)
    return mean, deviation / total, total


class _Normalize(torch.autograd.Function):
    """The backward pass sums over the ranks once; weights' gradients stay each rank's own."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        exchange: StatisticsExchange,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        mean64, variance, total = _merge_statistics(x, exchange)
        work = _work_dtype(x)
        mean = mean64.to(work).view(_shape(x))
        scale = torch.rsqrt(variance + eps).to(work).view(_shape(x))
        out = (x.to(work) - mean) * scale
        ctx.save_for_backward(x, mean, scale, weight)
        ctx.total, ctx.exchange = total, exchange
        if weight is not None:
            out = out * weight.to(work).view(_shape(x))
        if bias is not None:
            out = out + bias.to(work).view(_shape(x))
        count = torch.tensor(total, dtype=torch.float64)
        ctx.mark_non_differentiable(mean64, variance, count)
        return out.to(x.dtype), mean64, variance, count

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, mean, scale, weight = ctx.saved_tensors
        dy = gradients[0].to(mean.dtype)
        normal = (x.to(mean.dtype) - mean) * scale
        sum_dy = dy.double().sum(_other_axes(x))
        sum_dy_normal = (dy * normal).double().sum(_other_axes(x))
        grad_weight = grad_bias = grad_x = None
        if weight is not None and ctx.needs_input_grad[1]:
            grad_weight = sum_dy_normal.to(weight.dtype)
        if ctx.needs_input_grad[2]:
            grad_bias = sum_dy.to(weight.dtype if weight is not None else mean.dtype)
        if ctx.needs_input_grad[0]:
            sums = ctx.exchange.add(torch.cat([sum_dy, sum_dy_normal]))
            of_dy, of_dy_normal = (sums / ctx.total).to(mean.dtype).chunk(2)
            grad_x = dy - of_dy.view(_shape(x)) - normal * of_dy_normal.view(_shape(x))
            grad_x = grad_x * scale
            if weight is not None:
                grad_x = grad_x * weight.to(mean.dtype).view(_shape(x))
            grad_x = grad_x.to(x.dtype)
        return grad_x, grad_weight, grad_bias, None, None
