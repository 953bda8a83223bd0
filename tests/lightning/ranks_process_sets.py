"""RingStrategy and torch.distributed over process sets: 4 ranks.

``ranks_process_sets.py lightning``
"""

from __future__ import annotations

import io
import os
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.loggers import CSVLogger
from lightning_utilities.core.rank_zero import rank_zero_only
from torch.utils.data import DataLoader

import ringplug
from ringplug.backend.errors import MismatchError, NotInitializedError, UsageError
from tests.checks import check, run_checks
from tests.lightning.one_process import (
    ROWS,
    L,
    Module,
    RingStrategy,
    fit_ordered,
    reference,
    rows,
    same,
    trainer,
)

EVENS, ODDS = ringplug.ProcessSet([0, 2]), ringplug.ProcessSet([1, 3])
FOLDS = (EVENS, ODDS)


def own(rank):
    return FOLDS[rank % 2]


def weights(module):
    return [value.tolist() for value in module.state_dict().values()]


@check
def sets_must_be_set_up_first(rank, size):
    for given in (EVENS, [0, 2]):
        with pytest.raises(NotInitializedError, match=r"\[0, 2\].*ringplug.init\(process_sets="):
            RingStrategy(process_set=given)
    assert RingStrategy(process_set=ringplug.global_process_set).world_size == size
    ringplug.init(process_sets=list(FOLDS))


@check
def what_cannot_be_is_refused_at_once(rank, size):
    other = FOLDS[1 - rank % 2]
    for given in (other, other.ranks):
        with pytest.raises(UsageError, match=rf"on rank {rank}, which is not in the set"):
            RingStrategy(process_set=given)
    unknown = ringplug.ProcessSet([0, 1])
    with pytest.raises(NotInitializedError, match=r"\[0, 1\].*not set up.*2: \[1, 3\]"):
        RingStrategy(process_set=unknown)
    with pytest.raises(UsageError, match=r"\[0, 1\].*not set up.*2: \[1, 3\]"):
        RingStrategy(process_set=[0, 1])
    with pytest.raises(UsageError, match="integers"):
        RingStrategy(process_set=["0"])
    with pytest.raises(UsageError, match="process_set or cluster_environment"):
        RingStrategy(process_set=own(rank), cluster_environment=RingStrategy().cluster_environment)
    text = rf"devices=4\), but 2 of the process set \[{rank % 2}, {rank % 2 + 2}\] on this host"
    with pytest.raises(UsageError, match=text):
        trainer(RingStrategy(process_set=own(rank)), devices=4)
    with pytest.raises(UsageError, match="devices=2"):
        trainer(RingStrategy(), devices=2)
    with pytest.raises(UsageError, match="num_nodes=2"):
        trainer(RingStrategy(process_set=own(rank)), num_nodes=2)
    assert trainer(RingStrategy(process_set=own(rank)), devices=2).num_devices == 2
    assert trainer(RingStrategy(process_set=range(4)), devices=4).world_size == 4


@check
def some_ranks_first_and_all_of_them_later(rank, size):
    if EVENS.included():
        module = Module()
        fit_ordered(module, 2, strategy=RingStrategy(process_set=EVENS), max_epochs=1)
        same(module, reference(Module(), epochs=1))
        with pytest.raises(UsageError, match=r"world is ranks \[0, 2\].*ranks \[0, 1, 2, 3\]"):
            trainer(RingStrategy()).fit(Module(), DataLoader(rows()))
        dist.destroy_process_group()
    # Of these, two have been in a group before.
    module = Module()
    fit_ordered(module, 4, max_epochs=1)
    same(module, reference(Module(), epochs=1))
    with pytest.raises(UsageError, match=r"world is ranks \[0, 1, 2, 3\]"):
        trainer(RingStrategy(process_set=own(rank))).fit(Module(), DataLoader(rows()))
    dist.destroy_process_group()


