"""What surrounds training in Lightning, on ranks; run per module tree."""

from __future__ import annotations

import importlib
import io
import logging
import os
import re
import sys
import tempfile
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torchmetrics
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

import ringplug.lightning
from ringplug.backend.errors import MismatchError, UnavailableError, UsageError
from tests.checks import check, run_checks

L = importlib.import_module(sys.argv[1])
RingStrategy = ringplug.lightning.RingStrategy
callbacks = importlib.import_module(
    {"lightning": "lightning.pytorch"}.get(sys.argv[1], sys.argv[1]) + ".callbacks"
)
warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)
ROWS = 24


def rows(count=ROWS):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, 4, generator=generator)
    return TensorDataset(x, (x.sum(1) > 0).long())


class Classifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(4, 2)
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(2, average="micro")
        self.seen = torchmetrics.CatMetric()

    def training_step(self, batch, index):
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss, sync_dist=True, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, index):
        logits = self.net(batch[0])
        self.accuracy(logits, batch[1])
        self.seen.update(batch[0][:, 0])
        self.log("accuracy", self.accuracy, on_epoch=True)
        self.log("loss_val", nn.functional.cross_entropy(logits, batch[1]), sync_dist=True)

    test_step = validation_step

    def predict_step(self, batch, index):
        return self.net(batch[0])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def shared_directory():
    """One directory for all ranks; rank 0's name for it."""
    box = [tempfile.mkdtemp(prefix="ringplug-lightning-")]
    if dist.is_initialized():
        dist.broadcast_object_list(box, 0)
    return Path(box[0])


def trainer(**options):
    return L.Trainer(
        **{
            "strategy": RingStrategy(),
            "accelerator": "cpu",
            "max_epochs": 2,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            **options,
        }
    )


def loader(batch=4, count=ROWS):
    return DataLoader(rows(count), batch_size=batch)


