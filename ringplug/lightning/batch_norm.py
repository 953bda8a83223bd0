"""Batch normalisation over the batches of all ranks, on CPU tensors.

``torch.nn.SyncBatchNorm`` refuses CPU tensors. Here each rank's count, mean and squared
deviation per channel are gathered and merged in double precision (Chan, Golub, LeVeque 1979),
so batches of different sizes, also empty ones, count by their elements.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ringplug.backend.errors import UsageError

__all__ = ["RingBatchNorm1d", "RingBatchNorm2d", "RingBatchNorm3d", "RingLayerSyncLogic"]

dist: Any = torch.distributed


def _shape(x: Tensor) -> list[int]:
    return [1, x.shape[1]] + [1] * (x.ndim - 2)


def _merge_statistics(x: Tensor) -> tuple[Tensor, Tensor, float]:
    """Mean and biased variance per channel over all ranks, in float64, and the element count."""
    channels = x.shape[1]
    axes = [axis for axis in range(x.ndim) if axis != 1]
    count = x.numel() // channels
    own = torch.zeros(2 * channels + 1, dtype=torch.float64)
    if count:
        variance, mean = torch.var_mean(x.double(), axes, correction=0)
        own[:channels], own[channels:-1] = mean, variance * count
        own[-1] = count
    everyone = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, own)
    table = torch.stack(everyone)
    counts = table[:, -1:]
    total = float(counts.sum())
    if total == 0:
        raise UsageError("batch normalisation over ranks that all have empty batches")
    means = table[:, :channels]
    mean = (means * counts).sum(0) / total
    deviation = table[:, channels:-1].sum(0) + (counts * (means - mean) ** 2).sum(0)
    return mean, deviation / total, total


class _Normalize(torch.autograd.Function):
    """Normalise with the ranks' common statistics; the backward pass sums over ranks once."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        mean64, variance, total = _merge_statistics(x)
        mean = mean64.float().view(_shape(x))
        scale = torch.rsqrt(variance + eps).float().view(_shape(x))
        normal = (x.float() - mean) * scale
        ctx.save_for_backward(x, mean, scale, weight)
        ctx.total = total
        ctx.set_materialize_grads(True)
        out = normal
        if weight is not None:
            out = out * weight.float().view(_shape(x))
        if bias is not None:
            out = out + bias.float().view(_shape(x))
        count = torch.tensor(total, dtype=torch.float64)
        ctx.mark_non_differentiable(mean64, variance, count)
        return out.to(x.dtype), mean64, variance, count

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, mean, scale, weight = ctx.saved_tensors
        dy = gradients[0].float()
        axes = [axis for axis in range(x.ndim) if axis != 1]
        normal = (x.float() - mean) * scale
        sum_dy = dy.double().sum(axes)
        sum_dy_normal = (dy * normal).double().sum(axes)
        grad_weight = grad_bias = grad_x = None
        if weight is not None and ctx.needs_input_grad[1]:
            grad_weight = sum_dy_normal.to(weight.dtype)
        if ctx.needs_input_grad[2]:
            grad_bias = sum_dy.to(weight.dtype if weight is not None else torch.float32)
        if ctx.needs_input_grad[0]:
            sums = torch.cat([sum_dy, sum_dy_normal])
            dist.all_reduce(sums)
            of_dy, of_dy_normal = (sums / ctx.total).float().chunk(2)
            grad_x = dy - of_dy.view(_shape(x)) - normal * of_dy_normal.view(_shape(x))
            grad_x = grad_x * scale
            if weight is not None:
                grad_x = grad_x * weight.float().view(_shape(x))
            grad_x = grad_x.to(x.dtype)
        return grad_x, grad_weight, grad_bias, None


class _RingBatchNorm(_BatchNorm):
    """Replaces the class of a batch normalisation layer while it is trained."""

    def forward(self, input: Tensor) -> Tensor:
        running = self.running_mean is not None and self.running_var is not None
        if not self.training and running:
            return super().forward(input)
        if input.device.type != "cpu":
            raise UsageError(f"{type(self).__name__} is for CPU tensors, got {input.device}")
        self._check_input_dim(input)
        out, mean, variance, total = _Normalize.apply(input, self.weight, self.bias, self.eps)
        if self.training and self.track_running_stats and running:
            self._track(mean, variance, float(total))
        return out

    def _track(self, mean: Tensor, variance: Tensor, total: float) -> None:
        assert self.running_mean is not None
        assert self.running_var is not None
        with torch.no_grad():
            if self.num_batches_tracked is not None:
                self.num_batches_tracked.add_(1)
            momentum = self.momentum
            if momentum is None:
                momentum = 1.0 / float(self.num_batches_tracked)  # type: ignore[arg-type]
            unbiased = variance * (total / max(total - 1, 1))
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
            self.running_var.lerp_(unbiased.to(self.running_var.dtype), momentum)


class RingBatchNorm1d(_RingBatchNorm, nn.BatchNorm1d):
    """BatchNorm1d over all ranks."""


class RingBatchNorm2d(_RingBatchNorm, nn.BatchNorm2d):
    """BatchNorm2d over all ranks."""


class RingBatchNorm3d(_RingBatchNorm, nn.BatchNorm3d):
    """BatchNorm3d over all ranks."""


_SYNCED: dict[type[nn.Module], type[nn.Module]] = {
    nn.BatchNorm1d: RingBatchNorm1d,
    nn.BatchNorm2d: RingBatchNorm2d,
    nn.BatchNorm3d: RingBatchNorm3d,
}
_PLAIN = {synced: plain for plain, synced in _SYNCED.items()}


class RingLayerSyncLogic:
    """Lightning's LayerSync for the CPU: layers keep their parameters, only the class changes."""

    def apply(self, model: nn.Module) -> nn.Module:
        """Let every batch normalisation layer of `model` use all ranks' statistics.

        Raises:
            UsageError: A layer is of a class whose forward pass cannot be replaced.
        """
        for name, module in model.named_modules():
            if type(module) in _SYNCED:
                module.__class__ = _SYNCED[type(module)]
            elif isinstance(module, _BatchNorm) and type(module) not in _PLAIN:
                raise UsageError(
                    f"sync_batchnorm on the CPU knows BatchNorm1d, 2d and 3d; {name} is a "
                    f"{type(module).__name__}"
                )
        return model

    def revert(self, model: nn.Module) -> nn.Module:
        """Undo `apply`."""
        for module in model.modules():
            if type(module) in _PLAIN:
                module.__class__ = _PLAIN[type(module)]
        return model
