"""Framework tensors as numpy arrays, without copies. Layer 1.

* ``numpy.py``, ``torch.py``, ``tensorflow.py``, ``jax.py``: one framework each; a framework is
  imported only there, and only when one of its tensors was passed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from ringplug.backend.errors import UsageError

if TYPE_CHECKING:
    from ringplug.backend.buffers import Array

__all__ = ["Adapter", "adapter_for", "like", "view"]


class Adapter(Protocol):
    """One framework's tensors."""

    def view(self, tensor: Any) -> Array:
        """The tensor's memory as an array of the same shape; never a copy.

        bfloat16 is ``ml_dtypes.bfloat16``. The array may be read-only, and need not be
        contiguous.

        Raises:
            UsageError: The tensor has no memory that the CPU can reach.
        """
        ...

    def like(self, array: Array, tensor: Any) -> Any:
        """A tensor of the framework of `tensor` with the values of `array`, which it may adopt."""
        ...


def adapter_for(tensor: Any) -> Adapter:
    """The adapter of the framework that `tensor` comes from; numpy's for numbers and lists."""
    for kind in type(tensor).__mro__:
        module = kind.__module__.partition(".")[0]
        if module == "torch":
            from ringplug.backend.adapters.torch import TorchAdapter

            return TorchAdapter()
        if module == "tensorflow":
            from ringplug.backend.adapters.tensorflow import TensorFlowAdapter

            return TensorFlowAdapter()
        if module in ("jax", "jaxlib"):
            from ringplug.backend.adapters.jax import JaxAdapter

            return JaxAdapter()
        if module == "keras" and hasattr(tensor, "value"):
            return adapter_for(tensor.value)
    from ringplug.backend.adapters.numpy import NumpyAdapter

    return NumpyAdapter()


def view(tensor: Any) -> Array:
    """The memory of a CPU tensor of any framework as an array; see `Adapter.view`."""
    return adapter_for(tensor).view(tensor)


def like(array: Array, tensor: Any) -> Any:
    """A tensor of the framework of `tensor` with the values of `array`."""
    return adapter_for(tensor).like(array, tensor)


def not_on_cpu(tensor: Any, device: object) -> UsageError:
    """The error for a tensor in device memory."""
    return UsageError(
        f"{type(tensor).__module__}.{type(tensor).__name__} on {device}: this installation "
        "moves CPU tensors only; transports: alone, shared_memory, ring, hierarchical (CPU). "
        "Copy it to the CPU first"
    )
