"""XLA custom calls whose body is Python: the FFI's C structures in ctypes, no compiler needed.

A handler is a C function ``XLA_FFI_Error* handler(XLA_FFI_CallFrame*)``; ctypes makes one out
of a Python function. It gets the raw addresses of XLA's buffers, so nothing is copied on the
way to ringplug and back. The layout is that of ``xla/ffi/api/c_api.h``, version 0.x, which
XLA keeps compatible; the version check and the start-up probes of
the frameworks' modules guard against a day on which it does not.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

import ml_dtypes
import numpy as np

from ringplug.backend.buffers import Array
from ringplug.backend.errors import UnavailableError

__all__ = ["Body", "CodeOf", "Handler", "Targets", "register_with_api"]

Body: TypeAlias = Callable[[Sequence[Array], Sequence[Array]], None]
"""What a handler runs: inputs and outputs as views of XLA's memory."""

CodeOf: TypeAlias = Callable[[BaseException], int]
"""The error code for an exception."""

_METADATA: Final = 1
_EXECUTE: Final = 3
_TOKEN: Final = 17
_INTERNAL: Final = 13
_MAJOR: Final = 0

_DTYPES: Final[dict[int, np.dtype[Any]]] = {
    1: np.dtype(np.bool_),
    2: np.dtype(np.int8),
    3: np.dtype(np.int16),
    4: np.dtype(np.int32),
    5: np.dtype(np.int64),
    6: np.dtype(np.uint8),
    7: np.dtype(np.uint16),
    8: np.dtype(np.uint32),
    9: np.dtype(np.uint64),
    10: np.dtype(np.float16),
    11: np.dtype(np.float32),
    12: np.dtype(np.float64),
    15: np.dtype(np.complex64),
    16: np.dtype(ml_dtypes.bfloat16),
    18: np.dtype(np.complex128),
    19: np.dtype(ml_dtypes.float8_e5m2),
    20: np.dtype(ml_dtypes.float8_e4m3fn),
}


class _Extension(ctypes.Structure):
    pass


_Extension._fields_ = [
    ("struct_size", ctypes.c_size_t),
    ("type", ctypes.c_int),
    ("next", ctypes.POINTER(_Extension)),
]
_HEAD: Final[list[Any]] = [
    ("struct_size", ctypes.c_size_t),
    ("extension", ctypes.POINTER(_Extension)),
]


class _Version(ctypes.Structure):
    _fields_ = [*_HEAD, ("major", ctypes.c_int), ("minor", ctypes.c_int)]


class _Metadata(ctypes.Structure):
    # XLA's own struct_size stops before state_type_id, so it is no guide to what exists.
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("version", _Version),
        ("traits", ctypes.c_uint32),
        ("state_type_id", ctypes.c_int64),
    ]


class _MetadataExtension(ctypes.Structure):
    _fields_ = [("base", _Extension), ("metadata", ctypes.POINTER(_Metadata))]


class _Buffer(ctypes.Structure):
    _fields_ = [
        *_HEAD,
        ("dtype", ctypes.c_int),
        ("data", ctypes.c_void_p),
        ("rank", ctypes.c_int64),
        ("dims", ctypes.POINTER(ctypes.c_int64)),
    ]


class _Values(ctypes.Structure):
    """XLA_FFI_Args and XLA_FFI_Rets, which are laid out alike."""

    _fields_ = [
        *_HEAD,
        ("size", ctypes.c_int64),
        ("types", ctypes.c_void_p),
        ("values", ctypes.POINTER(ctypes.POINTER(_Buffer))),
    ]


class _ErrorCreateArgs(ctypes.Structure):
    _fields_ = [*_HEAD, ("message", ctypes.c_char_p), ("code", ctypes.c_int)]


class _Span(ctypes.Structure):
    _fields_ = [("text", ctypes.c_char_p), ("size", ctypes.c_size_t)]


class _RegisterArgs(ctypes.Structure):
    _fields_ = [
        *_HEAD,
        ("name", _Span),
        ("platform", _Span),
        ("instantiate", ctypes.c_void_p),
        ("prepare", ctypes.c_void_p),
        ("initialize", ctypes.c_void_p),
        ("execute", ctypes.c_void_p),
        ("traits", ctypes.c_uint32),
    ]


_CreateError = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(_ErrorCreateArgs))
_Register = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(_RegisterArgs))


class _Api(ctypes.Structure):
    _fields_ = [
        *_HEAD,
        ("version", _Version),
        ("internal", ctypes.c_void_p),
        ("create_error", _CreateError),
        ("error_message", ctypes.c_void_p),
        ("destroy_error", ctypes.c_void_p),
        ("register", _Register),
    ]


