"""``python -m ringplug.launch.worker COMMAND...``: what ringrun starts as each rank.

It runs a Python script (``--script``), module (``-m``) or code (``-c``) in this process as
``python`` would, calls the function of `ringplug.run` (``--call``), or replaces itself by another
program. With ``--as-horovod`` before that, ``import horovod`` is ringplug. An exception or an exit
code other than 0 leaves a record for ringrun and ends the process at once: the interpreter's own
exit would wait in MPI_Finalize for ranks that wait for this one.
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import logging
import os
import runpy
import shutil
import signal
import sys
import traceback
import types
import zipfile
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from ringplug.backend import config
from ringplug.backend.errors import RecoverableError
from ringplug.launch.failure import Failure, record, started
from ringplug.launch.job import die_with_parent

__all__ = ["main"]

_OWN_FILES = (
    __file__,
    str(Path(__file__).with_name("called.py")),
    runpy.__file__,
    "<frozen runpy>",
)


def main() -> None:
    """Run the command in ``sys.argv[1:]`` as one rank."""
    die_with_parent()
    launched = config.launched()
    rank = 0 if launched is None else launched.rank
    cores = len(os.sched_getaffinity(0))
    config.set_default_threads(cores // (1 if launched is None else launched.local_size))
    directory = _job_directory()
    if directory is not None:
        for stream, descriptor in (("stdout", 1), ("stderr", 2)):
            _redirect(directory / f"rank.{rank}.{stream}", descriptor)
        started(directory, rank)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    command = sys.argv[1:]
    as_horovod = command[0] == "--as-horovod"
    del command[: int(as_horovod)]
    called = command[0] == "--call"
    try:
        if as_horovod:
            _stand_in_for_horovod()
        if called:
            _call(directory, rank)
        else:
            _run(command, directory, rank)
            _warn_unused(launched)
    except SystemExit as error:
        _end(error, directory, rank, called)
    except BaseException as error:  # noqa: BLE001 - whatever it was, the job ends and shows it
        _end(error, directory, rank, called)


def _stand_in_for_horovod() -> None:
    """Import ``horovod`` before the script's folder, which may hold another, is looked into."""
    from ringplug.as_horovod import install

    install()


def _call(directory: Path | None, rank: int) -> None:
    """Call the function of `ringplug.run`."""
    from ringplug.launch.called import call

    assert directory is not None
    sys.argv[:] = [""]
    call(directory, rank)


def _warn_unused(launched: config.Launched | None) -> None:
    """Say so when several processes ended without ever having met."""
    if launched is None or launched.size == 1 or launched.rank != 0:
        return
    runtime = sys.modules.get("ringplug.backend.runtime")
    if (runtime is None or not runtime.was_initialized()) and "mpi4py.MPI" not in sys.modules:
        sys.stderr.write(
            f"ringrun: the script ended without ringplug.init(), a RingStrategy or MPI: its "
            f"{launched.size} processes did the same work, each alone\n"
        )


def _job_directory() -> Path | None:
    """Where this rank leaves its records; a rank on another host than ringrun has no such place."""
    name = config.job_directory()
    return Path(name) if name and Path(name).is_dir() else None


def _redirect(path: Path, descriptor: int) -> None:
    """Let a standard stream go to ringrun directly, where the launcher cannot mix up lines."""
    if path.exists():
        end = os.open(path, os.O_WRONLY | os.O_NOCTTY)
        os.dup2(end, descriptor)
        os.close(end)
        stream = sys.stdout if descriptor == 1 else sys.stderr
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=descriptor == 2 or os.isatty(descriptor))


def _execute(command: list[str], directory: Path | None, rank: int) -> NoReturn:
    """Replace this process by a program that is not Python."""
    if shutil.which(command[0]) is None:
        failure = Failure(rank, code=127, error=f"{command[0]}: no such program")
        if directory is not None:
            record(directory, failure)
        _quit(f"ringrun: {failure.error}\n", 127)
    os.execvp(command[0], command)


def _run(command: list[str], directory: Path | None, rank: int) -> None:
    """Run Python code as ``python`` itself would, as the module ``__main__``."""
    kind = command[0]
    if kind not in ("--script", "-m", "-c"):
        _execute(command, directory, rank)
    if kind == "-m":
        sys.argv[:] = command[1:]
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        return
    if kind == "-c":
        sys.argv[:] = ["-c", *command[2:]]
        _replace_path("")
        _execute_code(command[1].encode(), "<string>", None)
        return
    sys.argv[:] = command[1:]
    path = Path(command[1])
    if path.is_dir() or zipfile.is_zipfile(path):
        runpy.run_path(command[1], run_name="__main__")
        return
    _replace_path(str(path.resolve().parent))
    with io.open_code(str(path.absolute())) as file:
        source = file.read()
    _execute_code(source, command[1], command[1])


def _replace_path(folder: str) -> None:
    """``python -m`` has put the working directory where the script's directory belongs."""
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = folder


def _execute_code(source: bytes, name: str, file: str | None) -> None:
    # A module of its own, which stays until the end: pickle, multiprocessing and exit handlers
    # look up ``__main__`` after the script's last line too.
    module = types.ModuleType("__main__")
    module.__dict__.update(__builtins__=__builtins__, __spec__=None, __cached__=None)
    if file is not None:
        module.__file__ = file
    sys.modules["__main__"] = module
    # Not with this file's own ``from __future__`` imports.
    exec(compile(source, name, "exec", dont_inherit=True), module.__dict__)


def _end(error: BaseException, directory: Path | None, rank: int, called: bool) -> None:
    """Record the failure, show it, and end the process; an exit with code 0 goes on normally.

    The caller of `ringplug.run` gets the record as an exception; it is not shown twice.
    """
    code, text = _exit_code(error)
    if code == 0:
        return
    trace = _without_own_frames(error.__traceback__)
    shown = ""
    if not isinstance(error, SystemExit):
        shown = "".join(traceback.format_exception(type(error), error, trace))
    if directory is not None:
        failure = Failure(
            rank,
            code=code,
            error=text or "".join(traceback.format_exception_only(type(error), error)).strip(),
            traceback=shown,
            consequence=isinstance(error, RecoverableError),
        )
        record(directory, failure)
    if isinstance(error, SystemExit):
        _quit(f"{text}\n" if text else "", code)
    if called:
        _quit("", code)
    # The hook of a library may end the job by itself; the record is there already.
    sys.excepthook(type(error), error.with_traceback(trace), trace)
    _quit("", code)


def _exit_code(error: BaseException) -> tuple[int, str]:
    """Exit code as ``python`` gives it, and the text of ``sys.exit("text")``."""
    if isinstance(error, KeyboardInterrupt):
        return 128 + signal.SIGINT, ""
    if not isinstance(error, SystemExit):
        return 1, ""
    if error.code is None:
        return 0, ""
    if isinstance(error.code, int):
        return error.code & 0xFF, ""
    return 1, str(error.code)


def _without_own_frames(trace: TracebackType | None) -> TracebackType | None:
    while trace is not None and trace.tb_frame.f_code.co_filename in _OWN_FILES:
        trace = trace.tb_next
    return trace


def _quit(text: str, code: int) -> NoReturn:
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(text)
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
