"""``horovod.torch.mpi_ops``."""

from __future__ import annotations

from ringplug.as_horovod import offer

__all__, __getattr__, __dir__ = offer(__name__, "ringplug.torch.mpi_ops", "ringplug.torch")
