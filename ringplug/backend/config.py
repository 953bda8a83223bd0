"""Settings. The only file that reads or writes the process environment. Layer 0.

A setting is taken from the explicit argument, else from ``RINGPLUG_<NAME>``, else from the
``HOROVOD_*`` variable of the same meaning, else it is the default.
``python -m ringplug.backend.config`` prints the table that the documentation shows.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ringplug.backend import horovod
from ringplug.backend.errors import ConfigError
from ringplug.backend.parsing import (
    name_or,
    one_of,
    optional_int,
    parse_bool,
    positive_bytes,
    positive_seconds,
)

__all__ = [
    "Config",
    "Launched",
    "child_environment",
    "claim_process",
    "claimed_by_parent",
    "export_ranks",
    "has_master",
    "forwarded_names",
    "job_directory",
    "launched",
    "set_default_threads",
    "variable",
]


def _setting(
    default: Any,
    parse: Callable[[Any], Any],
    doc: str,
    horovod: str = "",
    zero: Any = None,
    invert: bool = False,
) -> Any:
    """A field of Config.

    `zero` is what Horovod's variable means when it is 0; with `invert` it says the contrary.
    """
    return dataclasses.field(
        default=default,
        metadata={
            "parse": parse,
            "doc": doc,
            "horovod": horovod,
            "zero": zero,
            "invert": invert,
        },
    )


@dataclass(frozen=True, slots=True)
class Config:
    """Every setting, once, with its parser and its description."""

    control: str = _setting(
        "auto",
        one_of("auto", "mpi", "alone"),
        "Control plane: `mpi`, `alone` (a world of one), or `auto`: `mpi` when a launcher "
        "started this process, else `alone`.",
    )
    transport: Any = _setting(  # noqa: RUF009 - frozen, as the others
        "auto",
        name_or(("auto", "alone", "shared_memory", "ring", "hierarchical"), "__call__"),
        "Data plane for CPU tensors. `auto`: `shared_memory` on one host, `hierarchical` where "
        "hosts have several ranks, else `ring`. In `init` also a class or function of your own "
        "that makes a transport.",
    )
    timeout: float = _setting(
        1800.0,
        positive_seconds,
        "Deadline of every wait for other ranks; when it passes, StalledError names them.",
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
        zero=1800.0,
    )
    stall_warning: float = _setting(
        60.0,
        positive_seconds,
        "Time after which a wait for other ranks is logged, with their names.",
        "HOROVOD_STALL_CHECK_TIME_SECONDS",
        zero=60.0,
    )
    start_timeout: float = _setting(
        120.0,
        positive_seconds,
        "Deadline for all ranks to reach init().",
        "HOROVOD_START_TIMEOUT",
        zero=120.0,
    )
    fusion_bytes: int = _setting(
        64 * 2**20,
        positive_bytes,
        "Size of a bucket of fused tensors.",
        "HOROVOD_FUSION_THRESHOLD",
        zero=2**20,
    )
    first_bucket_bytes: int = _setting(
        2**20,
        positive_bytes,
        "Size of the first bucket of a plan, small so that traffic starts early.",
    )
    segment_bytes: int = _setting(
        2**20,
        positive_bytes,
        "Size of the pieces in which a ring sends its share, several in flight.",
    )
    staging_bytes: int = _setting(
        2**19,
        positive_bytes,
        "Size of the pieces in which ordinary memory passes through shared memory.",
    )
    compression: Any = _setting(  # noqa: RUF009 - frozen, as the others
        "none",
        name_or(("none", "fp16", "bf16"), "wire_dtype", "encode", "decode"),
        "What gradients are cast to on the wire, where the frontend is not told: `none`, `fp16`, "
        "`bf16`, or in `init` a compressor object of your own.",
    )
    dynamic_process_sets: bool = _setting(
        False,
        parse_bool,
        "Whether process sets may be added and removed after init().",
        "HOROVOD_DYNAMIC_PROCESS_SETS",
    )
    group_fusion: bool = _setting(
        True,
        parse_bool,
        "Whether grouped operations may share a buffer with others.",
        "HOROVOD_DISABLE_GROUP_FUSION",
        invert=True,
    )
    timeline: str = _setting(
        "",
        str,
        "File for a Chrome trace of what rank 0 sees; `DYNAMIC` waits for start_timeline().",
        "HOROVOD_TIMELINE",
    )
    timeline_mark_cycles: bool = _setting(
        False,
        parse_bool,
        "Whether the timeline marks each round of agreement.",
        "HOROVOD_TIMELINE_MARK_CYCLES",
    )
    keras_path: str = _setting(
        "auto",
        one_of("auto", "ffi", "callback"),
        "How a compiled Keras step reaches ringplug: `ffi` (an XLA custom call), `callback` "
        "(a host callback of the framework), or `auto`: `ffi` where its start-up probe passes.",
    )
    log_level: str = _setting(
        "",
        one_of("", "trace", "debug", "info", "warning", "error", "fatal"),
        "Show ringplug's log from this level up on standard error.",
        "HOROVOD_LOG_LEVEL",
    )
    expected_size: int | None = _setting(
        None,
        optional_int,
        "World size that the launcher started; init() refuses another one. Set by ringrun.",
    )
    host_id: str = _setting(
        "",
        str,
        "Name of this host, where ranks on one machine should count as several hosts.",
    )

    @classmethod
    def load(cls, environ: Mapping[str, str] | None = None, **arguments: Any) -> Config:
        """Settings from `arguments` (None means not given), the environment, and defaults.

        Raises:
            ConfigError: A value cannot be parsed; names the setting and where it came from.
            TypeError: An argument is not a setting.
        """
        env = os.environ if environ is None else environ
        unknown = arguments.keys() - {field.name for field in dataclasses.fields(cls)}
        if unknown:
            raise TypeError(f"unknown settings: {', '.join(sorted(unknown))}")
        values: dict[str, Any] = {}
        for field in dataclasses.fields(cls):
            own, peer = variable(field.name), field.metadata["horovod"]
            if arguments.get(field.name) is not None:
                source, raw = f"argument {field.name}", arguments[field.name]
            elif own in env:
                source, raw = own, env[own]
            elif peer and peer in env:
                source, raw = peer, env[peer]
                if raw.strip() in ("0", "0.0") and field.metadata["zero"] is not None:
                    raw = field.metadata["zero"]
                    _warn_once(f"{peer}=0 has no equal here and is taken as {raw}")
            else:
                continue
            try:
                values[field.name] = field.metadata["parse"](raw)
                if source == peer and field.metadata["invert"]:
                    values[field.name] = not values[field.name]
            except (ValueError, TypeError) as error:
                raise ConfigError(f"{source}={raw!r}: {error}") from None
        if parse_bool(env.get(_NO_STALL_CHECK, "")):
            values.setdefault("stall_warning", float("inf"))
        _warn_unknown(env)
        return cls(**values)


def variable(field: str) -> str:
    """The environment variable of a setting."""
    return f"RINGPLUG_{field.upper()}"


_NO_STALL_CHECK = "HOROVOD_STALL_CHECK_DISABLE"

_warned: set[str] = set()


def _warn_once(text: str) -> None:
    if text not in _warned:
        _warned.add(text)
        warnings.warn(text, stacklevel=4)


def _warn_unknown(env: Mapping[str, str]) -> None:
    fields = dataclasses.fields(Config)
    known = [variable(field.name) for field in fields] + [_OWNER]
    honoured = {field.metadata["horovod"] for field in fields} | {_NO_STALL_CHECK}
    for name in env:
        if name == JOB or name in known or name in honoured or name in _warned:
            continue
        if name.startswith("HOROVOD_"):
            why = horovod.why_ignored(name, env[name])
            if why:
                _warned.add(name)
                warnings.warn(f"{name} has no effect in ringplug: {why}", stacklevel=3)
        if name.startswith("RINGPLUG_"):
            _warned.add(name)
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            warnings.warn(f"{name} is not a setting of ringplug{hint}", stacklevel=3)


@dataclass(frozen=True, slots=True)
class Launched:
    """What a launcher told this process, read before any communication.

    Attributes:
        by: Which launcher: ``mpi``, ``torchrun`` or ``slurm``.
    """

    by: str
    rank: int
    size: int
    local_rank: int
    local_size: int


_LAUNCHERS = (
    (
        "mpi",
        (
            "OMPI_COMM_WORLD_RANK",
            "OMPI_COMM_WORLD_SIZE",
            "OMPI_COMM_WORLD_LOCAL_RANK",
            "OMPI_COMM_WORLD_LOCAL_SIZE",
        ),
    ),
    ("mpi", ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")),
    ("torchrun", ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")),
    ("slurm", ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE")),
)


def launched(environ: Mapping[str, str] | None = None) -> Launched | None:
    """The first launcher that left its mark on this process, or None.

    An MPI launcher wins over torchrun's variables, and those over Slurm's, which an
    interactive allocation sets without having started anything.
    """
    env = os.environ if environ is None else environ
    for by, (rank, size, local_rank, local_size) in _LAUNCHERS:
        if by == "slurm" and "SLURM_STEP_ID" not in env:
            continue
        if by == "torchrun" and "TORCHELASTIC_RUN_ID" not in env:
            continue
        if rank in env and size in env:
            try:
                return Launched(
                    by=by,
                    rank=int(env[rank]),
                    size=int(env[size]),
                    local_rank=int(env.get(local_rank, env[rank])),
                    # Slurm writes 4(x2) for two nodes with 4 each.
                    local_size=int(env.get(local_size, env[size]).partition("(")[0].split(",")[0]),
                )
            except ValueError as error:
                raise ConfigError(f"{rank}, {size}: {error}") from None
    return None


def export_ranks(rank: int, size: int, local_rank: int, local_size: int) -> None:
    """Set RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE where they are not set.

    Libraries that were loaded before the world existed (rank-zero prints, data loaders) read
    these.
    """
    for name, value in (
        ("RANK", rank),
        ("WORLD_SIZE", size),
        ("LOCAL_RANK", local_rank),
        ("LOCAL_WORLD_SIZE", local_size),
    ):
        os.environ.setdefault(name, str(value))


_OWNER = "RINGPLUG_OWNER_PID"


def has_master() -> bool:
    """Whether somebody chose the address of torch.distributed's store."""
    return "MASTER_ADDR" in os.environ and "MASTER_PORT" in os.environ


