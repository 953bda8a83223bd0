"""`ringplug.run`: a function on several new processes, from a script, a REPL or a notebook."""

from __future__ import annotations

import codecs
import contextlib
import json
import os
import pickle
import selectors
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from ringplug.as_horovod import installed
from ringplug.backend import config, errors
from ringplug.backend.errors import RankFailedError, RingplugError, UsageError
from ringplug.launch.hosts import all_local, parse_hostfile, parse_hosts

__all__ = ["run"]

_PATIENCE = 5.0
"""Seconds that an interrupted job has for each of: ending well, being ended, being killed."""

_FACTS = ("rank", "code", "host", "pid", "error", "traceback")
"""What an error takes from the record of a failure."""


def run(  # noqa: PLR0913 - one argument for each thing that ringrun can be told
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    *,
    np: int | None = None,
    hosts: str | None = None,
    hostfile: str | Path | None = None,
    env: Mapping[str, str] | None = None,
    start_timeout: float | str | None = None,
    output_filename: str | Path | None = None,
    verbose: bool = False,
    use_mpi: bool | None = None,
    use_gloo: bool | None = None,
    mpi_args: str | None = None,
    network_interfaces: str | None = None,
    executable: str | None = None,
    allow_run_as_root: bool = False,
) -> list[Any]:
    """Call ``func(*args, **kwargs)`` on new ranks of this host and return their results.

    Example:
        >>> def train(steps):
        ...     import ringplug.torch as ring
        ...     ring.init()
        ...     return ring.rank(), ring.size()
        >>> ringplug.run(train, (100,), np=2)
        [(0, 2), (1, 2)]

    The function runs in fresh processes, under the same supervisor as with ringrun: it calls
    ``init()`` itself, and what it prints appears here, tagged with its rank. It, its arguments
    and its results are pickled by cloudpickle, so a function of a script or notebook, a lambda
    or a closure will do; a function of a module is imported by the ranks. Nothing that this
    process has in memory is shared.

    Args:
        func: What each rank calls.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        num_proc: Number of ranks; by default the slots of `hosts`, else 1.
        np: The same under another name.
        hosts: ``"localhost:4"``; other hosts than this one are an error.
        hostfile: The same from a file.
        env: Variables for the ranks, on top of this process's environment.
        start_timeout: Time for all ranks to reach ``init()``: seconds, or text such as ``2min``.
        output_filename: Folder where ``rank.N/stdout`` and ``stderr`` are written, too.
        verbose: Show the launcher's command and messages.
        use_mpi: True has no effect: MPI it is. False is an error.
        use_gloo: True is an error.
        mpi_args: More options for mpirun, one string.
        network_interfaces: Names with commas, as for ``ringrun --network-interfaces``.
        executable: The interpreter of the ranks; another one than this process's is an error.
        allow_run_as_root: Start ranks as root outside a container, too.

    Returns:
        The results of all ranks, in rank order.

    Raises:
        UsageError: An argument cannot be honoured, the function or a result cannot be pickled,
            or this process is itself a rank.
        RankFailedError: A rank raised, exited or was killed; has its number and traceback.
        UnavailableError: No launcher fits the MPI library.
        KeyboardInterrupt: Ctrl-C came; all ranks have ended.
    """
    _refuse_inside_a_rank()
    count = _ranks(num_proc, np)
    _check_arguments(hosts, hostfile, use_mpi, use_gloo, executable)
    options = _options(
        {
            "-np": count,
            "--hosts": hosts,
            "--hostfile": hostfile,
            "--start-timeout": start_timeout,
            "--output-filename": output_filename,
            "--mpi-args": mpi_args,
            "--network-interfaces": network_interfaces,
            "--verbose": verbose,
            # What `horovod` is here, it is for the function in the ranks.
            "--as-horovod": installed(),
            "--allow-run-as-root": allow_run_as_root,
        }
    )
    with tempfile.TemporaryFile() as call, tempfile.TemporaryFile() as report:
        _pickle(call, func, tuple(args), dict(kwargs or {}))
        call.seek(0)
        code = _supervise(options, call, report, dict(env or {}))
        report.seek(0)
        return _results(report, code)


def _refuse_inside_a_rank() -> None:
    launched = config.launched()
    started = launched is not None and (launched.by != "slurm" or launched.size > 1)
    if started or config.job_directory() or config.claimed_by_parent():
        who = f"rank {launched.rank} of a job" if launched is not None else "part of a job"
        raise UsageError(
            f"run() starts ranks, but this process is {who} already: call the function directly"
        )


def _ranks(num_proc: int | None, np: int | None) -> int | None:
    if num_proc is not None and np is not None and num_proc != np:
        raise UsageError(f"num_proc={num_proc} and np={np} are the same argument; give one")
    count = num_proc if num_proc is not None else np
    if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
        raise UsageError(f"the number of ranks must be a whole number from 1 up, not {count!r}")
    return count


def _check_arguments(
    hosts: str | None,
    hostfile: str | Path | None,
    use_mpi: bool | None,
    use_gloo: bool | None,
    executable: str | None,
) -> None:
    """Refuse what cannot be honoured."""
    if use_gloo:
        raise UsageError("use_gloo=True: there is no Gloo controller; the ranks run on MPI")
    if use_mpi is False:
        raise UsageError("use_mpi=False: there is no other controller than MPI")
    if executable is not None and not _same_file(executable, sys.executable):
        raise UsageError(
            f"executable={executable!r}: ranks run in the interpreter of this process, "
            f"{sys.executable}, to which the MPI library belongs"
        )
    if hosts is not None and hostfile is not None:
        raise UsageError("hosts and hostfile cannot be combined")
    named = parse_hosts(hosts) if hosts else parse_hostfile(hostfile) if hostfile else ()
    if not all_local(named):
        others = ", ".join(host.name for host in named if not all_local([host]))
        raise UsageError(
            f"run() starts ranks on this host only, since function and results go through its "
            f"files, not on {others}: put the function into a script and use ringrun -H"
        )


