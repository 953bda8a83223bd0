"""``horovod.spark``, which is not offered: importing it is the error that scripts expect then."""

from __future__ import annotations

raise ImportError("ringplug has no Spark integration; start the ranks with ringrun or ringplug.run")
