"""``horovod.mxnet``, which is not offered: importing it is the error that scripts expect then."""

from __future__ import annotations

raise ImportError("MXNet is not supported by ringplug; its array operations take numpy arrays")
