"""The rank's side of `ringplug.run`: the function in, the result out, both as files of the job."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

from ringplug.backend.errors import UsageError

__all__ = ["FUNCTION", "call", "result_of"]

FUNCTION = "function"
"""The file of the job that has, one after the other, the caller's import path and the call."""


def result_of(rank: int) -> str:
    """Name of the file of a rank's result."""
    return f"result.{rank}"


def call(directory: Path, rank: int) -> None:
    """Call the function and leave its result.

    Args:
        directory: The job's, which only this user can write.
        rank: Of this process.

    Raises:
        UsageError: The function cannot be loaded here, or its result cannot be pickled.
    """
    import cloudpickle

    with (directory / FUNCTION).open("rb") as file:
        paths: list[str] = pickle.load(file)
        # What the caller can import, a rank can: a module beside the caller's script, say.
        sys.path[:] = [*paths, *(path for path in sys.path if path not in paths)]
        try:
            func, args, kwargs = pickle.load(file)
        except Exception as error:  # a pickle can fail with anything
            raise UsageError(
                f"rank {rank} cannot load the function that was given to run(): "
                f"{type(error).__name__}: {error}"
            ) from error
    result: Any = func(*args, **kwargs)
    path = directory / result_of(rank)
    temporary = directory / f"{path.name}.tmp"
    try:
        with temporary.open("wb") as file:
            cloudpickle.dump(result, file)
    except Exception as error:  # pickling can fail with anything
        raise UsageError(
            f"the result of rank {rank}, a {type(result).__qualname__}, cannot be pickled: "
            f"{type(error).__name__}: {error}"
        ) from error
    temporary.replace(path)
