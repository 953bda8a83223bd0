"""Joins ringplug's logic with the classes of one module tree."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ringplug.lightning.batch_norm import RingLayerSyncLogic
from ringplug.lightning.environment import RingEnvironmentLogic
from ringplug.lightning.launcher import RingLauncherLogic
from ringplug.lightning.strategy import RingStrategyLogic
from ringplug.lightning.trees import Tree

__all__ = ["Classes", "build"]


@dataclass(frozen=True, slots=True)
class Classes:
    """The classes of one tree."""

    strategy: type[Any]
    environment: type[Any]
    launcher: type[Any]
    layer_sync: type[Any]


def build(tree: Tree) -> Classes:
    """Make the classes for `tree`, which is imported.

    Each is found again by pickle under its name in ``tree.adapter``.
    """

    def join(name: str, *bases: type[Any], **members: Any) -> type[Any]:
        doc = bases[0].__doc__
        return type(name, bases, {"__module__": tree.adapter, "__doc__": doc, **members})

    environment = join(
        "RingEnvironment",
        RingEnvironmentLogic,
        tree.fabric_module("plugins.environments").ClusterEnvironment,
    )
    launcher = join(
        "RingLauncher",
        RingLauncherLogic,
        tree.module("strategies.launchers.subprocess_script")._SubprocessScriptLauncher,
    )
    layer_sync = join(
        "RingLayerSync", RingLayerSyncLogic, tree.module("plugins.layer_sync").LayerSync
    )
    strategy = join(
        "RingStrategy",
        RingStrategyLogic,
        tree.module("strategies").DDPStrategy,
        _tree=tree,
        _environment_class=environment,
        _launcher_class=launcher,
        _layer_sync_class=layer_sync,
    )
    return Classes(strategy, environment, launcher, layer_sync)
