"""An optimizer that steps by itself and combines what the ranks' steps changed, by Adasum."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from ringplug.backend import ops, runtime
from ringplug.backend.buffers import ReduceOp
from ringplug.backend.errors import NotSupportedError
from ringplug.backend.process_set import ProcessSet
from ringplug.torch.compression import Compression, CompressionChoice, user_compressor, wire_codec
from ringplug.torch.parameters import trainable
from ringplug.torch.reducer import StepOrderError
from ringplug.torch.tensors import check_devices

__all__ = ["DeltaOptimizer", "check_adasum"]


def check_adasum(process_set: ProcessSet | None) -> None:
    """Raise NotSupportedError where Adasum is not possible.

    Raises:
        NotSupportedError: A process set other than all ranks, or a number of ranks that is no
            power of two.
    """
    if process_set is not None and process_set.process_set_id != 0:
        raise NotSupportedError("op=Adasum works on all ranks, not on a process set")
    size = runtime.current().world.size
    if size & (size - 1):
        raise NotSupportedError(f"op=Adasum needs a power of two of ranks, these are {size}")


class DeltaOptimizer(torch.optim.Optimizer):
    """What is put before the class of an optimizer for ``op=Adasum``.

    Each rank steps with its own gradients. The difference that a step made to each parameter is
    combined by Adasum with those of the other ranks, and added to the parameter as it was before.
    """

    _plain: type[torch.optim.Optimizer]
    _ringplug_names: dict[int, str]
    _ringplug_compression: CompressionChoice
    backward_passes_per_step: int

    def synchronize(self) -> None:
        """Does nothing: ranks communicate in ``step()``."""

    def skip_synchronize(self) -> AbstractContextManager[None]:
        """Not possible: the step itself is what the ranks combine.

        Raises:
            AssertionError: Always.
        """
        raise StepOrderError("skip_synchronize() is not possible with op=Adasum")

    def set_backward_passes_per_step(self, passes: int) -> None:
        """How many backward passes make up a step; each rank adds up their gradients itself."""
        self.backward_passes_per_step = passes

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step, and combine what the ranks' steps changed. A collective.

        Args:
            closure: Computes the loss again, for the plain optimizer.

        Returns:
            What the plain optimizer's step returned.
        """
        return self._ringplug_step(super().step, closure)

    def _ringplug_step(
        self, plain_step: Callable[..., Any], closure: Callable[[], Any] | None
    ) -> Any:
        named = trainable(self, self._ringplug_names)
        parameters = [parameter for _, parameter in named]
        check_devices("DistributedOptimizer", parameters)
        before = [parameter.detach().clone() for parameter in parameters]
        result = plain_step() if closure is None else plain_step(closure)
        with torch.no_grad():
            deltas = [parameter - old for parameter, old in zip(parameters, before, strict=True)]
            combined = self._ringplug_combine([name for name, _ in named], deltas)
            for parameter, old, delta in zip(parameters, before, combined, strict=True):
                parameter.copy_(old + delta)
        return result

    def _ringplug_combine(self, names: list[str], deltas: list[Tensor]) -> list[Tensor]:
        codec = self._ringplug_codec()
        payloads, contexts = zip(*map(codec.compress, deltas), strict=True) if deltas else ((), ())
        handles = [
            ops.allreduce_async(payload, name=f"adasum.{name}", op=ReduceOp.ADASUM)
            for name, payload in zip(names, payloads, strict=True)
        ]
        return [
            codec.decompress(handle.wait(), context)
            for handle, context in zip(handles, contexts, strict=True)
        ]

    def _ringplug_codec(self) -> Any:
        own = user_compressor(self._ringplug_compression)
        if own is not None:
            return own
        wire = wire_codec(self._ringplug_compression)
        wire = runtime.current().config.compression if wire is None else wire
        if not isinstance(wire, str):
            raise NotSupportedError("op=Adasum takes no codec objects: pass a Compression")
        return getattr(Compression, wire)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Pickled and copied as what it was, so that files load without ringplug.
        return object.__new__, (self._plain,), self.__getstate__()