def _same_file(one: str, other: str) -> bool:
    return Path(one).exists() and Path(one).samefile(other)


def _options(given: Mapping[str, Any]) -> list[str]:
    """The arguments for ringrun."""
    given = dict(given)
    if given["-np"] is None and given["--hosts"] is None and given["--hostfile"] is None:
        given["-np"] = 1
    words = []
    for name, value in given.items():
        if value is True:
            words.append(name)
        elif value is not None and value is not False:
            words += [name, str(value)] if name == "-np" else [f"{name}={value}"]
    return words


def _pickle(file: BinaryIO, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """The import path for the ranks, then the call."""
    import cloudpickle

    here = [str(Path(path).absolute()) for path in sys.path]
    pickle.dump(here, file)
    try:
        cloudpickle.dump((func, args, kwargs), file)
    except Exception as error:  # pickling can fail with anything
        raise UsageError(
            f"the function or its arguments cannot be pickled for the ranks: "
            f"{type(error).__name__}: {error}"
        ) from error
    file.flush()


def _supervise(
    options: Sequence[str], call: BinaryIO, report: BinaryIO, env: Mapping[str, str]
) -> int:
    """Run the supervising process to its end, showing its output; its exit code."""
    descriptor = report.fileno()
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "ringplug.launch.job_process",
            str(os.getpid()),
            str(descriptor),
            *options,
        ],
        stdin=call,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=_environment(env),
        pass_fds=(descriptor,),
        # Ctrl-C reaches this process alone, which passes it on in order.
        start_new_session=True,
    )
    with process, _ended_in_order(process):
        assert process.stdout is not None
        assert process.stderr is not None
        _show({process.stdout.fileno(): sys.stdout, process.stderr.fileno(): sys.stderr})
        return process.wait()


def _environment(env: Mapping[str, str]) -> dict[str, str]:
    """The environment of the job."""
    here = config.child_environment()
    # ringplug is imported from where this process has it, installed or not.
    home = str(Path(__file__).resolve().parents[2])
    here["PYTHONPATH"] = os.pathsep.join(filter(None, [here.get("PYTHONPATH"), home]))
    return {**here, **env}


def _show(targets: Mapping[int, TextIO]) -> None:
    """Write what comes to this process's own streams, which a notebook shows in the cell."""
    decoder = codecs.getincrementaldecoder("utf-8")
    with selectors.DefaultSelector() as selector:
        for descriptor, target in targets.items():
            selector.register(descriptor, selectors.EVENT_READ, (decoder("replace"), target))
        while selector.get_map():
            for key, _ in selector.select():
                data = os.read(key.fd, 2**16)
                decode, target = key.data
                target.write(decode.decode(data, final=not data))
                target.flush()
                if not data:
                    selector.unregister(key.fd)


@contextlib.contextmanager
def _ended_in_order(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """End the job when its caller is interrupted: politely, then by order, then at once.

    Whatever ends the supervising process, its janitor leaves nothing of the job.
    """
    try:
        yield
    except BaseException:
        for number in (signal.SIGINT, signal.SIGINT, signal.SIGKILL):
            # Another Ctrl-C means: go on to the next.
            with contextlib.suppress(KeyboardInterrupt, subprocess.TimeoutExpired):
                process.send_signal(number)
                _drain(process, _PATIENCE)
                break
        raise


def _drain(process: subprocess.Popen[bytes], limit: float) -> None:
    """Wait for the end; what still comes is shown, since a full pipe would hold up the end."""
    with contextlib.suppress(ValueError):
        out, err = process.communicate(timeout=limit)
        sys.stdout.write(out.decode(errors="replace"))
        sys.stderr.write(err.decode(errors="replace"))


def _message(report: str) -> str:
    """What ringrun reports, without its frame."""
    lines = [line for line in report.strip().splitlines() if line.strip("=") or not line]
    return "\n".join(lines).removeprefix("ringrun: ")


def _results(report: BinaryIO, code: int) -> list[Any]:
    """The results in the report, or the error that it tells of."""
    line = report.readline()
    if not line:
        raise RingplugError(f"the process that supervised the ranks ended with exit code {code}")
    header = json.loads(line)
    if "refused" in header:
        name, text = header["refused"]
        raise getattr(errors, name, RingplugError)(text)
    if header["failure"] is not None:
        facts = {name: header["failure"][name] for name in _FACTS}
        raise RankFailedError(_message(header["report"]), **facts)
    if header["code"] != 0:
        raise RingplugError(
            f"the launcher failed with exit code {header['code']}: {header['said']}"
        )
    sizes = {int(rank): size for rank, size in header["sizes"].items()}
    for rank in range(header["np"]):
        if rank not in sizes:
            text = "ended without a result, as by sys.exit(0)"
            raise RankFailedError(f"rank {rank} {text}", rank, 0, error=text)
    results = []
    for rank in range(header["np"]):
        data = report.read(sizes[rank])
        try:
            results.append(pickle.loads(data))
        except Exception as error:  # a pickle can fail with anything
            raise UsageError(
                f"the result of rank {rank} cannot be loaded here: {type(error).__name__}: {error}"
            ) from error
    return results
