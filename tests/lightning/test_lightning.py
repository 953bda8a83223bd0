"""RingStrategy on several processes, in both module trees."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checks import passed
from tests.launching import run_ranks

HERE = Path(__file__).parent
TREES = ("lightning", "pytorch_lightning")
REPOSITORY = HERE.parent.parent


@pytest.mark.parametrize(
    ("script", "tree", "ranks"),
    [
        ("ranks_training.py", "lightning", 2),
        ("ranks_training.py", "pytorch_lightning", 4),
        ("ranks_features.py", "lightning", 3),
        ("ranks_features.py", "pytorch_lightning", 2),
        ("ranks_process_sets.py", "lightning", 4),
    ],
)
def test_script(script, tree, ranks):
    passed(run_ranks(HERE / script, ranks, tree, timeout=200), ranks)


@pytest.mark.parametrize("tree", TREES)
def test_an_exception_on_one_rank_ends_all(tree, tmp_path):
    done = run_ranks(
        HERE / "ranks_one_model.py", 2, tree, "raise", tmp_path, timeout=40, expect=None
    )
    assert "ValueError: the culprit" in done.stderr
    # A checkpoint from a callback must not wait for ranks that are elsewhere. Rank 0 writes it.
    assert "exception at step" in done.stdout


def test_a_killed_rank_ends_all(tmp_path):
    done = run_ranks(
        HERE / "ranks_one_model.py", 2, "lightning", "kill", tmp_path, timeout=40, expect=None
    )
    assert done.returncode != 0


@pytest.mark.parametrize("tree", TREES)
def test_sigterm_to_one_rank_ends_training_in_step(tree, tmp_path):
    done = run_ranks(HERE / "ranks_one_model.py", 2, tree, "term", tmp_path, launcher="mpirun")
    steps = re.findall(r"exception at step (\d+)", done.stdout)
    assert len(steps) == 2, done.output
    assert steps[0] == steps[1] == "3"


def plain_environment():
    environ = {key: value for key, value in os.environ.items() if not key.startswith("OMPI_COMM")}
    return environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}


def run_plain(*arguments, timeout=60):
    """``python script``, as a user without a launcher does."""
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=plain_environment(),
        stdin=subprocess.DEVNULL,
    )


@pytest.mark.parametrize("tree", TREES)
def test_sigterm_ends_a_world_of_one(tree, tmp_path):
    command = [sys.executable, str(HERE / "ranks_one_model.py"), tree, "slow", str(tmp_path)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=plain_environment(), cwd=tmp_path
    ) as process:
        try:
            assert process.stdout.readline() == "training\n"
            process.terminate()
            # 1000 slow epochs otherwise.
            rest, _ = process.communicate(timeout=40)
        finally:
            process.kill()
    assert "exception at step" in rest


def test_unequal_numbers_of_batches_are_named():
    done = run_ranks(
        """
        import os
        import lightning as L
        import torch
        from ringplug.lightning import RingStrategy
        from torch.utils.data import DataLoader, TensorDataset

        class Model(L.LightningModule):
            def __init__(self):
                super().__init__()
                self.net = torch.nn.Linear(2, 1)

            def training_step(self, batch, _):
                return self.net(batch[0]).pow(2).mean()

            def configure_optimizers(self):
                return torch.optim.SGD(self.parameters(), 0.1)

        batches = 3 + int(os.environ["OMPI_COMM_WORLD_RANK"])
        L.Trainer(
            strategy=RingStrategy(), accelerator="cpu", max_epochs=1, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            use_distributed_sampler=False,
        ).fit(Model(), DataLoader(TensorDataset(torch.ones(batches, 2))))
        """,
        2,
        timeout=60,
        expect=None,
    )
    assert "start of training batch 3 of epoch 0 (unequal numbers of batches" in done.stderr
    assert "use Lightning's sampler or cut to the smallest number)" in done.stderr


@pytest.mark.parametrize("tree", TREES)
def test_hosts_are_the_communicators(tree):
    done = run_ranks(
        """
        import importlib, os, sys
        rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
        os.environ["RINGPLUG_HOST_ID"] = "ab"[rank > 0]
        L = importlib.import_module(sys.argv[1])
        import torch
        from ringplug.lightning import RingStrategy
        from torch.utils.data import DataLoader, TensorDataset

        class Model(L.LightningModule):
            def __init__(self):
                super().__init__()
                self.net = torch.nn.Linear(2, 1)

            def training_step(self, batch, _):
                return self.net(batch[0]).pow(2).mean()

            def configure_optimizers(self):
                return torch.optim.SGD(self.parameters(), 0.1)

        trainer = L.Trainer(
            strategy=RingStrategy(), accelerator="cpu", max_epochs=1, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )
        model = Model()
        trainer.fit(model, DataLoader(TensorDataset(torch.ones(12, 2)), batch_size=2))
        print("node", trainer.node_rank, "of", trainer.num_nodes, "local", trainer.local_rank,
              "of", trainer.num_devices, "global", trainer.global_rank, "of", trainer.world_size,
              "via", trainer.strategy._group().lane.transport.name)
        """,
        3,
        tree,
    )
    assert "node 0 of 2 local 0 of 1 global 0 of 3 via hierarchical" in done.stdout
    assert "node 1 of 2 local 0 of 2 global 1 of 3 via hierarchical" in done.stdout
    assert "node 1 of 2 local 1 of 2 global 2 of 3 via hierarchical" in done.stdout


@pytest.mark.parametrize(("how", "code"), [("devices", 0), ("devices-fail", 7)])
def test_plain_python_starts_its_ranks(how, code, tmp_path):
    done = run_plain(str(HERE / "ranks_one_model.py"), "lightning", how, str(tmp_path))
    assert done.returncode == code, done.stderr
    assert "rank 0 of 2, steps 12" in done.stdout
    assert "rank 1 of 2, steps 12" in done.stdout


def test_plain_python_without_devices_is_a_world_of_one(tmp_path):
    done = run_plain(str(HERE / "ranks_one_model.py"), "lightning", "alone", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "rank 0 of 1, steps 24" in done.stdout


def test_a_script_from_a_pipe_cannot_be_started_again():
    code = (
        "import lightning as L\n"
        "from ringplug.lightning import RingStrategy\n"
        "t = L.Trainer(strategy=RingStrategy(), devices=2, accelerator='cpu', logger=False)\n"
        "t.fit(L.LightningModule())\n"
    )
    done = subprocess.run(
        [sys.executable, "-"],
        input=code,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )
    assert done.returncode == 1
    assert "was not read from a file" in done.stderr


@pytest.mark.parametrize("tree", TREES)
def test_either_tree_in_either_order(tree):
    other = next(name for name in TREES if name != tree)
    code = f"""
