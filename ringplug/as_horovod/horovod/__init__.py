"""Horovod's names, offered by ringplug.

`__version__` is that of the Horovod whose interface this is, so that scripts which ask for a
minimum go on; `ringplug.__version__` is ringplug's own.
"""

from __future__ import annotations

from ringplug.as_horovod.launching import run

__all__ = ["run"]

__version__ = "0.28.1"
