"""``horovod.ray``, which is not offered: importing it is the error that scripts expect then."""

from __future__ import annotations

raise ImportError("ringplug has no Ray integration; start the ranks with ringrun or ringplug.run")