import sys
from ringplug.lightning import RingStrategy
import ringplug.lightning
assert not any(name in sys.modules for name in ("lightning", "pytorch_lightning"))
import {tree} as L
early = RingStrategy()
assert isinstance(early, RingStrategy)
options = dict(accelerator="cpu", logger=False, enable_checkpointing=False)
for strategy in (early, ringplug.lightning.RingStrategy(), "ring",
                 "ring_find_unused_parameters_true", "ring_static_graph"):
    chosen = L.Trainer(strategy=strategy, **options).strategy
    assert isinstance(chosen, RingStrategy), chosen
    assert type(chosen).__module__ == "ringplug.lightning.on_{tree}"
assert "{other}" not in sys.modules
from ringplug.lightning import strategy_class
try:
    L.Trainer(strategy=strategy_class("{other}")(), **options)
except ValueError as error:
    assert "for `import {other}`" in str(error), error
else:
    raise AssertionError("the other tree's strategy was accepted")
"""
    done = run_plain("-c", code)
    assert done.returncode == 0, done.stderr


def test_a_late_class_cannot_be_subclassed():
    done = run_plain(
        "-c", "from ringplug.lightning import RingStrategy\nclass Mine(RingStrategy): pass"
    )
    assert "to subclass it" in done.stderr
