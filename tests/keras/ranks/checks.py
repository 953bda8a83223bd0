"""Runs the checks of the modules named in argv, in order: ``checks.py SIZE MODULE...``."""

import importlib
import sys

import ringplug.keras as ring
from tests.keras.ranks import task

if __name__ == "__main__":
    size, *names = sys.argv[1:]
    ring.init()
    assert ring.size() == int(size)
    for name in names:
        task.run(importlib.import_module(f"tests.keras.ranks.{name}").CHECKS)
    if ring.rank() == 0:
        print("all checks passed", flush=True)