@check
def every_stage_again_and_again_on_one_trainer(rank, size):
    assert (rank, size) == (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    t, model = trainer(), Classifier()
    assert not dist.is_initialized()
    assert "mpi4py.MPI" not in sys.modules, "MPI was started before it was needed"
    assert (t.global_rank, t.world_size, t.num_devices, t.num_nodes) == (rank, size, size, 1)
    assert t.local_rank == rank
    assert t.is_global_zero == (rank == 0)
    t.fit(model, loader(), loader())
    group = dist.group.WORLD
    results = []
    for _ in range(2):
        results.append(t.validate(model, loader(), verbose=False))
        results.append(t.test(model, loader(), verbose=False))
        t.predict(model, loader())
    # The union of all ranks' rows, on every rank.
    with torch.no_grad():
        logits = model.net(rows().tensors[0])
    accuracy = (logits.argmax(1) == rows().tensors[1]).float().mean().item()
    loss = nn.functional.cross_entropy(logits, rows().tensors[1]).item()
    for result in results:
        assert abs(result[0]["accuracy"] - accuracy) < 1e-6
        assert abs(result[0]["loss_val"] - loss) < 1e-6
    t.fit_loop.max_epochs = 3
    t.fit(model, loader(), loader())
    assert dist.group.WORLD is group


@check
def values_are_synced_by_every_reduction(rank, size):
    total = float(sum(range(1, size + 1)))

    class Logs(Classifier):
        def validation_step(self, batch, index):
            mine = float(rank + 1)
            self.log("mean", mine, sync_dist=True)
            self.log("whole", rank + 1, sync_dist=True, reduce_fx="sum")
            self.log("low", torch.tensor(rank + 1), sync_dist=True, reduce_fx="min")
            self.log("high", torch.tensor(mine), sync_dist=True, reduce_fx="max")
            gathered = self.all_gather(torch.full((2,), mine))
            assert gathered.tolist() == [[r + 1.0] * 2 for r in range(size)]
            assert self.all_gather(torch.tensor(rank)).tolist() == list(range(size))

    model = Logs()
    logged = trainer().validate(model, loader(4, 4 * size), verbose=False)[0]
    assert logged == {"mean": total / size, "whole": total, "low": 1.0, "high": float(size)}

    class Gathers(Classifier):
        def training_step(self, batch, index):
            x = self.net.weight[0, :2] * (rank + 1)
            out = self.all_gather(x, sync_grads=True)
            return (out * torch.arange(size).reshape(size, 1)).sum()

    t = trainer(max_steps=1, max_epochs=1, strategy="ring_find_unused_parameters_true")
    model = Gathers()
    before = model.net.weight.detach().clone()
    t.fit(model, loader())
    # Each rank's loss weighs this rank's row with its number: size * rank * (rank + 1), averaged.
    mean = sum(size * r * (r + 1) for r in range(size)) / size
    torch.testing.assert_close(
        before - model.net.weight, 0.1 * torch.tensor([[mean, mean, 0, 0], [0] * 4])
    )


@check
def metrics_of_uneven_ranks(rank, size):
    class Uneven(Classifier):
        def on_validation_epoch_end(self):
            values = self.seen.compute()
            union = torch.cat([torch.arange(r + 1.0) for r in range(size)])
            assert sorted(values.tolist()) == sorted(union.tolist())

        def validation_step(self, batch, index):
            self.seen.update(torch.arange(rank + 1.0))

    trainer().validate(Uneven(), loader(4, 4 * size), verbose=False)


@check
def ranks_stop_together(rank, size):
    class Ends(Classifier):
        def validation_step(self, batch, index):
            # Only one rank's own value stops improving.
            self.log("own", float(self.current_epoch) * (1 if rank else -1), sync_dist=False)

    stop = callbacks.EarlyStopping("own", patience=1)
    t = trainer(max_epochs=20, callbacks=[stop])
    t.fit(Ends(), loader(), loader())
    epochs = [None] * size
    dist.all_gather_object(epochs, t.current_epoch)
    assert len(set(epochs)) == 1
    assert epochs[0] < 19


@check
def checkpoints_and_resuming(rank, size):
    directory = shared_directory()
    keep = callbacks.ModelCheckpoint(
        directory / "a", monitor="loss_val", save_top_k=1, save_last=True
    )
    model = Classifier()
    t = trainer(max_epochs=3, callbacks=[keep], enable_checkpointing=True)
    t.fit(model, loader(), loader())
    assert (directory / "a" / "last.ckpt").exists()
    paths = [None] * size
    dist.all_gather_object(paths, keep.best_model_path)
    assert len(set(paths)) == 1
    state = torch.load(directory / "a" / "last.ckpt", weights_only=False)
    assert not [key for key in state["state_dict"] if "module." in key]
    # Interrupted after two epochs and resumed, it ends where the other did.
    whole, part = Classifier(), Classifier()
    trainer(max_epochs=4).fit(whole, loader())
    t = trainer(max_epochs=2, default_root_dir=directory)
    t.fit(part, loader())
    t.save_checkpoint(directory / "half.ckpt")
    fresh = Classifier()
    nn.init.zeros_(fresh.net.weight)
    t = trainer(max_epochs=4)
    t.fit(fresh, loader(), ckpt_path=directory / "half.ckpt")
    torch.testing.assert_close(fresh.net.weight, whole.net.weight)
    # Scaled learning rates are stored as they are, and not scaled again.
    scaled = trainer(max_epochs=2, strategy=RingStrategy(scale_lr=True))
    scaled.fit(Classifier(), loader())
    scaled.save_checkpoint(directory / "scaled.ckpt")
    again = trainer(max_epochs=3, strategy=RingStrategy(scale_lr=True))
    again.fit(Classifier(), loader(), ckpt_path=directory / "scaled.ckpt")
    assert again.optimizers[0].param_groups[0]["lr"] == 0.1 * size


@check
def data_prepared_once(rank, size):
    directory = shared_directory()

    class Prepared(Classifier):
        def prepare_data(self):
            # Lightning makes a group of gloo around this.
            with (directory / "log").open("a") as log:
                log.write(f"{rank}\n")

    trainer(max_epochs=1).fit(Prepared(), loader())
    assert (directory / "log").read_text() == "0\n"


@check
def pickled_trainers(rank, size):
    class Saves(L.Callback):
        def on_train_batch_end(self, trainer, *_):
            torch.save(trainer, io.BytesIO())

    t = trainer(max_epochs=1)
    t.fit(Classifier(), loader())
    memory = io.BytesIO()
    torch.save(t, memory)
    memory.seek(0)
    loaded = torch.load(memory, weights_only=False)
    assert type(loaded.strategy) is type(t.strategy)
    assert loaded.world_size == size


@check
def objects_and_decisions(rank, size):
    t = trainer(max_epochs=1)
    t.fit(Classifier(), loader())
    strategy = t.strategy
    assert strategy.broadcast({"rank": rank, "big": "x" * 100_000}, src=1)["rank"] == 1
    assert strategy.reduce_boolean_decision(True)
    assert not strategy.reduce_boolean_decision(rank == 0)
    assert strategy.reduce_boolean_decision(rank == 0, all=False)
    assert not strategy.reduce_boolean_decision(False, all=False)
    assert strategy.reduce(torch.tensor(rank), reduce_op="sum").item() == sum(range(size))
    assert strategy.reduce("text") == "text"
    strategy.barrier("here")
    for error, call in (
        (MismatchError, lambda: strategy.barrier(f"rank {rank}")),
        (UsageError if rank == 0 else MismatchError, lambda: strategy.broadcast(lambda: 0)),
    ):
        with pytest.raises(error, match=r"rank|pickled"):
            call()
    strategy.barrier("after")


@check
def own_samplers_and_sizes_are_respected(rank, size):
    sampler = DistributedSampler(rows(), num_replicas=1, rank=0, shuffle=False)
    t = trainer(max_epochs=1, use_distributed_sampler=False)
    t.fit(Classifier(), DataLoader(rows(), batch_size=4))
    assert t.num_training_batches == ROWS // 4
    t = trainer(max_epochs=1)
    t.fit(Classifier(), DataLoader(rows(), batch_size=4, sampler=sampler))
    assert t.num_training_batches == ROWS // 4


@check
def contradictions_are_refused(rank, size):
    for options, text in (
        ({"devices": size + 1}, f"Trainer(devices={size + 1})"),
        ({"num_nodes": 2}, "Trainer(num_nodes=2)"),
    ):
        with pytest.raises(UsageError, match=re.escape(text)):
            trainer(**options)
    for devices in ("auto", 1, size):
        assert trainer(devices=devices).num_devices == size
    for options in (
        {"compression": "zip"},
        {"process_group_backend": "gloo"},
        {"start_method": "spawn"},
        {"compression": "bf16", "ddp_comm_hook": print},
        {"cluster_environment": object()},
    ):
        with pytest.raises(ValueError, match=r"compression|no process_group|no start|environment"):
            RingStrategy(**options)


@check
def devices_without_a_transport_are_refused(rank, size):
    strategy = RingStrategy()
    strategy.parallel_devices = [torch.device("cuda", 0)]
    with pytest.raises(UnavailableError, match=r"nccl.*shared_memory.*accelerator='cpu'"):
        strategy.setup_distributed()


@check
def forked_data_workers(rank, size):
    data = DataLoader(rows(), batch_size=4, num_workers=2, multiprocessing_context="fork")
    model, other = Classifier(), Classifier()
    trainer().fit(model, data)
    trainer().fit(other, loader())
    torch.testing.assert_close(model.net.weight, other.net.weight)


@check
def ranks_with_different_numbers_of_batches(rank, size):
    class Uneven(IterableDataset):
        def __iter__(self):
            return iter([rows()[i] for i in range(8 if rank else 16)])

    with pytest.raises(MismatchError, match=r"rank.* 0.*: .*start of training batch 2 of epoch 0"):
        trainer().fit(Classifier(), DataLoader(Uneven(), batch_size=4))
    trainer(max_epochs=1).fit(Classifier(), loader())


@check
def command_lines(rank, size):
    directory = shared_directory()
    cli = importlib.import_module(
        {"lightning": "lightning.pytorch"}.get(sys.argv[1], sys.argv[1]) + ".cli"
    )

    class Data(L.LightningDataModule):
        def train_dataloader(self):
            return loader()

    made = cli.LightningCLI(
        Classifier,
        Data,
        args=[
            "fit",
            "--trainer.strategy=ringplug.lightning.RingStrategy",
            "--trainer.strategy.compression=bf16",
            "--trainer.accelerator=cpu",
            "--trainer.max_epochs=1",
            "--trainer.logger=false",
            "--trainer.enable_progress_bar=false",
            "--trainer.enable_checkpointing=false",
            f"--trainer.default_root_dir={directory}",
        ],
        save_config_kwargs={"overwrite": True},
    )
    assert made.trainer.strategy._compression == "bf16"
    assert made.trainer.world_size == size


run_checks(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
