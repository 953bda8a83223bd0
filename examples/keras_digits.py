"""Handwritten digits with Keras 3, on any Keras backend.

    python examples/keras_digits.py                       one process
    ringrun -np 2 python examples/keras_digits.py         two, same result
    KERAS_BACKEND=jax ringrun -np 4 python examples/keras_digits.py

The batch of all processes together stays the same whatever their number, and so does the
learning rate: the loss curve is that of one process. To grow the batch with the number of
processes instead, pass ``scale_lr="linear"``, which grows the learning rate with it.
"""

import argparse
import json
from pathlib import Path

import keras
import numpy as np
from sklearn.datasets import load_digits

import ringplug.keras as ring


def load():
    """1,797 images of 8 x 8 pixels: training and validation set, shuffled once."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(images))
    images = (images[order] / 16).astype("float32").reshape(-1, 8, 8, 1)
    labels = labels[order].astype("int32")
    return (images[:1536], labels[:1536]), (images[1536:], labels[1536:])


def build():
    """A small convolutional network."""
    keras.utils.set_random_seed(1)
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(32, 3, activation="tanh"),
            keras.layers.Conv2D(32, 3, activation="tanh"),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="tanh"),
            keras.layers.Dense(10),
        ]
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch", type=int, default=64, help="of all processes together")
    parser.add_argument("--compression", default="none", choices=["none", "fp16", "bf16"])
    parser.add_argument("--warmup", type=int, default=0, help="epochs of learning-rate warm-up")
    parser.add_argument("--json", type=Path, help="write the curves here, from rank 0")
    args = parser.parse_args()

    ring.init()
    (images, labels), validation = load()
    mine = slice(ring.rank(), None, ring.size())

    model = build()
    optimizer = ring.DistributedOptimizer(
        keras.optimizers.SGD(0.05, momentum=0.9), compression=args.compression, scale_lr=None
    )
    model.compile(
        optimizer=optimizer,
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    callbacks = [
        ring.callbacks.BroadcastGlobalVariablesCallback(0),
        ring.callbacks.MetricAverageCallback(),
    ]
    if args.warmup:
        callbacks.append(
            ring.callbacks.LearningRateWarmupCallback(warmup_epochs=args.warmup, verbose=1)
        )
    history = model.fit(
        images[mine],
        labels[mine],
        batch_size=args.batch // ring.size(),
        epochs=args.epochs,
        shuffle=False,
        validation_data=(validation[0][mine], validation[1][mine]),
        callbacks=callbacks,
        verbose=2,
    )
    if ring.rank() == 0:
        accuracy = history.history["val_accuracy"][-1]
        print(f"{keras.backend.backend()} on {ring.size()}: accuracy {accuracy:.4f}")
        if args.json:
            curves = {"loss": history.history["loss"], "accuracy": accuracy}
            args.json.write_text(json.dumps(curves))


if __name__ == "__main__":
    main()
