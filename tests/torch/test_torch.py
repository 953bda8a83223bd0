"""ringplug.torch on several processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.checks import passed
from tests.launching import run_ranks

HERE = Path(__file__).parent
QUIET = {"PYTHONWARNINGS": "ignore::FutureWarning"}


@pytest.mark.parametrize(
    ("script", "ranks"),
    [
        ("ranks_collectives.py", 2),
        ("ranks_collectives.py", 3),
        ("ranks_ddp.py", 2),
        ("ranks_loop.py", 2),
        ("ranks_loop.py", 3),
    ],
)
def test_script(script, ranks):
    passed(run_ranks(HERE / script, ranks, timeout=150, env=QUIET), ranks)


def test_other_transport():
    env = {**QUIET, "RINGPLUG_TRANSPORT": "ring"}
    passed(run_ranks(HERE / "ranks_collectives.py", 2, timeout=150, env=env), 2)


def test_import_starts_nothing():
    code = (
        "import sys, ringplug.torch\n"
        "assert 'mpi4py.MPI' not in sys.modules\n"
        "import torch.distributed as dist\n"
        "assert not dist.is_initialized()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_world_of_one():
    done = run_ranks(
        """
        import sys, torch, torch.distributed as dist, ringplug.torch as ring
        dist.init_process_group("ring")
        tensor = torch.arange(3.0)
        dist.all_reduce(tensor)
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
        model(torch.ones(1, 2)).sum().backward()
        dist.destroy_process_group()
        optimizer = ring.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1))
        optimizer.step()
        assert tensor.tolist() == [0, 1, 2]
        assert "mpi4py.MPI" not in sys.modules
        """,
        1,
        launcher="python",
    )
    assert done.returncode == 0


def test_wrong_ranks_are_refused():
    done = run_ranks(
        """
        import torch.distributed as dist, ringplug.torch
        dist.init_process_group("ring", store=dist.HashStore(), rank=0, world_size=2)
        """,
        1,
        launcher="python",
        expect=1,
    )
    assert "told rank 0 of 2, but this is rank 0 of 1" in done.stderr


def test_a_changed_torch_is_noticed():
    done = run_ranks(
        """
        import torch.distributed as dist, ringplug.torch
        from ringplug.torch.process_group import RingProcessGroup
        # As if torch called another name, and its own method did nothing.
        RingProcessGroup.allreduce = lambda self, tensors, opts=None: self.barrier()
        dist.init_process_group("ring")
        """,
        2,
        expect=1,
    )
    assert "does not drive the process group" in done.stderr


@pytest.mark.parametrize("launcher", ["mpirun", "ringrun"])
def test_an_exception_ends_all_ranks(launcher):
    done = run_ranks(
        """
        import torch, torch.distributed as dist, ringplug.torch
        dist.init_process_group("ring")
        if dist.get_rank() == 1:
            raise ValueError("the culprit")
        dist.all_reduce(torch.ones(1))
        """,
        2,
        launcher=launcher,
        # Of the whole job, start included; a hang would last half an hour.
        timeout=30,
        expect=None,
    )
    assert "ValueError: the culprit" in done.stderr


BACKENDS = """
import os, sys
for name in [name for name in os.environ if name.startswith("MASTER_")]:
    del os.environ[name]
import torch.distributed as dist, ringplug.torch
dist.init_process_group(sys.argv[1])
print("world", dist.get_world_size())
"""


@pytest.mark.parametrize("backend", ["gloo", "cpu:gloo"])
def test_other_backends_need_their_address(backend):
    done = run_ranks(BACKENDS, 1, backend, launcher="python", expect=1)
    assert "environment variable RANK expected" in done.stderr


@pytest.mark.parametrize("backend", ["ring", "RING", "cpu:ring"])
def test_ring_alone_needs_none(backend):
    assert "world 1" in run_ranks(BACKENDS, 1, backend, launcher="python").stdout


@pytest.mark.parametrize(("argument", "sent"), [("", "fp16"), ("compression='none'", "none")])
def test_the_setting_compresses_by_default(argument, sent):
    done = run_ranks(
        f"""
        import torch, ringplug.torch as ring
        ring.init()
        weight = torch.nn.Parameter(torch.zeros(1))
        optimizer = torch.optim.SGD([weight], 1.0)
        ring.DistributedOptimizer(optimizer, {argument})
        (weight * (1 + 2**-14)).sum().backward()
        # fp16 has 11 bits.
        print("sent", "fp16" if weight.grad.item() == 1 else "none")
        """,
        2,
        env={**QUIET, "RINGPLUG_COMPRESSION": "fp16"},
    )
    assert done.stdout.count(f"sent {sent}") == 2


@pytest.mark.parametrize("broadcast", [False, True])
def test_a_forgotten_broadcast_is_warned_of(broadcast):
    done = run_ranks(
        f"""
        import torch, warnings, ringplug.torch as ring
        ring.init()
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
        with torch.no_grad():
            model[1].weight += ring.rank()
            model[1].bias += ring.rank()
        if {broadcast}:
            ring.broadcast_parameters(model.state_dict())
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        ring.DistributedOptimizer(optimizer, model.named_parameters())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                model(torch.ones(1, 2)).sum().backward()
                optimizer.step()
        for one in caught:
            print("warned", one.message)
        """,
        2,
        env=QUIET,
    )
    assert done.stdout.count("warned") == (0 if broadcast else 1)
    if not broadcast:
        assert "the values of 1.weight are not the same" in done.lines(0)[-1]
        assert "broadcast_parameters" in done.lines(0)[-1]
