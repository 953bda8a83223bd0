"""The two module trees of Lightning, and which of them the user trains with.

``pytorch_lightning`` and ``lightning`` hold the same code twice, with classes that do not know
each other: a strategy of one is refused by the other's Trainer. So RingStrategy exists once per
tree.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from ringplug.backend.errors import UnavailableError, UsageError

__all__ = ["TREES", "Tree", "available", "default_tree", "loaded", "tree_named", "when_loaded"]


@dataclass(frozen=True, slots=True)
class Tree:
    """One of the trees.

    Attributes:
        name: What the user imports.
        pytorch: The package with the Trainer.
        fabric: The package with what lies below.
        adapter: Our module for this tree.
    """

    name: str
    pytorch: str
    fabric: str
    adapter: str

    def module(self, path: str) -> Any:
        """A module of the package with the Trainer, such as ``strategies``."""
        return importlib.import_module(f"{self.pytorch}.{path}")

    def fabric_module(self, path: str) -> Any:
        """A module of the package below."""
        return importlib.import_module(f"{self.fabric}.{path}")


TREES = (
    Tree(
        "pytorch_lightning",
        "pytorch_lightning",
        "lightning_fabric",
        "ringplug.lightning.on_pytorch_lightning",
    ),
    Tree(
        "lightning",
        "lightning.pytorch",
        "lightning.fabric",
        "ringplug.lightning.on_lightning",
    ),
)


def tree_named(name: str) -> Tree:
    """The tree with that import name.

    Raises:
        UsageError: There is no such tree.
    """
    for tree in TREES:
        if name in (tree.name, tree.pytorch):
            return tree
    raise UsageError(f"no module tree {name!r}; there are {', '.join(t.name for t in TREES)}")


def loaded() -> list[Tree]:
    """The trees that this process has imported."""
    return [tree for tree in TREES if tree.pytorch in sys.modules]


def available() -> list[Tree]:
    """The trees that are installed. Imports nothing."""
    return [tree for tree in TREES if importlib.util.find_spec(tree.name) is not None]


def default_tree() -> Tree:
    """The tree that is loaded, else the first that is installed; pytorch_lightning goes first.

    Raises:
        UnavailableError: Neither is installed.
    """
    candidates = loaded() or available()
    if not candidates:
        raise UnavailableError(
            "neither pytorch_lightning nor lightning is installed; "
            "install one with: pip install 'ringplug[lightning]'"
        )
    return candidates[0]


def when_loaded(tree: Tree, action: Callable[[], object]) -> None:
    """Call `action` once `tree` has been imported: now, or when somebody imports it."""
    if tree.pytorch in sys.modules:
        action()
    else:
        sys.meta_path.insert(0, _Watch(tree.pytorch, action))


class _Watch(importlib.abc.MetaPathFinder):
    """Finds nothing itself; lets the import of one module be followed by an action."""

    def __init__(self, name: str, action: Callable[[], object]) -> None:
        self._name = name
        self._action = action

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            self._follow(spec.loader)
        return spec

    def _follow(self, loader: Any) -> None:
        execute, action = loader.exec_module, self._action

        def exec_module(module: ModuleType) -> None:
            execute(module)
            action()

        loader.exec_module = exec_module
