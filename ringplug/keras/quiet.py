"""Progress bars and Keras' messages from rank 0 only.

On other ranks, what Keras prints goes to ``absl.logging`` instead, by the switch that Keras has
for it; a user who wants to see it calls ``keras.config.enable_interactive_logging()`` after
`DistributedOptimizer`. That switch belongs to a thread, and on JAX and torch Keras may draw the
progress bar on another one, so the bar itself is told as well, when `fit` sets it up.
"""

from __future__ import annotations

from typing import Any

import keras

from ringplug.backend import runtime

__all__ = ["rank_zero_only"]

_MARK = "_ringplug_quiet"


def rank_zero_only() -> None:
    """Let Keras print on rank 0 only."""
    if runtime.current().world.rank == 0:
        return
    keras.config.disable_interactive_logging()
    bar = keras.callbacks.ProgbarLogger
    if hasattr(bar, _MARK):
        return
    original = bar.set_params

    def set_params(self: Any, params: Any) -> None:
        original(self, params)
        if not keras.config.is_interactive_logging_enabled():
            self.verbose = 0

    bar.set_params = set_params
    setattr(bar, _MARK, True)
