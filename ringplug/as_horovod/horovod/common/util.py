"""``horovod.common.util``: what is built, and small things that scripts have borrowed from it."""

from __future__ import annotations

import contextlib
import re
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from ringplug.backend import probes
from ringplug.backend.ops import resolve_op

__all__ = [
    "EXTENSIONS",
    "ccl_built",
    "check_extension",
    "check_installed_version",
    "cuda_built",
    "ddl_built",
    "env",
    "extension_available",
    "get_average_backwards_compatibility_fun",
    "get_ext_suffix",
    "get_extension_full_path",
    "gloo_built",
    "gpu_available",
    "is_iterable",
    "is_version_greater_equal_than",
    "mpi_built",
    "nccl_built",
    "num_rank_is_power_2",
    "rocm_built",
    "split_list",
    "support_non_legacy_keras_optimizers",
]

EXTENSIONS = ["tensorflow", "torch"]
"""The frameworks that a part of ringplug is for, under the names that the probes take."""

_Item = TypeVar("_Item")


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether the framework of ``horovod.<ext_base_name>`` is installed."""
    del verbose
    return ext_base_name in EXTENSIONS and find_spec(ext_base_name) is not None


def check_extension(ext_name: str, ext_env_var: str, pkg_path: str, *args: str) -> None:
    """Raise ImportError unless the framework of a module such as ``horovod.torch`` is installed.

    The other arguments say where Horovod's compiled library would be; without effect.
    """
    del ext_env_var, pkg_path, args
    framework = ext_name.rpartition(".")[2]
    if not extension_available(framework):
        raise ImportError(f"{ext_name} needs {framework}, which is not installed or not supported")


def check_installed_version(
    name: str, version: str, exception: BaseException | None = None
) -> None:
    """Does nothing: ringplug is built against no framework, so none can be the wrong one."""
    del name, version, exception


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether ``torch`` or ``tensorflow`` sees a GPU."""
    del verbose
    if not extension_available(ext_base_name):
        return False
    framework = import_module(ext_base_name)
    if ext_base_name == "torch":
        return bool(framework.cuda.is_available())
    return bool(framework.config.list_physical_devices("GPU"))


def _verbosely(probe: Callable[[], _Item]) -> Callable[..., _Item]:
    """The probe with Horovod's argument for showing what a child process finds; there is none."""

    def ask(verbose: bool = False) -> _Item:
        del verbose
        return probe()

    return ask


mpi_built = _verbosely(probes.mpi_built)
gloo_built = _verbosely(probes.gloo_built)
nccl_built = _verbosely(probes.nccl_built)
ddl_built = _verbosely(probes.ddl_built)
ccl_built = _verbosely(probes.ccl_built)
cuda_built = _verbosely(probes.cuda_built)
rocm_built = _verbosely(probes.rocm_built)


def get_ext_suffix() -> str:
    """How the file name of a compiled module of this Python ends."""
    return str(sysconfig.get_config_var("EXT_SUFFIX") or ".so")


def get_extension_full_path(pkg_path: str, *args: str) -> str:
    """Where a compiled module ``args`` beside the file `pkg_path` would be."""
    *folders, name = args
    return str(Path(pkg_path).parent.joinpath(*folders, name + get_ext_suffix()))


@contextlib.contextmanager
def env(**kwargs: str | None) -> Iterator[None]:
    """Variables of the environment, set inside the ``with`` block; None leaves one as it is."""
    # It knows how to put an environment back; reading and writing it elsewhere is config's.
    from unittest import mock

    given = {name: value for name, value in kwargs.items() if value is not None}
    with mock.patch.dict("os.environ", given):
        yield


def get_average_backwards_compatibility_fun(reduce_ops: Any) -> Callable[[Any, Any], Any]:
    """A function of `op` and `average` that gives the reduction which the two ask for.

    Both is a ValueError, and `average` alone a DeprecationWarning.
    """
    del reduce_ops
    return lambda op, average: resolve_op(op, average)


def num_rank_is_power_2(num_rank: int) -> bool:
    """Whether a number is 1, 2, 4, 8, ..."""
    return num_rank > 0 and num_rank.bit_count() == 1


def split_list(items: Sequence[_Item], n: int) -> list[Sequence[_Item]]:
    """`n` neighbouring parts of a sequence whose lengths differ by at most 1, long ones first."""
    short, longer = divmod(len(items), n)
    parts = []
    start = 0
    for index in range(n):
        end = start + short + (index < longer)
        parts.append(items[start:end])
        start = end
    return parts


def is_iterable(x: object) -> bool:
    """Whether ``iter(x)`` works."""
    try:
        iter(x)  # type: ignore[call-overload]
    except TypeError:
        return False
    return True


def is_version_greater_equal_than(ver: str, target: str) -> bool:
    """Whether a version such as ``2.11.0`` is `target`, three numbers with dots, or later."""
    if not re.fullmatch(r"\d+\.\d+\.\d+", target):
        raise ValueError(f"expected a version of the form 2.11.0, not {target!r}")
    found = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", ver)
    if found is None:
        raise ValueError(f"not a version: {ver!r}")
    return [int(part or 0) for part in found.groups()] >= [int(part) for part in target.split(".")]


def support_non_legacy_keras_optimizers(k: Any) -> bool:
    """Whether a Keras module has the optimizers that came with Keras 2.11."""
    return is_version_greater_equal_than(k.__version__, "2.11.0")
