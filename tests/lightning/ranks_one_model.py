"""A script as users write it: ``ranks_one_model.py TREE HOW DIRECTORY``; see test_lightning.py."""

from __future__ import annotations

import importlib
import logging
import os
import signal
import sys
import time
import warnings
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

from ringplug.lightning import RingStrategy

tree, how, directory = sys.argv[1], sys.argv[2], Path(sys.argv[3])
L = importlib.import_module(tree)
warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)


class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Linear(3, 1)

    def training_step(self, batch, index):
        if how == "raise" and index == 2 and self.global_rank == 1:
            raise ValueError("the culprit")
        if how == "kill" and index == 2 and self.global_rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "term" and index == 2 and self.global_rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        if how == "slow":
            if index == 1:
                print("training", flush=True)
            time.sleep(0.1)
        return self.net(batch[0]).pow(2).mean()

    def test_step(self, batch, index):
        self.log("test", self.net(batch[0]).mean(), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


class Saves(L.Callback):
    """What Lightning's OnExceptionCheckpoint does."""

    def on_exception(self, trainer, *_):
        trainer.save_checkpoint(directory / f"rescued-{trainer.global_rank}.ckpt")
        print(f"exception at step {trainer.global_step}", flush=True)


trainer = L.Trainer(
    strategy=RingStrategy(),
    accelerator="cpu",
    devices=2 if how.startswith("devices") else "auto",
    max_epochs=3 if how not in ("term", "slow") else 1000,
    callbacks=[Saves()],
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
model = Model()
data = DataLoader(TensorDataset(torch.ones(16, 3)), batch_size=2)
trainer.fit(model, data)
trainer.test(model, data, verbose=False)
print(
    f"rank {trainer.global_rank} of {trainer.world_size}, steps {trainer.global_step}", flush=True
)
if how == "devices-fail":
    sys.exit(7)
