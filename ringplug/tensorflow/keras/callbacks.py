"""``ringplug.keras.callbacks`` under the name that corresponds to Horovod's."""

from __future__ import annotations

from ringplug.keras.callbacks import *  # noqa: F403 - all of it
from ringplug.keras.callbacks import __all__ as __all__
