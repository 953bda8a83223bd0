"""Horovod's ``horovod.torch.elastic``, in a job of fixed size; see `ringplug.elastic`.

::

    state = ring.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0)

    @ring.elastic.run
    def train(state):
        for state.epoch in range(state.epoch, 10):
            for index, batch in enumerate(loader):
                ...
                state.sampler.record_batch(index, batch_size)
                state.commit()
            state.sampler.set_epoch(state.epoch + 1)
"""

from __future__ import annotations

from ringplug.elastic import ObjectState, State, run
from ringplug.torch.elastic.sampler import ElasticSampler
from ringplug.torch.elastic.state import TorchState

__all__ = ["ElasticSampler", "ObjectState", "State", "TorchState", "run"]
