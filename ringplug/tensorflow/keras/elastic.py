"""``ringplug.keras.elastic`` under the name that corresponds to Horovod's."""

from __future__ import annotations

from ringplug.keras.elastic import *  # noqa: F403 - all of it
from ringplug.keras.elastic import __all__ as __all__
