"""Fixtures of the tests in one process."""

from __future__ import annotations

import threading

import pytest

from ringplug.backend import runtime
from tests.ranks import run_runtimes


@pytest.fixture
def ranks(monkeypatch):
    """Runs ``fn(rank)`` on thread ranks; `ops` sees each thread's own runtime."""
    here = threading.local()

    def current():
        return here.runtime

    monkeypatch.setattr(runtime, "current", current)

    def run(fn, size, **settings):
        def rank(rt):
            here.runtime = rt
            return fn(rt.world.rank)

        return run_runtimes(rank, size, **settings)

    run.current = current
    run.adopt = lambda rt: setattr(here, "runtime", rt)
    return run
