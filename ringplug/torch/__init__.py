"""ringplug for PyTorch: a process group for torch.distributed, and Horovod's names.

With torch.distributed, and whatever is built on it::

    import ringplug.torch
    torch.distributed.init_process_group("ring")     # under ringrun, mpirun, srun, or alone

In a plain training loop::

    import ringplug.torch as ring
    ring.init()
    optimizer = ring.DistributedOptimizer(optimizer, model.named_parameters())
    ring.broadcast_parameters(model.state_dict(), root_rank=0)
"""

from __future__ import annotations

from ringplug.torch.rendezvous import register

register()
