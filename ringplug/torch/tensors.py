"""Tensors as flat memory that a transport reads and writes.

Movement (broadcast, gather, exchange) looks at bytes and so serves every dtype; reduction
looks at numbers. Contiguous CPU tensors are used where they lie, others through a copy.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ringplug.backend.adapters import view
from ringplug.backend.buffers import Buffer
from ringplug.backend.errors import UnavailableError, UsageError

__all__ = ["Flat", "check_devices", "describe", "raw_bytes"]

_CANDIDATES = (
    "nccl (not part of this version)",
    "shared_memory (CPU tensors only)",
    "ring (CPU tensors only)",
    "hierarchical (CPU tensors only)",
)


def check_devices(op: str, tensors: Sequence[Tensor]) -> None:
    """Refuse tensors that no transport reaches.

    Raises:
        UnavailableError: A tensor is not on the CPU; lists every transport and why it does not
            fit.
    """
    for tensor in tensors:
        if tensor.device.type != "cpu":
            raise UnavailableError(
                f"{op}: no transport moves {tensor.device.type} tensors; candidates: "
                f"{'; '.join(_CANDIDATES)}. Nothing is copied to the CPU without being asked: "
                "call .cpu() first, or train with accelerator='cpu'"
            )


def describe(tensor: Tensor) -> str:
    """Kind and shape, such as ``float32[3, 4]``."""
    kind = str(tensor.dtype).removeprefix("torch.")
    layout = "" if tensor.layout is torch.strided else " sparse"
    return f"{kind}{list(tensor.shape)}{layout}"


def raw_bytes(tensor: Tensor) -> Buffer:
    """The bytes of a contiguous CPU tensor, in place."""
    # The stride of a dimension of length 1 is arbitrary, and reshape keeps it.
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))
    return flat.view(torch.uint8).numpy()


class Flat:
    """The elements of one tensor, in row-major order, in contiguous memory.

    Args:
        tensor: A dense CPU tensor of any strides.

    Attributes:
        tensor: Contiguous, with the same elements; the given one itself where that is so.
    """

    __slots__ = ("_original", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        plain = tensor.detach()
        self._original = plain
        if plain.is_conj() or plain.is_neg():
            plain = plain.resolve_conj().resolve_neg()
        self.tensor = plain.contiguous()

    @property
    def bytes(self) -> Buffer:
        """The elements as bytes."""
        return raw_bytes(self.tensor)

    @property
    def numbers(self) -> Buffer:
        """The elements as numbers.

        Raises:
            UsageError: Numbers of this dtype cannot be reduced.
        """
        try:
            return view(self.tensor).reshape(-1)
        except TypeError as error:
            raise UsageError(f"{self.tensor.dtype} values cannot be reduced: {error}") from None

    def store(self) -> None:
        """Carry what the transport wrote into the tensor that was given."""
        if self.tensor.data_ptr() != self._original.data_ptr() or self._is_marked():
            self._original.copy_(self.tensor)

    def _is_marked(self) -> bool:
        return self._original.is_conj() or self._original.is_neg()
