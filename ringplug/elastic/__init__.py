"""Training state that can be committed, restored, and brought from rank 0 to all ranks.

The names are those of Horovod's elastic training, and work in a job of fixed size: scripts
written for it run. A job whose ranks come and go is not offered yet: when a rank is lost, the
others restore their last commit and end with an error, see `run_fn`.

Nothing here knows a framework; `ringplug.torch.elastic` and relatives build on it.
"""

from __future__ import annotations

from ringplug.elastic.running import run, run_fn
from ringplug.elastic.state import HostUpdateResult, ObjectState, State

__all__ = ["HostUpdateResult", "ObjectState", "State", "run", "run_fn"]
