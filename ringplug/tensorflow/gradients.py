"""Gradients of many variables, reduced together: what tapes and optimizers have in common."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from ringplug.backend import runtime
from ringplug.backend.buffers import ReduceOp
from ringplug.backend.errors import NotSupportedError, UsageError
from ringplug.backend.process_set import ProcessSet
from ringplug.tensorflow import collectives
from ringplug.tensorflow.collectives import Options
from ringplug.tensorflow.compression import CompressionChoice, split_compression
from ringplug.tensorflow.exchange import exchange

__all__ = ["GradientReducer", "identity_of"]

_COUNTED = (ReduceOp.AVERAGE, ReduceOp.SUM)


def identity_of(variable: Any) -> int:
    """The same number for a Keras variable and the variable of TensorFlow in it."""
    handle = getattr(variable, "handle", None)
    return id(variable) if handle is None else id(handle)


class GradientReducer:
    """Reduces one list of gradients after the other.

    Dense gradients travel in one operation, or one for each group; sparse ones in two
    allgathers. In eager code a gradient that is missing on some ranks counts as zeros there, and
    is present everywhere afterwards; one that is missing everywhere stays None. In a graph it is
    fixed while tracing which gradients there are: ranks that disagree all get a MismatchError
    when it runs.

    Args:
        name: What the ranks match by.
        compression: See `allreduce`.
        sparse_as_dense: Whether IndexedSlices are made dense first.
        op: The reduction.
        gradient_predivide_factor: Divides the gradients before an average, and multiplies the
            result.
        num_groups: Horovod's older spelling of a number of `groups`.
        groups: A number of groups, or lists of the variables whose gradients belong together.
        process_set: Who takes part; the gradients of other ranks stay as they are.
        scale_local_gradients: Whether gradients of local variables are divided by the number of
            ranks, as an average of gradients that are zero elsewhere.

    Raises:
        UsageError: An argument has a value that makes no sense, or two do not go together.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - Horovod's parameters
        self,
        name: str,
        compression: CompressionChoice,
        sparse_as_dense: bool,
        op: Any,
        gradient_predivide_factor: float,
        num_groups: int,
        groups: Any,
        process_set: ProcessSet,
        scale_local_gradients: bool,
    ) -> None:
        try:
            self.op = ReduceOp(op)
        except ValueError:
            raise UsageError(f"op={op!r} is not a reduction") from None
        if gradient_predivide_factor <= 0:
            raise UsageError("gradient_predivide_factor must be above 0")
        if gradient_predivide_factor != 1.0 and self.op is not ReduceOp.AVERAGE:
            raise UsageError("gradient_predivide_factor needs op=Average")
        if num_groups:
            warnings.warn("num_groups= is the older spelling: use groups=", DeprecationWarning, 4)
            groups = num_groups if groups is None else groups
        self.name = name
        self.process_set = process_set
        self._codec, self._compressor = split_compression(compression)
        self._sparse_as_dense = sparse_as_dense
        self._scales = (1.0 / gradient_predivide_factor, float(gradient_predivide_factor))
        self._groups = _checked_groups(groups)
        self._scale_local = scale_local_gradients
        self._local: dict[int, Any] = {}

    def register_local(self, variable: Any) -> None:
        """Leave the gradients of a variable on this rank."""
        self._local[identity_of(variable)] = variable

    @property
    def members(self) -> int:
        """How many ranks take part."""
        return collectives.set_size(self.process_set)

    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """The gradients, reduced over the ranks.

        Args:
            gradients: Tensors, IndexedSlices or None.
            variables: Whose they are.
        """
        result = list(gradients)
        local = [at for at, v in enumerate(variables) if identity_of(v) in self._local]
        shared = [at for at in range(len(result)) if at not in local]
        for at, gradient in zip(shared, self.densified([result[i] for i in shared]), strict=True):
            result[at] = gradient
        if self.members > 1 and self.included:
            sparse = [at for at in shared if isinstance(result[at], tf.IndexedSlices)]
            self._gather(result, sparse)
            self._reduce(result, variables, [at for at in shared if at not in sparse])
        if self._scale_local:
            for at in local:
                result[at] = _divided(result[at], self.members)
        return result

    def densified(self, gradients: Sequence[Any]) -> list[Any]:
        """The gradients without IndexedSlices, if that is wanted."""
        if not self._sparse_as_dense:
            return list(gradients)
        return [
            tf.convert_to_tensor(g) if isinstance(g, tf.IndexedSlices) else g for g in gradients
        ]

    @property
    def included(self) -> bool:
        """Whether this rank takes part."""
        current = runtime.current()
        number = self.process_set.process_set_id
        return current.world.rank in current.groups.ranks.get(0 if number is None else number, ())

    def exchange(
        self, name: str, gradients: Sequence[Any], extra: Sequence[Any] = ()
    ) -> tuple[list[Any], list[Any]]:
        """Dense tensors reduced over the ranks, as one operation.

        Args:
            name: What the ranks match by.
            gradients: What to reduce.
            extra: More to reduce, which is not given to a compressor of the user's.

        Returns:
            The two lists, reduced.
        """
        options = Options(name, self.process_set, self.op, *self._scales, self._codec, grouped=True)
        if self._compressor is None:
            reduced = exchange([*gradients, *extra], options)
            return reduced[: len(gradients)], reduced[len(gradients) :]
        pairs = [self._compressor.compress(gradient) for gradient in gradients]
        reduced = exchange([*(payload for payload, _ in pairs), *extra], options)
        return [
            self._compressor.decompress(payload, ctx)
            for payload, (_, ctx) in zip(reduced, pairs, strict=False)
        ], reduced[len(gradients) :]

    def _gather(self, result: list[Any], places: Sequence[int]) -> None:
        """Replace sparse gradients by all ranks' rows."""
        if not places:
            return
        if self.op not in _COUNTED:
            raise NotSupportedError(
                f"op={self.op.name.capitalize()} cannot reduce sparse gradients; pass "
                "sparse_as_dense=True"
            )
        parts = []
        for what in ("values", "indices"):
            options = Options(f"{self.name}.sparse.{what}", self.process_set, grouped=True)
            given = [getattr(result[at], what) for at in places]
            parts.append(collectives.allgather(given, options))
        for at, values, indices in zip(places, *parts, strict=True):
            if self.op is ReduceOp.AVERAGE:
                values = _divided(values, self.members)
            result[at] = tf.IndexedSlices(values, indices, result[at].dense_shape)

    def _reduce(self, result: list[Any], variables: Sequence[Any], places: Sequence[int]) -> None:
        """Replace dense gradients by their reductions."""
        counted = tf.executing_eagerly() and self.op in _COUNTED
        if counted:
            places = [at for at in places if result[at] is not None or _may_have(variables[at])]
        else:
            places = [at for at in places if result[at] is not None]
        if not places:
            return
        present = [float(result[at] is not None) for at in places]
        for at in places:
            if result[at] is None:
                result[at] = tf.zeros(variables[at].shape, tf.as_dtype(variables[at].dtype))
        # Ranks need not be missing the same gradients: how many have each travels along.
        extra = [tf.constant(present)] if counted else []
        counts: Any = present
        for number, group in enumerate(self._split(places, variables)):
            name = f"{self.name}.{number}" if number else self.name
            reduced, more = self.exchange(name, [result[at] for at in group], extra)
            for at, gradient in zip(group, reduced, strict=True):
                result[at] = gradient
            counts, extra = more[0].numpy() if more else counts, []
        for at, count in zip(places, counts, strict=True):
            if count == 0:
                result[at] = None

    def _split(self, places: Sequence[int], variables: Sequence[Any]) -> Iterable[list[int]]:
        """The places of gradients that travel together."""
        if self._groups is None:
            return [list(places)]
        if isinstance(self._groups, int):
            count = min(self._groups, len(places))
            bounds = [len(places) * number // count for number in range(count + 1)]
            return [list(places[a:b]) for a, b in itertools.pairwise(bounds)]
        at_of = {identity_of(variables[at]): at for at in places}
        groups = [
            [
                at_of.pop(identity_of(variable))
                for variable in group
                if identity_of(variable) in at_of
            ]
            for group in self._groups
        ]
        return [group for group in groups if group] + [[at] for at in sorted(at_of.values())]


def _checked_groups(groups: Any) -> Any:
    if groups is None:
        return None
    if isinstance(groups, bool) or not isinstance(groups, (int, list, tuple)):
        raise UsageError(f"groups={groups!r}: expected a number or a list of lists of variables")
    if isinstance(groups, int):
        if groups < 1:
            raise UsageError(f"groups={groups}: expected a number above 0")
        return groups
    if not all(isinstance(group, (list, tuple)) for group in groups):
        raise UsageError("groups: expected a list of lists of variables")
    seen = [identity_of(variable) for group in groups for variable in group]
    if len(set(seen)) != len(seen):
        raise UsageError("groups: a variable is in two groups")
    return groups


def _may_have(variable: Any) -> bool:
    """Whether there can be a gradient on another rank."""
    dtype = tf.as_dtype(variable.dtype)
    return bool(dtype.is_floating or dtype.is_complex)


def _divided(gradient: Any, by: int) -> Any:
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        values = gradient.values / tf.cast(by, gradient.values.dtype)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return gradient / tf.cast(by, gradient.dtype)
