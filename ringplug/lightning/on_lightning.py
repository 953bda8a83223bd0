"""RingStrategy for ``import lightning``."""

from __future__ import annotations

from ringplug.lightning.classes import build
from ringplug.lightning.trees import tree_named

__all__ = ["RingEnvironment", "RingLauncher", "RingLayerSync", "RingStrategy"]

_tree = tree_named("lightning")
_classes = build(_tree)
RingEnvironment = _classes.environment
RingLauncher = _classes.launcher
RingLayerSync = _classes.layer_sync
RingStrategy = _classes.strategy

RingStrategy.register_strategies(_tree.module("strategies").StrategyRegistry)
