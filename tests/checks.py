"""Many checks in one launch: a script of ranks collects functions and runs them in order.

    from tests.checks import check, run_checks

    @check
    def sums(rank, size): ...

    run_checks(rank, size)

Each rank prints ``ok sums``, and at last how many there were; `passed` looks for that.
"""

from __future__ import annotations

import time

from tests.launching import Completed

_checks = []


def check(function):
    """Run `function(rank, size)` in `run_checks`, in the order of definition."""
    _checks.append(function)
    return function


def run_checks(rank, size):
    """Run what was collected; the first failure ends the rank."""
    for function in _checks:
        start = time.monotonic()
        function(rank, size)
        print(f"ok {function.__name__} {time.monotonic() - start:.2f} s", flush=True)
    print(f"passed {len(_checks)} checks", flush=True)


def passed(done: Completed, ranks: int) -> None:
    """Fail unless every rank ran all its checks."""
    assert done.stdout.count("passed ") == ranks, done.output
