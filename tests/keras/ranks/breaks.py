"""Rank 1 fails inside its third step, in the way that argv says; run as one rank of two."""

import sys

import keras

import ringplug.keras as ring
from tests.keras.ranks import task

HOW, CALLBACKS = sys.argv[1], sys.argv[2] == "callbacks"

ring.init()
optimizer = ring.DistributedOptimizer(keras.optimizers.SGD(0.1), scale_lr=None)
callbacks = [ring.callbacks.MetricAverageCallback()] if CALLBACKS else []

if HOW == "exchange" and ring.rank() == 1:
    # Like a bug in ringplug or a library below, in the middle of the compiled step.
    meter = optimizer.ringplug.meter
    whole = meter.run

    def broken(work, counts):
        def fail():
            if meter.updates == 3:
                raise ValueError("broken on rank 1")
            work()

        whole(fail, counts)

    meter.run = broken


class Raise(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        if batch == 3 and ring.rank() == 1:
            raise ValueError("broken on rank 1")


if HOW == "python":
    callbacks.append(Raise())
if HOW == "uneven" and ring.rank() == 1:
    # Without our callbacks nobody compares the numbers of batches beforehand.
    x, y = (task.mine(a)[:16] for a in task.data())
else:
    x, y = (task.mine(a) for a in task.data())
compile_with = {"jit_compile": True} if keras.backend.backend() == "tensorflow" else {}
task.fit(task.make_model(), optimizer, x, y, 8, callbacks=callbacks, **compile_with)
if HOW != "uneven":
    print("fit returned", flush=True)
