"""Parts of ringplug.lightning that need no second process."""

from __future__ import annotations

import pickle
import sys
from types import SimpleNamespace

import pytest
import torch
from torch.optim import lr_scheduler

import ringplug
from ringplug.backend import runtime
from ringplug.backend.errors import NotInitializedError, UsageError
from ringplug.backend.world import World
from ringplug.lightning import launcher, strategy_class
from ringplug.lightning.learning_rates import scale_learning_rates

LAUNCHER_VARIABLES = (
    "OMPI_COMM_WORLD_RANK",
    "PMI_RANK",
    "PMI_SIZE",
    "TORCHELASTIC_RUN_ID",
    "SLURM_PROCID",
    "SLURM_STEP_ID",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
)


@pytest.fixture
def environ(monkeypatch):
    for name in LAUNCHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)

    def choose(**variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, str(value))

    return choose


def environment():
    return strategy_class("lightning")._environment_class()


def test_without_a_launcher_there_is_one_rank(environ):
    found = environment()
    assert not found.creates_processes_externally
    assert not found.detect()
    assert (found.global_rank(), found.world_size(), found.local_rank()) == (0, 1, 0)
    # What is asked for decides how many are started.
    found.validate_settings(num_devices=5, num_nodes=1)


def test_a_slurm_allocation_alone_starts_nothing(environ):
    environ(SLURM_PROCID=0, SLURM_NTASKS=4)
    assert environment().world_size() == 1
    environ(SLURM_STEP_ID=0, SLURM_PROCID=2, SLURM_LOCALID=0, SLURM_STEP_TASKS_PER_NODE=2)
    found = environment()
    assert (found.global_rank(), found.world_size(), found.node_rank()) == (2, 4, 1)


def test_mpi_wins_over_slurm(environ):
    environ(
        SLURM_STEP_ID=0,
        SLURM_PROCID=0,
        SLURM_NTASKS=1,
        OMPI_COMM_WORLD_RANK=5,
        OMPI_COMM_WORLD_SIZE=8,
        OMPI_COMM_WORLD_LOCAL_RANK=1,
        OMPI_COMM_WORLD_LOCAL_SIZE=4,
    )
    found = environment()
    assert (found.global_rank(), found.world_size()) == (5, 8)
    assert (found.local_rank(), found.local_size()) == (1, 4)
    assert (found.node_rank(), found.num_nodes()) == (1, 2)
    assert type(pickle.loads(pickle.dumps(found))) is type(found)
    for devices in (1, 4):
        found.validate_settings(devices, 1)
    with pytest.raises(UsageError, match="4 processes were started on this host"):
        found.validate_settings(3, 1)


def test_sizes_without_a_launcher_are_those_asked_for(environ):
    strategy = strategy_class("lightning")()
    strategy.parallel_devices = [torch.device("cpu")] * 3
    strategy.num_nodes = 2
    assert (strategy.num_processes, strategy.world_size) == (3, 6)
    assert strategy.root_device == torch.device("cpu")


@pytest.mark.parametrize("tree", ["lightning", "pytorch_lightning"])
def test_unknown_arguments_are_refused_at_once(tree):
    strategy = strategy_class(tree)
    with pytest.raises(TypeError, match="RingStrategy.*'bogus'; it takes .*static_graph"):
        strategy(bogus=1)
    with pytest.raises(TypeError, match="did you mean 'gradient_as_bucket_view'"):
        strategy(gradient_as_bucket_veiw=True)
    with pytest.raises(TypeError, match="device_ids"):
        strategy(device_ids=[0])
    strategy(gradient_as_bucket_view=True, checkpoint_io=None, model_averaging_period=2)


def test_process_sets_need_a_launcher(environ):
    strategy = strategy_class("lightning")
    with pytest.raises(
        NotInitializedError, match=r"\[0, 2\].*devices=N starts none.*ringrun -np N"
    ):
        strategy(process_set=[0, 2])
    # What a script does before it gets there.
    with pytest.raises(UsageError, match=r"not in 0\.\.0; .*ringrun -np N"):
        ringplug.init(process_sets=[ringplug.ProcessSet([0, 2])])
    environ(OMPI_COMM_WORLD_RANK=0, OMPI_COMM_WORLD_SIZE=4)
    with pytest.raises(NotInitializedError, match=r"process_set=\[0, 2\]\): call ringplug.init"):
        strategy(process_set=[0, 2])


def test_a_part_of_the_world_counts_its_own_ranks_and_hosts(monkeypatch):
    # Ranks 0 and 1 on the first host, 2 to 4 on the second.
    for rank, expected in ((1, (0, 4, 0, 1, 0)), (2, (1, 4, 0, 3, 1)), (4, (3, 4, 2, 3, 1))):
        whole = World.from_hosts(rank, ["a", "a", "b", "b", "b"])
        monkeypatch.setattr(runtime, "current", lambda w=whole: SimpleNamespace(world=w))
        found = strategy_class("lightning")._environment_class((1, 2, 3, 4))
        assert expected == (
            found.global_rank(),
            found.world_size(),
            found.local_rank(),
            found.local_size(),
            found.node_rank(),
        )
        assert found.num_nodes() == 2
        assert pickle.loads(pickle.dumps(found)).global_rank() == found.global_rank()
    found = strategy_class("lightning")._environment_class((0, 1))
    with pytest.raises(UsageError, match=r"rank 4 does not train with ranks \[0, 1\]"):
        found.global_rank()


@pytest.mark.parametrize(
    ("typed", "repeated"),
    [
        (["python", "train.py", "-x"], ["train.py", "-x"]),
        (["python", "-O", "train.py"], ["-O", "train.py"]),
        (["python", "-m", "package.train"], ["-m", "package.train"]),
        (["python", "-c", "pass"], ["-c", "pass"]),
    ],
)
def test_commands_are_repeated_as_typed(monkeypatch, typed, repeated):
    monkeypatch.setattr(sys, "orig_argv", typed)
    assert launcher.own_command() == [sys.executable, *repeated]


@pytest.mark.parametrize("typed", [["python"], ["python", "-"], ["python", "-i"]])
def test_typed_scripts_cannot_be_repeated(monkeypatch, typed):
    monkeypatch.setattr(sys, "orig_argv", typed)
    with pytest.raises(UsageError, match="ringrun -np N"):
        launcher.own_command()


SCHEDULERS = {
    "step": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda n: 1 / (n + 1)),
    "warmup": lambda o: lr_scheduler.LinearLR(o, 0.1, total_iters=4),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=12),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=3),
    "sequence": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.1), lr_scheduler.ExponentialLR(o, 0.9)], [3]
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_scaled_schedules_are_the_schedules_scaled(name):
    def rates(factor):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 0.1)
        scheduler = SCHEDULERS[name](optimizer)
        if factor > 1:
            lines = scale_learning_rates([optimizer], [scheduler], factor)
            assert len(lines) == 1
            # Only once.
            assert scale_learning_rates([optimizer], [scheduler], factor) == []
        seen = []
        for _ in range(10):
            seen.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
        return torch.tensor(seen)

    torch.testing.assert_close(rates(3), 3 * rates(1))


def test_scaled_tensor_rates_stay_the_same_tensor():
    rate = torch.tensor(0.1)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], rate)
    scale_learning_rates([optimizer], [], 2)
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == pytest.approx(0.2)
