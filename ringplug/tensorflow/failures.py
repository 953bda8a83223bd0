"""Errors that are ringplug's and TensorFlow's at once.

Horovod's scripts for TensorFlow catch ``tf.errors.FailedPreconditionError`` and relatives, others
catch ringplug's classes: what the functions here raise is both. Inside of a ``tf.function`` an
error passes through TensorFlow, which keeps no more of it than a code and a text; the error
itself waits in `latched` for whoever wants it.

====================================================  =====================================
error of ringplug                                     TensorFlow's
====================================================  =====================================
MismatchError, NotInitializedError                    FailedPreconditionError
ShutDownError, PeerLostError, StalledError, others    UnknownError
of CollectiveError
NotSupportedError                                     UnimplementedError
UsageError, ConfigError                               InvalidArgumentError
UnavailableError                                      UnavailableError
====================================================  =====================================
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

import tensorflow as tf

from ringplug.backend.errors import (
    CollectiveError,
    ConfigError,
    MismatchError,
    NotInitializedError,
    NotSupportedError,
    RingplugError,
    ShutDownError,
    UnavailableError,
    UsageError,
)

__all__ = ["Latch", "code_of", "entry", "in_both_trees", "latched", "surfacing"]

P = ParamSpec("P")
T = TypeVar("T")

_KINDS: tuple[tuple[type[RingplugError], type[tf.errors.OpError], int], ...] = (
    (MismatchError, tf.errors.FailedPreconditionError, tf.errors.FAILED_PRECONDITION),
    (ShutDownError, tf.errors.UnknownError, tf.errors.UNKNOWN),
    (CollectiveError, tf.errors.UnknownError, tf.errors.UNKNOWN),
    (NotInitializedError, tf.errors.FailedPreconditionError, tf.errors.FAILED_PRECONDITION),
    (NotSupportedError, tf.errors.UnimplementedError, tf.errors.UNIMPLEMENTED),
    (UsageError, tf.errors.InvalidArgumentError, tf.errors.INVALID_ARGUMENT),
    (ConfigError, tf.errors.InvalidArgumentError, tf.errors.INVALID_ARGUMENT),
    (UnavailableError, tf.errors.UnavailableError, tf.errors.UNAVAILABLE),
    (RingplugError, tf.errors.UnknownError, tf.errors.UNKNOWN),
)


class Latch:
    """The last error that was raised inside of a graph, until it is taken."""

    def __init__(self) -> None:
        self._error: RingplugError | None = None

    def put(self, error: RingplugError) -> None:
        """Keep an error."""
        self._error = error

    def take(self) -> RingplugError | None:
        """The error, which is gone afterwards."""
        error, self._error = self._error, None
        return error


latched = Latch()


def code_of(error: BaseException) -> int:
    """The number that TensorFlow has for this kind of error."""
    for kind, _, code in _KINDS:
        if isinstance(error, kind):
            return code
    return int(tf.errors.INTERNAL)


def in_both_trees(error: RingplugError) -> RingplugError:
    """The same error, as an instance of TensorFlow's class as well."""
    if isinstance(error, tf.errors.OpError):
        return error
    for kind, other, code in _KINDS:
        if isinstance(error, kind):
            return _rebuild(type(error), other, code, error.args, vars(error))
    raise AssertionError(type(error))


@contextlib.contextmanager
def surfacing() -> Iterator[None]:
    """Raise in both trees what ringplug raises inside."""
    try:
        yield
    except RingplugError as error:
        both = in_both_trees(error)
        if both is error:
            raise
        raise both.with_traceback(error.__traceback__) from error.__cause__


def entry(function: Callable[P, T]) -> Callable[P, T]:
    """For what users call: errors in both trees, and AutoGraph leaves our code alone."""

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        with surfacing():
            return function(*args, **kwargs)

    untouched: Callable[P, T] = tf.autograph.experimental.do_not_convert(called)
    # A tf.function unwraps functions that it is given as arguments.
    vars(untouched)["__signature__"] = inspect.signature(function)
    del vars(untouched)["__wrapped__"]
    return untouched


def _rebuild(
    kind: type[RingplugError],
    other: type[tf.errors.OpError],
    code: int,
    args: tuple[Any, ...],
    state: dict[str, Any],
) -> RingplugError:
    error = _class_of(kind, other, code)(None, None, str(args[0]) if args else "")
    error.args = args
    vars(error).update(state)
    made: RingplugError = error
    return made


_classes: dict[tuple[Any, Any], Any] = {}


def _class_of(kind: type[RingplugError], other: type[tf.errors.OpError], code: int) -> Any:
    if (kind, other) in _classes:
        return _classes[kind, other]

    # AutoGraph makes errors of a trace anew with its own text, if they take these arguments.
    def __init__(self: Any, node_def: Any, op: Any, message: str, *args: Any) -> None:
        tf.errors.OpError.__init__(self, node_def, op, message, code, *args)
        self.args = (message,)

    def __reduce__(self: Any) -> Any:
        own = set(vars(self)) - set(vars(type(self)(None, None, "")))
        state = {name: value for name, value in vars(self).items() if name in own}
        return _rebuild, (kind, other, code, self.args, state)

    made = type(
        kind.__name__,
        (kind, other),
        {
            "__init__": __init__,
            "__reduce__": __reduce__,
            "__module__": __name__,
            "__doc__": kind.__doc__,
        },
    )
    return _classes.setdefault((kind, other), made)
