"""Saved, loaded, pickled and copied; run as one rank of two, in a folder they share."""

import copy
import os
import pickle
import zipfile

import keras
import numpy as np

import ringplug
import ringplug.keras as ring
from tests.keras.ranks import task

FOLDER = os.environ["TESTS_FOLDER"]


def trained(make, options=None, epochs=1):
    x, y = task.data()
    model = task.make_model()
    optimizer = ring.DistributedOptimizer(make(), **{"scale_lr": None, **(options or {})})
    task.fit(model, optimizer, task.mine(x), task.mine(y), task.BATCH, epochs=epochs)
    return model


def numbers(variables):
    return [keras.ops.convert_to_numpy(v).astype("float64") for v in variables]


def go_on(model):
    x, y = task.data()
    model.fit(task.mine(x), task.mine(y), batch_size=8, shuffle=False, verbose=0)
    return model.get_weights()


def files_know_nothing_of_ringplug():
    model = trained(lambda: keras.optimizers.Adam(0.01))
    path = os.path.join(FOLDER, "plain.keras")
    if ring.rank() == 0:
        model.save(path)
        with zipfile.ZipFile(path) as archive:
            assert b"ringplug" not in archive.read("config.json")
        model.save_weights(os.path.join(FOLDER, "only.weights.h5"))
    ringplug.barrier()
    plain = keras.models.load_model(path)
    assert type(plain.optimizer) in (
        keras.optimizers.Adam,
        type(keras.optimizers.Adam()),
    ), type(plain.optimizer)
    assert int(plain.optimizer.iterations) == 6
    assert (
        task.difference(numbers(plain.optimizer.variables), numbers(model.optimizer.variables)) == 0
    )
    model.load_weights(os.path.join(FOLDER, "only.weights.h5"))


def loaded_model_is_distributed_again():
    path = os.path.join(FOLDER, "resumed.keras")
    model = trained(lambda: keras.optimizers.Adam(0.01))
    if ring.rank() == 0:
        model.save(path)
    ringplug.barrier()
    loaded = ring.load_model(path, compression="bf16")
    assert loaded.optimizer.ringplug.options.compression == "bf16"
    assert float(loaded.optimizer.learning_rate) == float(model.optimizer.learning_rate)
    loaded = ring.load_model(path)
    assert task.difference(go_on(loaded), go_on(model)) == 0
    assert loaded.optimizer.ringplug.meter.updates == 6
    uncompiled = ring.load_model(path, compile=False)
    assert getattr(uncompiled, "optimizer", None) is None


def old_format():
    path = os.path.join(FOLDER, "old.h5")
    model = trained(lambda: keras.optimizers.SGD(0.01, momentum=0.9))
    if ring.rank() == 0:
        model.save(path)
    ringplug.barrier()
    plain = keras.models.load_model(path, compile=False)
    assert task.difference(plain.get_weights(), model.get_weights()) == 0


def loss_scale_survives():
    path = os.path.join(FOLDER, "scaled.keras")
    model = trained(lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.01)))
    if ring.rank() == 0:
        model.save(path)
    ringplug.barrier()
    loaded = ring.load_model(path)
    assert isinstance(loaded.optimizer, keras.optimizers.LossScaleOptimizer)
    assert not hasattr(loaded.optimizer.inner_optimizer, "ringplug")
    assert task.difference(go_on(loaded), go_on(model)) == 0


def pickled_and_copied():
    model = trained(lambda: keras.optimizers.Adam(0.01), {"compression": "fp16"})
    original = model.optimizer
    for again in (pickle.loads(pickle.dumps(original)), copy.deepcopy(original)):
        assert type(again) is type(original)
        assert again.ringplug.options == original.ringplug.options
        assert again.ringplug is not original.ringplug
        assert int(again.iterations) == 6
        again.build(model.trainable_variables)
        assert len(again.variables) == len(original.variables)
        assert task.difference(numbers(again.variables), numbers(original.variables)) == 0
    cloned = type(original).from_config(original.get_config())
    assert cloned.ringplug.options.compression == "fp16"


@keras.saving.register_keras_serializable(package="tests")
class Mine(keras.optimizers.SGD):
    """A user's optimizer."""


def own_optimizers_keep_their_name():
    optimizer = ring.DistributedOptimizer(Mine(0.1), scale_lr=None)
    saved = keras.saving.serialize_keras_object(optimizer)
    assert saved["registered_name"] == "tests>Mine", saved
    again = keras.saving.deserialize_keras_object(saved)
    assert type(again) is Mine


def swap_keeps_state():
    x, y = task.data()
    model = task.make_model()
    optimizer = keras.optimizers.Adam(0.01)
    model.compile(optimizer, "mse")
    model.fit(task.mine(x)[:8], task.mine(y)[:8], batch_size=8, verbose=0)
    before = numbers(optimizer.variables)
    assert ring.DistributedOptimizer(optimizer, scale_lr=None) is optimizer
    assert task.difference(numbers(optimizer.variables), before) == 0
    assert int(optimizer.iterations) == 1
    assert isinstance(optimizer, keras.optimizers.Adam)
    np.testing.assert_equal(len(before), len(optimizer.variables))


CHECKS = [
    files_know_nothing_of_ringplug,
    loaded_model_is_distributed_again,
    old_format,
    loss_scale_survives,
    pickled_and_copied,
    own_optimizers_keep_their_name,
    swap_keeps_state,
]
