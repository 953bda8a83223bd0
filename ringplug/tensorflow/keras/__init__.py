"""``ringplug.keras`` under the name that corresponds to ``horovod.tensorflow.keras``."""

from __future__ import annotations

from ringplug.keras import *  # noqa: F403 - all of it
from ringplug.keras import __all__ as __all__
