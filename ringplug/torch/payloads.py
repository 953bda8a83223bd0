"""Gradients that travel as what a user's own compressor makes of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ringplug.backend.adapters import view
from ringplug.backend.errors import UsageError
from ringplug.backend.fusion import TensorSpec
from ringplug.backend.plan import Plan
from ringplug.torch.tensors import describe

__all__ = ["PayloadReducer"]


class PayloadReducer:
    """Compresses gradients, reduces the payloads all at once, and decompresses them.

    What payloads look like is found out by compressing zeros, here and for gradients that a
    rank does not have.

    Args:
        compressor: With ``compress(tensor) -> (payload, ctx)`` and ``decompress(payload, ctx)``.
        parameters: By index; the same on every rank.
        make_plan: A plan over payloads.
    """

    def __init__(
        self,
        compressor: Any,
        parameters: Mapping[int, Tensor],
        make_plan: Callable[[list[TensorSpec]], Plan],
    ) -> None:
        self._compressor = compressor
        self._parameters = dict(parameters)
        payloads = [self._compress(index, self._zeros(index))[0] for index in self._parameters]
        self._specs = [
            TensorSpec(f"payload {index}", tuple(payload.shape), view(payload).dtype)
            for index, payload in zip(self._parameters, payloads, strict=True)
        ]
        self._plan = make_plan(self._specs)

    def run(self, gradients: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Reduce the gradients of all parameters. A collective.

        Args:
            gradients: This rank's; the others count as zeros.

        Returns:
            The decompressed results for all parameters.

        Raises:
            UsageError: A payload has not the shape or dtype that one of zeros has.
        """
        payloads, contexts, arrays = {}, {}, []
        for at, index in enumerate(self._parameters):
            gradient = gradients.get(index)
            given = self._zeros(index) if gradient is None else gradient
            payloads[index], contexts[index] = self._compress(index, given)
            array = view(payloads[index])
            spec = self._specs[at]
            if array.shape != spec.shape or array.dtype != spec.dtype:
                raise UsageError(
                    f"{self._compressor!r} made {describe(payloads[index])} of a gradient and "
                    f"{spec.dtype}{list(spec.shape)} of zeros of the same shape: payloads need "
                    "one form"
                )
            arrays.append(array)
        self._plan.run(arrays, arrays)
        return {
            index: self._decompress(index, payload, contexts[index])
            for index, payload in payloads.items()
        }

    def _zeros(self, index: int) -> Tensor:
        parameter = self._parameters[index]
        return torch.zeros(parameter.shape, dtype=parameter.dtype)

    def _compress(self, index: int, gradient: Tensor) -> tuple[Tensor, Any]:
        with torch.no_grad():
            payload, context = self._compressor.compress(gradient)
        if not isinstance(payload, Tensor) or payload.layout is not torch.strided:
            raise UsageError(
                f"{self._compressor!r} made {type(payload).__name__} of the gradient of parameter "
                f"{index}: expected a dense tensor"
            )
        return payload.detach().contiguous(), context

    def _decompress(self, index: int, payload: Tensor, context: Any) -> Tensor:
        with torch.no_grad():
            result = self._compressor.decompress(payload, context)
        shape = self._parameters[index].shape
        if not isinstance(result, Tensor) or result.shape != shape:
            found = describe(result) if isinstance(result, Tensor) else type(result).__name__
            raise UsageError(
                f"{self._compressor!r} decompressed a gradient of shape {list(shape)} to {found}"
            )
        return result.to(self._parameters[index].dtype)
