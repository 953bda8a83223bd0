"""A small GPT on real English: the Python manual that the standard library carries.

python examples/lightning_gpt.py
ringrun -np 2 python examples/lightning_gpt.py --compression bf16
"""

import argparse
from pydoc_data import topics

import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from ringplug.lightning import RingStrategy

TEXT = "".join(topics.topics.values())
ALPHABET = sorted(set(TEXT))
CONTEXT = 64


class Manual(Dataset):
    """Pieces of the text, each a context and the same shifted by one character."""

    def __init__(self, first, last):
        codes = {character: code for code, character in enumerate(ALPHABET)}
        part = TEXT[int(first * len(TEXT)) : int(last * len(TEXT))]
        self.text = torch.tensor([codes[character] for character in part])

    def __len__(self):
        return (len(self.text) - 1) // CONTEXT

    def __getitem__(self, index):
        piece = self.text[index * CONTEXT : (index + 1) * CONTEXT + 1]
        return piece[:-1], piece[1:]


class GPT(pl.LightningModule):
    """A decoder-only transformer that predicts the next character."""

    def __init__(self, width=128, depth=3, heads=4, lr=3e-3):
        super().__init__()
        self.lr = lr
        self.token = nn.Embedding(len(ALPHABET), width)
        self.position = nn.Parameter(torch.zeros(CONTEXT, width))
        block = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, len(ALPHABET))
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT))

    def forward(self, tokens):
        return self.head(self.blocks(self.token(tokens) + self.position, mask=self.mask))

    def loss(self, batch):
        tokens, following = batch
        return nn.functional.cross_entropy(self(tokens).flatten(0, 1), following.flatten())

    def training_step(self, batch):
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch):
        self.log("loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--steps", type=int, default=-1, help="stop after so many")
    parser.add_argument("--batch", type=int, default=32, help="of all processes together")
    parser.add_argument("--compression", default="none", choices=["none", "fp16", "bf16"])
    args = parser.parse_args()

    pl.seed_everything(1)
    trainer = pl.Trainer(
        strategy=RingStrategy(compression=args.compression),
        accelerator="cpu",
        max_epochs=args.epochs,
        max_steps=args.steps,
        limit_val_batches=20,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        gradient_clip_val=1.0,
    )
    batch = args.batch // trainer.world_size
    training = DataLoader(Manual(0, 0.9), batch, shuffle=True)
    validation = DataLoader(Manual(0.9, 1), batch)
    model = GPT()
    before = trainer.validate(model, validation, verbose=False)[0]["loss"]
    trainer.fit(model, training)
    after = trainer.validate(model, validation, verbose=False)[0]["loss"]
    if trainer.is_global_zero:
        print(f"gpt on {trainer.world_size}: nats per character {before:.3f} -> {after:.3f}")


if __name__ == "__main__":
    main()
