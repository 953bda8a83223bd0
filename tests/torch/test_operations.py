"""The named operations of ringplug.torch: on several processes, and their signatures."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

import ringplug.torch as hvd
from tests.checks import passed
from tests.launching import run_ranks

SCRIPT = Path(__file__).parent / "ranks_operations.py"


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_operations(ranks):
    env = {"PYTHONWARNINGS": "ignore::UserWarning,ignore::FutureWarning"}
    passed(run_ranks(SCRIPT, ranks, timeout=150, env=env), ranks)


REDUCE = (
    "tensor average=None name=None compression op=None prescale_factor=1.0 "
    "postscale_factor=1.0 process_set"
)
SCATTER = (
    "tensor name=None compression op=Average process_set prescale_factor=1.0 postscale_factor=1.0"
)
SIGNATURES = {
    "allreduce": REDUCE,
    "allreduce_": REDUCE.replace(" compression", ""),
    "allreduce_async": REDUCE.replace(" compression", ""),
    "allreduce_async_": REDUCE.replace(" compression", ""),
    "allgather": "tensor name=None process_set",
    "allgather_async": "tensor name=None process_set",
    "broadcast": "tensor root_rank name=None process_set",
    "broadcast_": "tensor root_rank name=None process_set",
    "broadcast_async": "tensor root_rank name=None process_set",
    "broadcast_async_": "tensor root_rank name=None process_set",
    "alltoall": "tensor splits=None name=None process_set",
    "alltoall_async": "tensor splits=None name=None process_set",
    "reducescatter": SCATTER,
    "reducescatter_async": SCATTER.replace(" compression", ""),
    "sparse_allreduce_async": "tensor name op process_set",
    "barrier": "process_set",
    "join": "device=-1",
    "poll": "handle",
    "synchronize": "handle",
    "start_timeline": "file_path mark_cycles=False",
    "stop_timeline": "",
}
DEFAULTS = {
    "compression": "compression=Compression.none",
    "process_set": "process_set=global_process_set",
}
for kind in ("allreduce", "allreduce_", "allreduce_async", "allreduce_async_", "allgather",
             "allgather_async", "reducescatter", "reducescatter_async"):  # fmt: skip
    SIGNATURES[f"grouped_{kind}"] = SIGNATURES[kind].replace("tensor", "tensors")


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_are_horovods(name):
    expected = {
        "None": None,
        "Average": hvd.Average,
        "Compression.none": hvd.Compression.none,
        "global_process_set": hvd.global_process_set,
    }
    found = []
    for parameter in inspect.signature(getattr(hvd, name)).parameters.values():
        default = parameter.default
        names = [word for word, value in expected.items() if value is default]
        text = "" if default is parameter.empty else f"={names[0] if names else default}"
        found.append(f"{parameter.name}{text}")
    assert found == [DEFAULTS.get(word, word) for word in SIGNATURES[name].split()]


def test_init_takes_what_horovods_does():
    parameters = list(inspect.signature(hvd.init).parameters)
    assert parameters[:2] == ["comm", "process_sets"]
