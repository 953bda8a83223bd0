"""Progress bars and Keras' messages from rank 0 only.

Two switches, both Keras' own. `rank_zero_only` sends what Keras prints on other ranks to
``absl.logging``; a user who wants to see it calls ``keras.config.enable_interactive_logging()``
after `DistributedOptimizer`. That switch belongs to a thread, and on JAX and torch Keras may
draw the progress bar on another one, so every callback of ringplug also asks for ``verbose=0``
on those ranks (`no_progress_bar`).
"""

from __future__ import annotations

from typing import Any

import keras

from ringplug.backend import runtime

__all__ = ["no_progress_bar", "rank_zero_only"]


def rank_zero_only() -> None:
    """Let Keras print on rank 0 only."""
    if runtime.current().world.rank > 0:
        keras.config.disable_interactive_logging()


def no_progress_bar(params: dict[str, Any]) -> None:
    """Turn off, on ranks above 0, the progress bar that gets the same `params` after this."""
    world = runtime.current().world
    if world.rank > 0 and not keras.config.is_interactive_logging_enabled():
        params["verbose"] = 0