class InBoth(L.Callback):
    """All four ranks are in training, each in its own."""

    def __init__(self):
        self.met = 0

    def on_train_batch_start(self, trainer, module, batch, index):
        if trainer.current_epoch == 0 and index in {0, 3}:
            ringplug.barrier(name=f"in both trainings, batch {index}")
            self.met += 1


@check
def two_models_at_the_same_time(rank, size):
    fold, place = rank % 2, rank // 2
    makes = (
        lambda p: torch.optim.SGD(p, 0.05, momentum=0.9),
        lambda p: torch.optim.Adam(p, 0.01),
    )
    # Different data, weights, optimizers, and numbers of steps.
    module, by_hand = (Module(makes[fold], seed=fold) for _ in range(2))
    meets = InBoth()
    # A set, and the ranks of one, in any order.
    given = own(rank) if fold == 0 else [3, 1]
    t = fit_ordered(
        module,
        2,
        seed=1 + fold,
        strategy=RingStrategy(process_set=given),
        max_epochs=3 + fold,
        callbacks=[meets],
    )
    assert meets.met == 2
    assert (t.global_rank, t.world_size, t.local_rank, t.num_devices) == (place, 2, place, 2)
    assert (t.node_rank, t.num_nodes, t.is_global_zero) == (0, 1, place == 0)
    assert t.distributed_sampler_kwargs == {"num_replicas": 2, "rank": place}
    assert rank_zero_only.rank == place
    assert (dist.get_rank(), dist.get_world_size()) == (place, 2)
    same(module, reference(by_hand, epochs=3 + fold, seed=1 + fold))
    everyone = ringplug.allgather_object(weights(module))
    assert everyone[0] == everyone[2]
    assert everyone[1] == everyone[3]
    assert everyone[0] != everyone[1]


@check
def what_rank_zero_does_is_done_once_per_set(rank, size):
    fold, place = rank % 2, rank // 2
    made = tempfile.mkdtemp(prefix="ringplug-sets-") if rank == 0 else None
    root = Path(ringplug.broadcast_object(made))
    directory = root / f"fold {fold}"

    class Logs(Module):
        def prepare_data(self):
            directory.mkdir()
            (directory / "prepared").write_text(str(rank))

        def validation_step(self, batch, index):
            self.log("rank", float(rank), sync_dist=True)
            self.log("highest", rank, sync_dist=True, reduce_fx="max")
            assert self.all_gather(torch.tensor(rank)).tolist() == [fold, fold + 2]

    logger = CSVLogger(directory)
    t = trainer(
        RingStrategy(process_set=own(rank), scale_lr=True),
        max_epochs=1,
        logger=logger,
        log_every_n_steps=1,
        enable_checkpointing=True,
    )
    module = Logs(lambda p: torch.optim.SGD(p, 0.01))
    data = DataLoader(rows(), batch_size=4)
    t.fit(module, data, data)
    assert (directory / "prepared").read_text() == str(fold)
    assert t.callback_metrics["rank"] == fold + 1
    assert t.callback_metrics["highest"] == fold + 2
    # Lightning's sampler: the set together sees every row once.
    seen = ringplug.allgather_object(torch.cat(module.seen), process_set=own(rank))
    assert len(seen[0]) == len(seen[1]) == ROWS // 2
    assert len(torch.unique(torch.cat(seen), dim=0)) == ROWS
    assert t.optimizers[0].param_groups[0]["lr"] == 0.02
    strategy = t.strategy
    assert strategy.broadcast(rank, src=1) == fold + 2
    assert strategy.reduce_boolean_decision(rank == fold, all=False)
    assert not strategy.reduce_boolean_decision(rank == fold)
    with pytest.raises(MismatchError, match=rf"rank {fold + 2}"):
        strategy.barrier(f"place {place}")
    # Each set has the checkpoint and the log that its rank 0 wrote.
    (path,) = (directory / "lightning_logs" / "version_0").glob("checkpoints/*.ckpt")
    saved = torch.load(path, weights_only=False)["state_dict"]
    assert [value.tolist() for value in saved.values()] == weights(module)
    assert (directory / "lightning_logs" / "version_0" / "metrics.csv").exists()
    assert {child.name for child in root.iterdir()} <= {"fold 0", "fold 1"}
    ringplug.barrier()
    if rank == 0:
        shutil.rmtree(root)


