"""ringplug for Lightning 2: ``Trainer(strategy=RingStrategy())``.

    from ringplug.lightning import RingStrategy
    trainer = Trainer(strategy=RingStrategy())      # or strategy="ring"

Works with ``import lightning`` and with ``import pytorch_lightning``. Where a program imports
both, say which one its Trainer comes from: ``strategy_class("lightning")()``.
"""

from __future__ import annotations

import functools
import importlib
import sys
from typing import Any

from ringplug.backend import config
from ringplug.backend.errors import UsageError
from ringplug.lightning.strategy import RingStrategyLogic
from ringplug.lightning.trees import TREES, default_tree, loaded, tree_named, when_loaded

__all__ = ["RingStrategy", "strategy_class"]

RingStrategy: Any


def strategy_class(tree: str | None = None) -> type[Any]:
    """The class RingStrategy for one of Lightning's module trees.

    Args:
        tree: ``pytorch_lightning`` or ``lightning``; by default the one that is imported, and
            pytorch_lightning where both are or neither is.

    Raises:
        UsageError: There is no such tree.
        UnavailableError: Lightning is not installed.
    """
    chosen = default_tree() if tree is None else tree_named(tree)
    return importlib.import_module(chosen.adapter).RingStrategy


class _Late(type):
    """Chooses the tree when the strategy is made, since none was imported before its name was."""

    def __new__(mcs, name: str, bases: tuple[type, ...], members: dict[str, Any]) -> _Late:
        if bases:
            raise UsageError(
                "import lightning or pytorch_lightning before `from ringplug.lightning import "
                "RingStrategy` to subclass it, or subclass ringplug.lightning.strategy_class(...)"
            )
        return super().__new__(mcs, name, bases, members)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return strategy_class()(*args, **kwargs)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, RingStrategyLogic)


class _LateRingStrategy(metaclass=_Late):
    __doc__ = RingStrategyLogic.__doc__


def __getattr__(name: str) -> Any:
    if name == "RingStrategy":
        return strategy_class() if loaded() else _LateRingStrategy
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _export_ranks() -> None:
    """Before Lightning looks: what it prints on rank 0 only, it decides when it is imported."""
    start = config.launched()
    if start is not None and start.size > 1:
        config.export_ranks(start.rank, start.size, start.local_rank, start.local_size)
        early = sys.modules.get("lightning_utilities.core.rank_zero")
        if early is not None:
            early.rank_zero_only.rank = start.rank


_export_ranks()
for _tree in TREES:
    # The module adds the names to its tree's registry.
    when_loaded(_tree, functools.partial(importlib.import_module, _tree.adapter))