class _CallFrame(ctypes.Structure):
    _fields_ = [
        *_HEAD,
        ("api", ctypes.POINTER(_Api)),
        ("context", ctypes.c_void_p),
        ("stage", ctypes.c_int),
        ("args", _Values),
        ("rets", _Values),
    ]


_Function = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(_CallFrame))


class Handler:
    """A C function that XLA can call, which runs `body` on views of XLA's buffers.

    Keep it alive for ever: XLA holds its address. `body` runs with the GIL on whichever
    thread executes the program; what it raises becomes an XLA error with its text.

    Args:
        body: What to run.
        code_of: The error code for an exception, of those that XLA and TensorFlow share.
    """

    def __init__(self, body: Body, code_of: CodeOf) -> None:
        self._body = body
        self._code_of = code_of
        self._function = _Function(self._call)

    @property
    def address(self) -> int:
        """The C function."""
        return ctypes.cast(self._function, ctypes.c_void_p).value or 0

    def _call(self, pointer: Any) -> int | None:
        frame = pointer.contents
        if frame.extension and frame.extension.contents.type == _METADATA:
            described = ctypes.cast(frame.extension, ctypes.POINTER(_MetadataExtension))
            metadata = described.contents.metadata.contents
            metadata.version.major = frame.api.contents.version.major
            metadata.version.minor = frame.api.contents.version.minor
            metadata.traits = 0
            return None
        if frame.stage != _EXECUTE:
            return None
        try:
            self._body(_arrays(frame.args), _arrays(frame.rets))
        except BaseException as error:  # noqa: BLE001 - nothing may escape into C
            # The body has latched it for whoever can raise it.
            return _error(frame.api.contents, error, self._code_of(error))
        return None


def _arrays(values: _Values) -> list[Array]:
    arrays: list[Array] = []
    for index in range(values.size):
        buffer = values.values[index].contents
        if buffer.dtype == _TOKEN:
            continue
        dtype = _DTYPES.get(buffer.dtype)
        if dtype is None:
            raise UnavailableError(f"XLA data type number {buffer.dtype} is not supported")
        shape = tuple(buffer.dims[: buffer.rank])
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        if nbytes == 0:
            arrays.append(np.empty(shape, dtype))
            continue
        memory: Any = (ctypes.c_char * nbytes).from_address(buffer.data)
        arrays.append(np.frombuffer(memory, dtype).reshape(shape))
    return arrays


def _error(api: _Api, error: BaseException, code: int) -> int | None:
    text = f"{type(error).__name__}: {error}".encode(errors="replace")
    args = _ErrorCreateArgs(ctypes.sizeof(_ErrorCreateArgs), None, text, code)
    created: int | None = api.create_error(ctypes.byref(args))
    return created


def register_with_api(api_address: int, name: str, platform: str, handler: Handler) -> None:
    """Register `handler` with an XLA that has no Python call for it.

    Args:
        api_address: The library's ``XLA_FFI_Api*``.
        name: Target name that programs use.
        platform: ``Host`` for the CPU.
        handler: Must live as long as the process.

    Raises:
        UnavailableError: This XLA's FFI is of another major version, or refuses.
    """
    api = ctypes.cast(api_address, ctypes.POINTER(_Api)).contents
    if api.version.major != _MAJOR:
        raise UnavailableError(
            f"XLA's FFI has version {api.version.major}.{api.version.minor}, not {_MAJOR}.x"
        )
    target, where = name.encode(), platform.encode()
    args = _RegisterArgs(
        struct_size=ctypes.sizeof(_RegisterArgs),
        name=_Span(target, len(target)),
        platform=_Span(where, len(where)),
        execute=handler.address,
    )
    if api.register(ctypes.byref(args)):
        raise UnavailableError(f"XLA refuses the FFI target {name} for {platform}")


class Targets:
    """The custom-call targets of one framework; they live as long as the process.

    Args:
        announce: Tells the framework a new target's name and handler.
        code_of: The error code for an exception; INTERNAL for all where none is given.
    """

    def __init__(
        self, announce: Callable[[str, Handler], None], code_of: CodeOf = lambda error: _INTERNAL
    ) -> None:
        self._announce = announce
        self._code_of = code_of
        self._handlers: dict[str, Handler] = {}
        self._numbers = itertools.count()

    def register(self, body: Body) -> str:
        """A new custom-call target that runs `body`; returns its name. It lives for ever."""
        name = f"ringplug_{next(self._numbers)}"
        handler = Handler(body, self._code_of)
        self._announce(name, handler)
        self._handlers[name] = handler
        return name

    def target_of(self, owner: Any, body: Body) -> str:
        """The target that runs `body`, made on the first call for this `owner`."""
        target: str | None = getattr(owner, _TARGET, None)
        if target is None:
            target = self.register(body)
            setattr(owner, _TARGET, target)
        return target


_TARGET = "_ringplug_target"
