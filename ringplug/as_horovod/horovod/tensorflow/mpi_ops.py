"""``horovod.tensorflow.mpi_ops``."""

from __future__ import annotations

from ringplug.as_horovod import offer

__all__, __getattr__, __dir__ = offer(
    __name__, "ringplug.tensorflow.mpi_ops", "ringplug.tensorflow"
)
