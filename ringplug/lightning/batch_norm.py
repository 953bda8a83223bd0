"""Batch normalisation over the batches of all ranks, on CPU tensors.

``torch.nn.SyncBatchNorm`` refuses CPU tensors. Layers here do the arithmetic of
`ringplug.torch.sync_batch_norm` over the process group.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ringplug.backend.errors import UsageError
from ringplug.torch.sync_batch_norm import normalize, track

__all__ = ["RingBatchNorm1d", "RingBatchNorm2d", "RingBatchNorm3d", "RingLayerSyncLogic"]

dist: Any = torch.distributed


class _GroupExchange:
    """Collectives of torch.distributed."""

    def gather(self, own: Tensor) -> Tensor:
        everyone = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, own)
        return torch.stack(everyone)

    def add(self, own: Tensor) -> Tensor:
        dist.all_reduce(own)
        return own


class _RingBatchNorm(_BatchNorm):
    """Replaces the class of a batch normalisation layer while it is trained."""

    def forward(self, input: Tensor) -> Tensor:
        running = self.running_mean is not None and self.running_var is not None
        if not self.training and running:
            return super().forward(input)
        if input.device.type != "cpu":
            raise UsageError(f"{type(self).__name__} is for CPU tensors, got {input.device}")
        self._check_input_dim(input)
        out, mean, variance, total = normalize(
            input, self.weight, self.bias, self.eps, _GroupExchange()
        )
        if self.training and self.track_running_stats and running:
            track(self, mean, variance, total)
        return out


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
