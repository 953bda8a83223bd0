"""What all tests share."""

from __future__ import annotations

import os

# Tests start ranks themselves: a test must not see the world that its own runner is part of.
for _name in [name for name in os.environ if name.startswith(("RINGPLUG_", "HOROVOD_"))]:
    del os.environ[_name]
os.environ.setdefault("OMP_NUM_THREADS", "1")
