"""Trains the digits on one process and on two, and shows that the curves are the same.

    python examples/demo.py

Runs `keras_digits.py` on each Keras backend and `lightning_digits.py`, each with one process
and then under ``ringrun -np 2``. Ends with an error when the curves differ or an accuracy is
not above 0.95.
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
FRONTENDS = {
    "Keras on TensorFlow": ("keras_digits.py", {"KERAS_BACKEND": "tensorflow"}, "tensorflow"),
    "Keras on JAX": ("keras_digits.py", {"KERAS_BACKEND": "jax"}, "jax"),
    "Keras on PyTorch": ("keras_digits.py", {"KERAS_BACKEND": "torch"}, "torch"),
    "Lightning": ("lightning_digits.py", {}, "pytorch_lightning"),
}
TOLERANCE = 1e-4


def train(script, environ, ranks, folder):
    """Run one example; its curves and the seconds it took."""
    result = folder / "result.json"
    command = [sys.executable, str(HERE / script), "--json", str(result)]
    if ranks > 1:
        command = [sys.executable, "-m", "ringplug.launch", "-np", str(ranks), *command]
    start = time.perf_counter()
    done = subprocess.run(
        command,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        sys.exit(f"{done.stdout}\n{' '.join(command)} ended with {done.returncode}")
    return json.loads(result.read_text()), time.perf_counter() - start


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-np", "--num-proc", type=int, default=2)
    args = parser.parse_args()
    bad = []
    for title, (script, environ, needs) in FRONTENDS.items():
        if importlib.util.find_spec(needs) is None:
            print(f"\n{title}: not installed, left out")
            continue
        print(f"\n{title}: 1 process, then {args.num_proc} ...", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            one, one_seconds = train(script, environ, 1, Path(folder))
            many, many_seconds = train(script, environ, args.num_proc, Path(folder))
        print(f"  {'epoch':>5} {'loss, 1 process':>18} {f'loss, {args.num_proc} processes':>18}")
        for epoch, (alone, together) in enumerate(zip(one["loss"], many["loss"], strict=True)):
            print(f"  {epoch + 1:>5} {alone:>18.6f} {together:>18.6f}")
        apart = max(abs(a - b) for a, b in zip(one["loss"], many["loss"], strict=True))
        print(f"  largest difference {apart:.1e}")
        print(f"  accuracy {one['accuracy']:.4f} and {many['accuracy']:.4f}")
        print(f"  {one_seconds:.0f} s and {many_seconds:.0f} s, start-up included")
        if apart > TOLERANCE or min(one["accuracy"], many["accuracy"]) <= 0.95:
            bad.append(title)
    if bad:
        sys.exit(f"\nnot as it should be: {', '.join(bad)}")
    print("\nThe same curves on one process and on many.")


if __name__ == "__main__":
    main()
