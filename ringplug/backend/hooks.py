"""What a rank does when it dies of an exception: the others would wait for it for ever. Layer 1."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType

__all__ = ["install"]

_installed = False


def install(abort: Callable[[int], None]) -> None:
    """Print an uncaught exception, of any thread, then end the whole job. Once per process.

    Args:
        abort: Ends the job with an exit code.
    """
    global _installed  # noqa: PLW0603 - hooks of the interpreter, once per process
    if _installed:
        return
    _installed = True
    previous, previous_thread = sys.excepthook, threading.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        previous(kind, error, trace)
        _end_job(abort, 130 if issubclass(kind, KeyboardInterrupt) else 1)

    def thread_hook(args: threading.ExceptHookArgs) -> None:
        previous_thread(args)
        if args.exc_type is not SystemExit:
            _end_job(abort, 1)

    sys.excepthook = hook
    threading.excepthook = thread_hook


def _end_job(abort: Callable[[int], None], code: int) -> None:
    # torch.distributed's hook, around ours, collects what is printed and shows it too late.
    held = getattr(sys.stderr, "getvalue", None)
    if held is not None and sys.__stderr__ is not None:
        sys.__stderr__.write(held())
        sys.__stderr__.flush()
    sys.stdout.flush()
    sys.stderr.flush()
    # The launcher forwards what was written; it drops what comes after the abort.
    time.sleep(0.2)
    abort(code)
