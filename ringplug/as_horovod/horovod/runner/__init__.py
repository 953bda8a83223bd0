"""``horovod.runner``."""

from __future__ import annotations

from ringplug.as_horovod.launching import run

__all__ = ["run"]
