"""What one process computes with the whole batch, for scripts of ranks to compare with.

The first argument of the script says which of Lightning's module trees it runs in.
"""

from __future__ import annotations

import importlib
import logging
import sys
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ringplug.lightning

L = importlib.import_module(sys.argv[1])
RingStrategy = ringplug.lightning.RingStrategy
warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)

ROWS, EPOCHS = 48, 3


def rows(seed=1):
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(
        torch.randn(ROWS, 6, generator=generator), torch.randn(ROWS, 2, generator=generator)
    )


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))


class Module(L.LightningModule):
    def __init__(self, make_optimizer=None, seed=0):
        super().__init__()
        self.net = network(seed)
        self.make_optimizer = make_optimizer or (lambda p: torch.optim.SGD(p, 0.05, momentum=0.9))
        self.seen = []

    def loss(self, batch):
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def training_step(self, batch, _):
        self.seen.append(batch[0])
        return self.loss(batch)

    def validation_step(self, batch, _):
        self.log("val", self.loss(batch), sync_dist=True, on_epoch=True)

    test_step = validation_step

    def predict_step(self, batch, _):
        return self.net(batch[0])

    def configure_optimizers(self):
        return self.make_optimizer(self.parameters())


def trainer(strategy=None, **options):
    return L.Trainer(
        **{
            "strategy": RingStrategy() if strategy is None else strategy,
            "accelerator": "cpu",
            "max_epochs": EPOCHS,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "barebones": False,
            **options,
        }
    )


def reference(module, clip=None, accumulate=1, batch=8, epochs=EPOCHS, bf16=False, seed=1):
    """One process with the whole batch, written out by hand."""
    optimizer = module.configure_optimizers()
    data = rows(seed).tensors
    for _ in range(epochs):
        optimizer.zero_grad()
        for number, start in enumerate(range(0, ROWS, batch), 1):
            part = [tensor[start : start + batch] for tensor in data]
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                loss = module.loss(part)
            (loss / accumulate).backward()
            if number % accumulate == 0:
                if clip:
                    nn.utils.clip_grad_norm_(module.parameters(), clip)
                optimizer.step()
                optimizer.zero_grad()
    return module


def same(module, other, atol=1e-5):
    for (name, a), b in zip(module.state_dict().items(), other.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, atol=atol, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


def equal_on_all_ranks(module):
    flat = torch.cat([v.detach().double().reshape(-1) for v in module.parameters()])
    everyone = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, flat)
    assert all(torch.equal(one, flat) for one in everyone)


def ordered(size, seed=1):
    """A loader whose sampler Lightning leaves alone: interleaved, not shuffled."""
    sampler = torch.utils.data.DistributedSampler(rows(seed), shuffle=False)
    return DataLoader(rows(seed), batch_size=8 // size, sampler=sampler)


def fit_ordered(module, size, seed=1, **options):
    t = trainer(**options)
    module.train_dataloader = lambda: ordered(size, seed)
    t.fit(module)
    equal_on_all_ranks(module)
    return t
