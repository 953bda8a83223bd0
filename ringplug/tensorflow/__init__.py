"""ringplug for TensorFlow 2."""