def claim_process() -> None:
    """Mark this process as a rank, for the child processes that inherit its environment."""
    os.environ[_OWNER] = str(os.getpid())


def claimed_by_parent(environ: Mapping[str, str] | None = None) -> bool:
    """Whether this process was started by a rank and inherited that rank's environment."""
    env = os.environ if environ is None else environ
    return _OWNER in env and env[_OWNER] != str(os.getpid())


_THREADS = ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "NPROC")
"""What BLAS libraries and PyTorch, TensorFlow, and XLA's CPU client take their threads from."""


def set_default_threads(threads: int) -> None:
    """Let numerical libraries use `threads` threads, unless the user chose."""
    for name in _THREADS:
        os.environ.setdefault(name, str(max(1, threads)))


def child_environment(**extra: str) -> dict[str, str]:
    """A copy of this process's environment with `extra` set, for a child process."""
    return {**os.environ, **extra}


JOB = "RINGPLUG_JOB"
"""Set by ringrun: the private directory of the running job, which also marks its processes."""


def job_directory() -> str | None:
    """The directory through which this rank and the ringrun that started it talk, if any."""
    return os.environ.get(JOB)


_FORWARDED = ("RINGPLUG_", "HOROVOD_", "KERAS_", "NCCL_")


def forwarded_names() -> list[str]:
    """Names of the variables that ranks on other hosts need; never the whole environment."""
    exact = {"PYTHONPATH", *_THREADS}
    return sorted(name for name in os.environ if name in exact or name.startswith(_FORWARDED))


def table() -> str:
    """The settings as a Markdown table."""
    lines = ["| setting | environment | default | meaning |", "|---|---|---|---|"]
    for field in dataclasses.fields(Config):
        names = f"`{variable(field.name)}`"
        if field.metadata["horovod"]:
            names += f", `{field.metadata['horovod']}`"
        lines.append(f"| `{field.name}` | {names} | `{field.default}` | {field.metadata['doc']} |")
    return "\n".join(lines)


if __name__ == "__main__":
    import sys

    sys.stdout.write(table() + "\n")
