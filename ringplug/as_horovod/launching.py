"""``horovod.run`` with Horovod's signature, on `ringplug.launch.run.run`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ringplug.backend.errors import UsageError
from ringplug.launch.run import run as run_here

__all__ = ["run"]

_ELASTIC = "a job of ringplug has a fixed number of processes"
_SSH = "say it for the host in ~/.ssh/config"


def run(  # noqa: PLR0913, PLR0917 - Horovod's signature
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int = 1,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    slots: int | None = None,
    reset_limit: int | None = None,
    cooldown_range: Sequence[int] | None = None,
    hosts: str | None = None,
    hostfile: str | None = None,
    start_timeout: float | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | None = None,
    disable_cache: bool | None = None,
    output_filename: str | None = None,
    verbose: int | None = None,
    use_gloo: bool | None = None,
    use_mpi: bool | None = None,
    mpi_args: str | None = None,
    network_interface: str | None = None,
    executable: str | None = None,
    np: int | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
) -> list[Any]:
    """Run a function on several new processes and get their results, in rank order.

    The arguments are Horovod's; see `ringplug.run` for what they do. `disable_cache` has no
    effect, since no check is cached. `np`, `min_np` and `max_np` are deprecated.

    Raises:
        UsageError: An argument asks for something that ringplug does not offer: an elastic job,
            Gloo, ssh options.
        RankFailedError: A rank has failed.
    """
    for old, value, new in (
        ("np", np, "num_proc"),
        ("min_np", min_np, "min_num_proc"),
        ("max_np", max_np, "max_num_proc"),
    ):
        if value is not None:
            warnings.warn(f"{old} is deprecated, use {new}", DeprecationWarning, stacklevel=2)
    for name, given, why in (
        ("min_num_proc", min_num_proc if min_np is None else min_np, _ELASTIC),
        ("max_num_proc", max_num_proc if max_np is None else max_np, _ELASTIC),
        ("slots", slots, _ELASTIC),
        ("reset_limit", reset_limit, _ELASTIC),
        ("cooldown_range", cooldown_range, _ELASTIC),
        ("ssh_port", ssh_port, _SSH),
        ("ssh_identity_file", ssh_identity_file, _SSH),
    ):
        if given is not None:
            raise UsageError(f"run({name}={given!r}) is not offered: {why}")
    return run_here(
        func,
        args,
        kwargs,
        np if np is not None and num_proc == 1 else num_proc,
        hosts=hosts,
        hostfile=hostfile,
        start_timeout=start_timeout,
        output_filename=output_filename,
        verbose=bool(verbose),
        use_mpi=use_mpi,
        use_gloo=use_gloo,
        mpi_args=mpi_args,
        network_interfaces=network_interface,
        executable=executable,
    )
