"""PyTorch tensors. Layer 1."""

from __future__ import annotations

from typing import Any

import torch

from ringplug.backend.adapters import not_on_cpu
from ringplug.backend.buffers import BFLOAT16, Array
from ringplug.backend.errors import UsageError

__all__ = ["TorchAdapter"]


class TorchAdapter:
    """Dense CPU tensors; bfloat16 is viewed by its bits, which numpy has no type for."""

    def view(self, tensor: Any) -> Array:
        plain = tensor.detach()
        if plain.device.type != "cpu":
            raise not_on_cpu(tensor, plain.device)
        if plain.layout is not torch.strided:
            raise UsageError(f"a tensor of layout {plain.layout} has no dense memory to view")
        if plain.is_conj() or plain.is_neg():
            plain = plain.resolve_conj().resolve_neg()
        if plain.dtype is torch.bfloat16:
            bits: Array = plain.view(torch.int16).numpy()
            return bits.view(BFLOAT16)
        try:
            dense: Array = plain.numpy()
        except (TypeError, RuntimeError) as error:
            raise UsageError(f"a tensor of {plain.dtype} has no array type: {error}") from None
        return dense

    def like(self, array: Array, tensor: Any) -> Any:
        if array.dtype == BFLOAT16:
            return torch.from_numpy(array.view("int16")).view(torch.bfloat16)
        return torch.from_numpy(array)
