"""Handwritten digits with Lightning.

    python examples/lightning_digits.py                   one process
    ringrun -np 2 python examples/lightning_digits.py     two, same result
    python examples/lightning_digits.py --devices 2       starts the second by itself

The batch of all processes together stays the same whatever their number.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import pytorch_lightning as pl
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ringplug.lightning import RingStrategy


class Digits(pl.LightningModule):
    """A small convolutional network and its training."""

    def __init__(self):
        super().__init__()
        self.network = nn.Sequential(
            nn.Conv2d(1, 32, 3),
            nn.Tanh(),
            nn.Conv2d(32, 32, 3),
            nn.Tanh(),
            nn.Flatten(),
            nn.Linear(512, 64),
            nn.Tanh(),
            nn.Linear(64, 10),
        )
        self.curve = []

    def training_step(self, batch):
        images, labels = batch
        loss = nn.functional.cross_entropy(self.network(images), labels)
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def on_train_epoch_end(self):
        self.curve.append(float(self.trainer.callback_metrics["loss"]))

    def validation_step(self, batch):
        images, labels = batch
        right = (self.network(images).argmax(1) == labels).float().mean()
        self.log("accuracy", right, sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def load(batch):
    """1,797 images of 8 x 8 pixels, shuffled once; the strategy deals them out to the ranks."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(images))
    pixels = torch.tensor(images[order] / 16, dtype=torch.float32).reshape(-1, 1, 8, 8)
    data = TensorDataset(pixels, torch.tensor(labels[order]))
    training = torch.utils.data.Subset(data, range(1536))
    validation = torch.utils.data.Subset(data, range(1536, len(data)))
    return DataLoader(training, batch), DataLoader(validation, batch)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch", type=int, default=64, help="of all processes together")
    parser.add_argument("--devices", default="auto")
    parser.add_argument("--compression", default="none", choices=["none", "fp16", "bf16"])
    parser.add_argument("--json", type=Path, help="write the curves here, from rank 0")
    args = parser.parse_args()

    pl.seed_everything(1)
    model = Digits()
    trainer = pl.Trainer(
        strategy=RingStrategy(compression=args.compression),
        accelerator="cpu",
        devices=args.devices,
        max_epochs=args.epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(model, *load(args.batch // trainer.world_size))
    if trainer.is_global_zero:
        accuracy = float(trainer.callback_metrics["accuracy"])
        print(f"lightning on {trainer.world_size}: accuracy {accuracy:.4f}")
        if args.json:
            args.json.write_text(json.dumps({"loss": model.curve, "accuracy": accuracy}))


if __name__ == "__main__":
    main()
