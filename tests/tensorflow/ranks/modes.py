"""The three ways in which TensorFlow runs a function."""

import tensorflow as tf

MODES = {
    "eager": lambda function: function,
    "graph": tf.function,
    "xla": lambda function: tf.function(function, jit_compile=True),
}
UNCOMPILED = {name: mode for name, mode in MODES.items() if name != "xla"}
