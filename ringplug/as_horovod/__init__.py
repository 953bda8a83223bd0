"""Horovod's module names, for scripts that are to run as they are.

The folder of this file holds a package ``horovod``. ``ringrun --as-horovod`` puts that folder
first on the import path of the ranks, so that ``import horovod.torch`` is ringplug there. The
package holds next to no code: each of its modules offers the names of modules of ringplug, see
`offer`.
"""

from __future__ import annotations

import pkgutil
import sys
from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

from ringplug.backend.errors import UsageError

__all__ = ["FOLDER", "install", "installed", "offer"]

FOLDER = Path(__file__).resolve().parent
"""What belongs on the import path before any other ``horovod``."""


def install() -> None:
    """Let ``import horovod`` mean ringplug in this process, whatever the import path says.

    Child processes that start a new interpreter see it through PYTHONPATH only, which
    ``ringrun --as-horovod`` sets.

    Raises:
        UsageError: Another horovod has been imported already; says from where.
    """
    if "horovod" not in sys.modules:
        sys.path.insert(0, str(FOLDER))
        try:
            import_module("horovod")
        finally:
            sys.path.remove(str(FOLDER))
    if not installed():
        path = getattr(sys.modules["horovod"], "__file__", None)
        raise UsageError(f"another horovod has been imported already, from {path}")


def installed() -> bool:
    """Whether ``horovod`` has been imported in this process, and is ringplug."""
    path = getattr(sys.modules.get("horovod"), "__file__", None)
    return path is not None and FOLDER in Path(path).resolve().parents


def offer(
    shim: str, *homes: str
) -> tuple[list[str], Callable[[str], Any], Callable[[], Iterable[str]]]:
    """``__all__, __getattr__, __dir__`` for a module that stands in for others.

    Args:
        shim: Name of the module that gets them. Its own submodules are its attributes, too,
            without having been imported.
        *homes: Modules of ringplug whose names it offers, private ones included; the first that
            has a name gives it. They are imported now, so that a framework which is missing is
            an ImportError of the shim.
    """
    modules = [import_module(home) for home in homes]
    folders = getattr(sys.modules[shim], "__path__", ())
    inside = [found.name for found in pkgutil.iter_modules(folders)]
    names = list(inside)
    for module in modules:
        names += getattr(module, "__all__", ())

    def find(name: str) -> Any:
        if name in inside:
            return import_module(f"{shim}.{name}")
        # A module's own attributes, such as __path__, would make it pass for the other one.
        if not name.startswith("__"):
            for module in modules:
                if hasattr(module, name):
                    return getattr(module, name)
        raise AttributeError(f"module {shim!r} has no attribute {name!r}")

    return list(dict.fromkeys(names)), find, lambda: names
