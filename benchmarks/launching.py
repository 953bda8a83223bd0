"""Starts a benchmark's ranks."""

from __future__ import annotations

import os
import subprocess
import sys


def launch(module: str, ranks: int, words: list[str]) -> int:
    """Run `module` on so many ranks, with the same arguments but ``-np``; the exit code."""
    at = words.index("-np")
    rest = words[:at] + words[at + 2 :]
    launcher = [sys.executable, "-m", "ringplug.launch", "-np", str(ranks)]
    if os.geteuid() == 0:
        launcher.append("--allow-run-as-root")
    command = [*launcher, sys.executable, "-m", module, *rest]
    return subprocess.run(command, check=False).returncode
