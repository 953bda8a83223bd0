"""Runs the checks of the modules named in argv, in order: ``checks.py SIZE MODULE...``."""

import importlib
import sys

import ringplug.tensorflow as ring
from tests.checks import run_checks

if __name__ == "__main__":
    size, *names = sys.argv[1:]
    ring.init()
    assert ring.size() == int(size)
    for name in names:
        importlib.import_module(f"tests.tensorflow.ranks.{name}")
    run_checks(ring.rank(), ring.size())
