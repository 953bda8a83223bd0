"""``horovod.run``: the function, and the module of that name in old Horovod."""

from __future__ import annotations

import sys
import types
from typing import Any

from ringplug.as_horovod.launching import run

__all__ = ["run"]


class _Callable(types.ModuleType):
    """Importing this module hides the function of the same name in ``horovod``."""

    def __call__(self, *args: Any, **kwargs: Any) -> list[Any]:
        return run(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable
