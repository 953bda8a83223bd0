"""Gradient tapes whose gradients are reduced over the ranks."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from ringplug.backend.buffers import ReduceOp
from ringplug.backend.errors import UsageError
from ringplug.backend.process_set import ProcessSet, global_process_set
from ringplug.tensorflow.compression import Compression, CompressionChoice
from ringplug.tensorflow.failures import entry
from ringplug.tensorflow.gradients import GradientReducer

__all__ = ["DistributedGradientTape", "PartialDistributedGradientTape"]

_NAME = "DistributedGradientTape"


@entry
def DistributedGradientTape(  # noqa: PLR0913, PLR0917 - Horovod's name and signature
    gradtape: Any,
    device_dense: str = "",
    device_sparse: str = "",
    compression: CompressionChoice = Compression.none,
    sparse_as_dense: bool = False,
    op: Any = ReduceOp.AVERAGE,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """A gradient tape whose ``gradient`` reduces the gradients over the ranks.

    It continues the given tape, which stays as it is, and is an instance of the same class with
    these methods:

    * ``gradient(target, sources, output_gradients=None, unconnected_gradients=NONE,
      use_generic_names=False)``: the tape's own gradients, reduced. All ranks call it in the
      same order. ``use_generic_names`` has no effect: names never depend on variables' names.
    * ``register_local_source(source)``: the gradient of this variable stays on this rank,
      divided by the number of ranks if `scale_local_gradients`.
    * ``jacobian`` and ``batch_jacobian`` are the tape's own, of this rank only.

    Args:
        gradtape: A ``tf.GradientTape``, used or about to be used.
        device_dense: Without effect.
        device_sparse: Without effect.
        compression: What gradients travel as; see `allreduce`.
        sparse_as_dense: Whether IndexedSlices are made dense, rather than their rows gathered.
        op: How gradients are combined.
        gradient_predivide_factor: Divides the gradients before they are averaged; the result is
            multiplied by it.
        num_groups: Older spelling of `groups`.
        groups: Into how many operations the gradients are divided, or lists of the variables
            whose gradients belong together; all in one by default.
        process_set: Whose ranks take part; the others keep their own gradients.
        scale_local_gradients: Whether gradients of local sources are divided by the number of
            ranks.

    Returns:
        The tape.

    Raises:
        UsageError: `gradtape` is no tape, or is distributed already; an argument has a value
            that makes no sense.
        NotImplementedError: From ``gradient``, for sparse gradients with a reduction other than
            Average and Sum.
    """
    del device_dense, device_sparse
    return _distributed(
        gradtape,
        GradientReducer(
            _NAME,
            compression,
            sparse_as_dense,
            op,
            gradient_predivide_factor,
            num_groups,
            groups,
            process_set,
            scale_local_gradients,
        ),
    )


@entry
def PartialDistributedGradientTape(  # noqa: PLR0913, PLR0917 - see above
    gradtape: Any,
    device_dense: str = "",
    device_sparse: str = "",
    compression: CompressionChoice = Compression.none,
    sparse_as_dense: bool = False,
    op: Any = ReduceOp.AVERAGE,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """A `DistributedGradientTape` that leaves the gradients of some layers on their rank.

    Args:
        gradtape: See there, like the others.
        device_dense: See there.
        device_sparse: See there.
        compression: See there.
        sparse_as_dense: See there.
        op: See there.
        gradient_predivide_factor: See there.
        num_groups: See there.
        groups: See there.
        process_set: See there.
        local_layers: A built Keras layer or several; their trainable weights are local sources.
        scale_local_gradients: See there.

    Raises:
        UsageError: Something in `local_layers` is no Keras layer.
    """
    layers = [] if local_layers is None else local_layers
    if local_layers is not None:
        kind = tf.keras.layers.Layer
        layers = [layers] if isinstance(layers, kind) else list(layers)
        if not all(isinstance(layer, kind) for layer in layers):
            raise UsageError("local_layers: all of them must be Keras layers")
    tape = DistributedGradientTape(
        gradtape,
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        op,
        gradient_predivide_factor,
        num_groups,
        groups,
        process_set,
        scale_local_gradients,
    )
    for layer in layers:
        for variable in layer.trainable_weights:
            tape.register_local_source(variable)
    return tape


class _Distributed:
    """What is added to a tape's class."""

    _given: Any
    _reducer: GradientReducer
    _plain_class: Any

    @entry
    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
        use_generic_names: bool = False,
    ) -> Any:
        """The tape's gradients, reduced over the ranks; see `DistributedGradientTape`."""
        del use_generic_names
        if isinstance(unconnected_gradients, bool):
            # Horovod has use_generic_names in this place.
            unconnected_gradients = tf.UnconnectedGradients.NONE
        if self._given._recording and not self._given._persistent:
            # As TensorFlow does where gradient() is called inside of the tape's block.
            self._given._pop_tape()
        tape: Any = self._plain()
        gradients = tape.gradient(target, sources, output_gradients, unconnected_gradients)
        reduced = self._reducer.reduce(tf.nest.flatten(gradients), tf.nest.flatten(sources))
        return tf.nest.pack_sequence_as(sources, reduced)

    def register_local_source(self, source: Any) -> None:
        """Leave the gradient of a variable on this rank."""
        self._reducer.register_local(source)

    def jacobian(self, *args: Any, **kwargs: Any) -> Any:
        """The tape's own, of this rank's values."""
        return self._plain().jacobian(*args, **kwargs)

    def batch_jacobian(self, *args: Any, **kwargs: Any) -> Any:
        """The tape's own, of this rank's values."""
        return self._plain().batch_jacobian(*args, **kwargs)

    def _plain(self) -> Any:
        """The same tape, with the same state, as its own class has it."""
        plain = self._plain_class.__new__(self._plain_class)
        plain.__dict__ = self.__dict__
        return plain


def _distributed(gradtape: Any, reducer: GradientReducer) -> Any:
    if not isinstance(gradtape, tf.GradientTape):
        raise UsageError(f"expected a tf.GradientTape, not {type(gradtape).__name__}")
    if isinstance(gradtape, _Distributed):
        raise UsageError("this tape's gradients are reduced over the ranks already")
    kind = _class_for(type(gradtape))
    tape = kind.__new__(kind)
    tape.__dict__.update(vars(gradtape))
    # The given tape ends its own recording.
    tape._recording = False
    tape._given = gradtape
    tape._reducer = reducer
    return tape


_classes: dict[Any, Any] = {}


def _class_for(kind: Any) -> Any:
    if kind not in _classes:
        about = {"_plain_class": kind, "__module__": kind.__module__, "__doc__": kind.__doc__}
        _classes[kind] = type(kind.__name__, (_Distributed, kind), about)
    return _classes[kind]
