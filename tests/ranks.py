"""Runs ranks as threads of the test process: fast, and a debugger sees all of them.

    def test_sum():
        def rank(transport):
            buffer = np.full(3, transport.rank, np.float32)
            transport.allreduce(buffer, ReduceOp.SUM)
            return buffer.tolist()

        assert run_transports(rank, 3) == [[3.0, 3.0, 3.0]] * 3

An error on one rank makes the others leave too, and is raised in the test; a hang ends with the
stacks of all threads.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from ringplug.backend.config import Config
from ringplug.backend.control.threads import Hub, ThreadControl
from ringplug.backend.errors import RecoverableError
from ringplug.backend.runtime import Runtime
from ringplug.backend.transport import Transport, open_transport
from ringplug.backend.transport.threads import ThreadTransport

__all__ = ["Together", "config", "run_runtimes", "run_threads", "run_transports"]

_DEADLINE = 60.0


def config(**settings: Any) -> Config:
    """Settings for a test: nothing from the environment, and a deadline that a test can wait."""
    return Config.load({}, **{"timeout": 20.0, **settings})


def run_threads(
    fn: Callable[[ThreadControl, Config], Any],
    size: int,
    hosts: Sequence[str] | None = None,
    **settings: Any,
) -> list[Any]:
    """Call ``fn(control, config)`` on `size` thread-ranks of a new world.

    Args:
        fn: What a rank does.
        size: Number of ranks.
        hosts: A host name per rank; all on one host by default.
        **settings: See `Config`.

    Returns:
        What the ranks returned, in rank order.

    Raises:
        BaseException: The error of the lowest rank that failed by itself, rather than because
            another rank left.
        AssertionError: The ranks hang; their stacks are in the message.
    """
    controls = Hub.controls(size, hosts)
    settled = config(**settings)
    results: list[Any] = [None] * size
    errors: dict[int, BaseException] = {}

    def rank(number: int) -> None:
        try:
            results[number] = fn(controls[number], settled)
        except BaseException as error:
            errors[number] = error
        finally:
            controls[number].leave()

    threads = [threading.Thread(target=rank, args=(r,), daemon=True) for r in range(size)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + _DEADLINE
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    hanging = [number for number, thread in enumerate(threads) if thread.is_alive()]
    if hanging and not errors:
        raise AssertionError(f"ranks {hanging} hang:\n{_stacks()}")
    if errors:
        own = [r for r, error in errors.items() if not isinstance(error, RecoverableError)]
        raise errors[min(own or errors)]
    return results


def run_transports(
    fn: Callable[[Transport], Any],
    size: int,
    kind: str = "threads",
    hosts: Sequence[str] | None = None,
    **settings: Any,
) -> list[Any]:
    """Call ``fn(transport)`` on `size` thread-ranks, with the transport of that name."""

    def rank(control: ThreadControl, settled: Config) -> Any:
        if kind == "threads":
            transport: Transport = ThreadTransport(settled, control)
        else:
            transport = open_transport(settled, control)
        try:
            return fn(transport)
        finally:
            transport.close()

    if kind != "threads":
        settings["transport"] = kind
    return run_threads(rank, size, hosts, **settings)


def run_runtimes(
    fn: Callable[[Runtime], Any],
    size: int,
    hosts: Sequence[str] | None = None,
    **settings: Any,
) -> list[Any]:
    """Call ``fn(runtime)`` on `size` thread-ranks, each with a runtime of its own."""

    def rank(control: ThreadControl, settled: Config) -> Any:
        with contextlib.closing(Runtime(settled, control)) as runtime:
            return fn(runtime)

    return run_threads(rank, size, hosts, **settings)


class Together:
    """A meeting point for the ranks of one test, outside of the code under test."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size)

    def __call__(self) -> None:
        """Wait until all ranks are here."""
        self._barrier.wait(_DEADLINE)


def _stacks() -> str:
    parts = []
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, frame in sys._current_frames().items():
        parts.append(f"--- {names.get(ident, ident)}\n" + "".join(traceback.format_stack(frame)))
    return "\n".join(parts)
