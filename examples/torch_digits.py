"""Handwritten digits with a plain PyTorch loop.

python examples/torch_digits.py
ringrun -np 2 python examples/torch_digits.py
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

import ringplug.torch as ring


def load():
    """1,797 images of 8 x 8 pixels: training and validation set, shuffled once."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(images))
    pixels = torch.tensor(images[order] / 16, dtype=torch.float32)
    digits = torch.tensor(labels[order])
    return (pixels[:1536], digits[:1536]), (pixels[1536:], digits[1536:])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch", type=int, default=64, help="of all processes together")
    parser.add_argument("--json", type=Path, help="write the curves here, from rank 0")
    args = parser.parse_args()

    ring.init()
    torch.manual_seed(ring.rank())
    (images, labels), (test_images, test_labels) = load()
    images, labels = images[ring.rank() :: ring.size()], labels[ring.rank() :: ring.size()]
    batch = args.batch // ring.size()

    model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = ring.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    ring.broadcast_parameters(model.state_dict(), root_rank=0)
    ring.broadcast_optimizer_state(optimizer, root_rank=0)

    curve = []
    for epoch in range(args.epochs):
        total = torch.zeros(())
        for start in range(0, len(images), batch):
            optimizer.zero_grad()
            output = model(images[start : start + batch])
            loss = nn.functional.cross_entropy(output, labels[start : start + batch])
            loss.backward()
            optimizer.step()
            total += loss.detach()
        mean = total / (len(images) / batch)
        curve.append(float(ring.allreduce(mean, name="loss")))
        if ring.rank() == 0:
            print(f"epoch {epoch}: loss {curve[-1]:.4f}")

    accuracy = float((model(test_images).argmax(1) == test_labels).float().mean())
    if ring.rank() == 0:
        print(f"torch on {ring.size()}: accuracy {accuracy:.4f}")
        if args.json:
            args.json.write_text(json.dumps({"loss": curve, "accuracy": accuracy}))


if __name__ == "__main__":
    main()
