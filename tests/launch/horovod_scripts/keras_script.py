"""A tf.keras script as users of Horovod write them; it knows nothing of ringplug."""

import horovod.tensorflow as hvd_tf
import horovod.tensorflow.keras as hvd
import numpy as np
import tensorflow as tf

hvd.init()
gpus = tf.config.experimental.list_physical_devices("GPU")
if gpus:
    tf.config.experimental.set_visible_devices(gpus[hvd.local_rank()], "GPU")

tf.keras.utils.set_random_seed(7 + hvd.rank())
x = np.linspace(-1, 1, 256, dtype=np.float32).reshape(64, 4)
y = (x.sum(1, keepdims=True) > 0).astype(np.float32)
mine = slice(hvd.rank(), None, hvd.size())
dataset = tf.data.Dataset.from_tensor_slices((x[mine], y[mine])).repeat().shuffle(100).batch(8)

model = tf.keras.Sequential([tf.keras.layers.Dense(8, activation="relu"), tf.keras.layers.Dense(1)])
scaled_lr = 0.001 * hvd.size()
opt = tf.keras.optimizers.Adam(scaled_lr)
opt = hvd.DistributedOptimizer(opt, backward_passes_per_step=1, average_aggregated_gradients=True)
model.compile(loss="mse", optimizer=opt, metrics=["mae"])

callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
    hvd.callbacks.LearningRateWarmupCallback(initial_lr=scaled_lr, warmup_epochs=1, verbose=1),
]
history = model.fit(
    dataset,
    steps_per_epoch=4,
    callbacks=callbacks,
    epochs=2,
    verbose=1 if hvd.rank() == 0 else 0,
)
total = hvd.allreduce(np.float32(hvd.rank()), name="ranks", average=False)
assert float(total) == sum(range(hvd.size()))
for loss in history.history["loss"]:
    print(f"loss {loss:.5f}")

variable = tf.Variable(tf.fill([3], float(hvd.rank())))
hvd_tf.broadcast_variables([variable], root_rank=0)
with tf.GradientTape() as tape:
    loss = tf.reduce_sum(variable * (hvd.rank() + 1.0))
tape = hvd_tf.DistributedGradientTape(tape)
(gradient,) = tape.gradient(loss, [variable])
np.testing.assert_allclose(gradient, np.full(3, (hvd.size() + 1) / 2))
print("done")