@check
def pickled_trainers(rank, size):
    memory = io.BytesIO()
    torch.save(trainer(RingStrategy(process_set=own(rank))), memory)
    memory.seek(0)
    loaded = torch.load(memory, weights_only=False)
    assert (loaded.world_size, loaded.global_rank) == (2, rank // 2)


@check
def groups_inside_of_a_set(rank, size):
    fold, place = rank % 2, rank // 2
    assert dist.get_world_size() == 2
    one, both = dist.new_group([1]), dist.new_group([0, 1])
    total = torch.tensor([float(rank)])
    dist.all_reduce(total, group=both)
    assert total.item() == 2 * fold + 2
    if place == 1:
        dist.all_reduce(total, group=one)
        assert total.item() == 2 * fold + 2
    dist.destroy_process_group()


@check
def torchs_world_is_a_set_that_the_url_names(rank, size):
    fold, place = rank % 2, rank // 2
    url = f"ring://?process_set={own(rank).process_set_id}"
    for wrong, options, text in (
        ("ring://?process_set=77", {}, "no process set 77"),
        (f"ring://?process_set={FOLDS[1 - fold].process_set_id}", {}, f"rank {rank} is not in"),
        ("ring://?process_set=None", {}, "process_set=NUMBER"),
        ("ring://?set=1", {}, "process_set=NUMBER"),
        (url, {"rank": rank + 4, "world_size": 2}, r"rank=.*among ranks"),
        (url, {"rank": place, "world_size": 4}, r"world_size=4\), but this is rank . of 2"),
    ):
        with pytest.raises(UsageError, match=text):
            dist.init_process_group("ring", init_method=wrong, **options)
    for options in ({}, {"rank": place, "world_size": 2}):
        dist.init_process_group("ring", init_method=url, **options)
        assert (dist.get_rank(), dist.get_world_size()) == (place, 2)
        total = torch.tensor([float(rank)])
        dist.all_reduce(total)
        assert total.item() == 2 * fold + 2
        # Messages, and groups of another backend, which meet in the same store.
        box = torch.tensor([rank])
        if place == 0:
            dist.send(box, 1)
        else:
            dist.recv(box, 0)
        assert box.item() == fold
        gloo = dist.new_group(backend="gloo")
        dist.all_reduce(total, group=gloo)
        assert total.item() == 4 * fold + 4
        dist.destroy_process_group()
    # The other way round: the world is gloo's, over a set; a group in it is ring's.
    dist.init_process_group("gloo", init_method=url)
    group = dist.new_group([1, 0], backend="ring")
    total = torch.tensor([float(rank)])
    dist.all_reduce(total, group=group)
    assert total.item() == 2 * fold + 2
    dist.destroy_process_group()
    # And without a set all ranks, again.
    dist.init_process_group("ring")
    assert dist.get_world_size() == 4
    dist.destroy_process_group()


@check
def command_lines_name_ranks(rank, size):
    made = LightningCLI(
        Module,
        args=[
            "--trainer.strategy=ringplug.lightning.RingStrategy",
            f"--trainer.strategy.process_set=[{rank % 2}, {rank % 2 + 2}]",
            "--trainer.accelerator=cpu",
            "--trainer.logger=false",
        ],
        run=False,
    )
    assert (made.trainer.world_size, made.trainer.global_rank) == (2, rank // 2)


@check
def a_set_that_is_gone_is_not_trained_over(rank, size):
    t = trainer(RingStrategy(process_set=own(rank)))
    ringplug.shutdown()
    ringplug.init()
    with pytest.raises(UsageError, match=r"no process set with ranks \[., .\]"):
        t.fit(Module(), DataLoader(rows()))


run_checks(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
