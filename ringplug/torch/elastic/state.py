"""PyTorch's part of training states."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from ringplug.backend import ops
from ringplug.elastic import ObjectState
from ringplug.torch.elastic.sampler import ElasticSampler
from ringplug.torch.state import broadcast_optimizer_state, broadcast_parameters

__all__ = [
    "LRSchedulerStateHandler",
    "ModelStateHandler",
    "OptimizerStateHandler",
    "SamplerStateHandler",
    "StateHandler",
    "TorchState",
    "get_handler_registry",
    "set_handler_registry",
]


class StateHandler:
    """Saves, restores and synchronises one object that is not merely copied.

    Args:
        value: The object.
    """

    def __init__(self, value: Any) -> None:
        self.value = value

    def save(self) -> None:
        """Keep a copy of the object's state."""
        raise NotImplementedError(f"{type(self).__name__} needs a method save")

    def restore(self) -> None:
        """Put the copy back into the object."""
        raise NotImplementedError(f"{type(self).__name__} needs a method restore")

    def sync(self) -> None:
        """Give all ranks' objects the state of rank 0's, and save it. A collective."""
        raise NotImplementedError(f"{type(self).__name__} needs a method sync")

    def set_value(self, value: Any) -> None:
        """Handle another object from now on."""
        self.value = value
        self.save()


class _StateDictHandler(StateHandler):
    """For objects with state_dict and load_state_dict."""

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self.save()

    def save(self) -> None:
        """Keep a deep copy of the state dict."""
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        """Load a copy of what was saved: optimizers keep the tensors that they are given."""
        self.value.load_state_dict(copy.deepcopy(self._saved))

    def sync(self) -> None:
        """Load the state dict of rank 0."""
        self._saved = ops.broadcast_object(self.value.state_dict(), 0, name="elastic.state")
        self.restore()


class ModelStateHandler(_StateDictHandler):
    """A module's parameters and buffers."""

    def sync(self) -> None:
        """Broadcast them in place."""
        broadcast_parameters(self.value.state_dict(), root_rank=0)
        self.save()


class OptimizerStateHandler(_StateDictHandler):
    """An optimizer's slots and hyperparameters."""

    def sync(self) -> None:
        """Broadcast them."""
        broadcast_optimizer_state(self.value, root_rank=0)
        self.save()


class LRSchedulerStateHandler(_StateDictHandler):
    """A learning-rate scheduler."""


class SamplerStateHandler(_StateDictHandler):
    """An `ElasticSampler`: the epoch, and how many samples were used."""


_Registry = list[tuple[type[Any], Callable[[Any], StateHandler]]]

_registry: _Registry = [
    (torch.nn.Module, ModelStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (LRScheduler, LRSchedulerStateHandler),
    (ElasticSampler, SamplerStateHandler),
]


def get_handler_registry() -> _Registry:
    """Types and their handlers; the first that fits an object handles it."""
    return _registry


def set_handler_registry(registry: _Registry) -> None:
    """Change the types and their handlers, for states that are made from now on."""
    global _registry  # noqa: PLW0603 - Horovod's interface
    _registry = registry


class TorchState(ObjectState):
    """A training state of models, optimizers and ordinary objects, which become attributes.

    Args:
        model: A module, or None.
        optimizer: An optimizer, wrapped or not, or None.
        **kwargs: Further modules, optimizers, learning-rate schedulers and samplers, each by a
            `StateHandler`; everything else as `ObjectState` does.
    """

    _handlers: dict[str, StateHandler]

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        **kwargs: Any,
    ) -> None:
        handlers: dict[str, StateHandler] = {}
        others = {}
        for name, value in {"model": model, "optimizer": optimizer, **kwargs}.items():
            for kind, handler in get_handler_registry():
                if isinstance(value, kind):
                    handlers[name] = handler(value)
                    break
            else:
                others[name] = value
        object.__setattr__(self, "_handlers", handlers)
        for name, made in handlers.items():
            object.__setattr__(self, name, made.value)
        super().__init__(**others)

    def save(self) -> None:
        """Keep copies of everything."""
        for handler in self._handlers.values():
            handler.save()
        super().save()

    def restore(self) -> None:
        """Put back what was saved last."""
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def sync(self) -> None:
        """Give all ranks the state of rank 0, and save it. A collective."""
        for handler in self._handlers.values():
            handler.sync()
        super().sync()

    def reset(self) -> None:
        """Let samplers share out anew what is left."""
        for handler in self._handlers.values():
            if isinstance(handler.value, ElasticSampler):
                handler.value.reset()

    def __setattr__(self, name: str, value: Any) -> None:
        handler = self._handlers.get(name)
        if handler is not None:
            handler.set_value(value)
        super().__setattr__(name, value)
