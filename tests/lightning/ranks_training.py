"""RingStrategy trains like one process; run per module tree: ``ranks_training.py lightning``."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.utils.data import DataLoader, IterableDataset

import ringplug.lightning
from ringplug.backend.errors import UsageError
from tests.checks import check, run_checks
from tests.lightning.one_process import (
    EPOCHS,
    ROWS,
    L,
    Module,
    equal_on_all_ranks,
    fit_ordered,
    reference,
    rows,
    same,
    trainer,
)

RingStrategy = ringplug.lightning.RingStrategy


def fit(module, size, batch=None, **options):
    t = trainer(**options)
    t.fit(module, DataLoader(rows(), batch_size=batch or 24 // size // 3))
    equal_on_all_ranks(module)
    return t


class InOrder(L.Callback):
    """Lightning shuffles training data; here the union of the ranks' batches is the big batch."""

    def on_train_epoch_start(self, trainer, _):
        sampler = trainer.train_dataloader.sampler
        assert (sampler.num_replicas, sampler.rank) == (trainer.world_size, trainer.global_rank)


@check
def equals_one_process(rank, size):
    for make in (
        lambda p: torch.optim.SGD(p, 0.05, momentum=0.9),
        lambda p: torch.optim.Adam(p, 0.01),
    ):
        for clip in (None, 0.2):
            module = Module(make)
            fit_ordered(module, size, gradient_clip_val=clip)
            same(module, reference(Module(make), clip=clip))


@check
def equals_one_process_in_every_mode(rank, size):
    # Each against the same by hand; names, and options of the strategy.
    cases = [
        ({"accumulate_grad_batches": 2}, {"accumulate": 2}, 1e-5),
        ({"precision": "bf16-mixed"}, {"bf16": True}, 2e-3),
        ({"strategy": "ring"}, {}, 1e-5),
        ({"strategy": "ring_static_graph"}, {}, 1e-5),
        ({"strategy": "ring_find_unused_parameters_true"}, {}, 1e-5),
        ({"strategy": RingStrategy(bucket_cap_mb=1, overlap=False)}, {}, 1e-5),
        ({"strategy": RingStrategy(compression="bf16")}, {}, 3e-3),
        ({"strategy": RingStrategy(compression="fp16", overlap=False)}, {}, 3e-4),
        ({"strategy": RingStrategy(ddp_comm_hook=default_hooks.fp16_compress_hook)}, {}, 3e-4),
        ({"strategy": RingStrategy(gradient_as_bucket_view=True)}, {}, 1e-5),
    ]
    for options, by_hand, atol in cases:
        module = Module()
        fit_ordered(module, size, **options)
        same(module, reference(Module(), **by_hand), atol)
    # A step that is rounded to 16 bits is told apart from one that is not.
    plain, rounded = Module(), Module()
    fit_ordered(plain, size)
    fit_ordered(rounded, size, strategy=RingStrategy(compression="bf16"))
    assert not torch.equal(plain.net[0].weight, rounded.net[0].weight)


@check
def options_arrive(rank, size):
    module = Module()

    def strategy():
        return RingStrategy(bucket_cap_mb=7, timeout=77, overlap=False)

    class Look(L.Callback):
        def on_train_start(self, trainer, _):
            assert trainer.strategy.model.bucket_bytes_cap == 7 * 2**20
            assert trainer.strategy.model.process_group.overlap is False
            assert not dist.group.WORLD.overlap

    with pytest.raises(UsageError, match=r"exists already, with a timeout of 1800 s"):
        fit_ordered(module, size, strategy=strategy(), callbacks=[Look()])
    dist.destroy_process_group()
    fit_ordered(module, size, strategy=strategy(), callbacks=[Look()])
    fit_ordered(Module(), size, strategy=RingStrategy(timeout=77))
    fit_ordered(Module(), size)
    assert dist.group.WORLD.lane.transport._config.timeout == 77
    assert dist.group.WORLD.overlap


@check
def true_half_precision_runs(rank, size):
    module = Module()
    fit_ordered(module, size, precision="bf16-true")
    same(module.float(), reference(Module()), atol=0.1)


@check
def half_precision_named_16_mixed(rank, size):
    # Lightning has no scaler for CPUs and takes bfloat16, saying so.
    module = Module()
    fit_ordered(module, size, precision="16-mixed")
    same(module, reference(Module(), bf16=True), atol=2e-3)


@check
def injected_samplers_cover_the_data_once(rank, size):
    module = Module()
    fit(module, size, batch=4, max_epochs=1, callbacks=[InOrder()])
    seen = torch.cat(module.seen)
    assert len(seen) == ROWS // size
    everyone = [torch.empty_like(seen) for _ in range(size)]
    dist.all_gather(everyone, seen)
    union = torch.cat(everyone)
    assert len(torch.unique(union, dim=0)) == ROWS
    t = trainer()
    predictions = torch.cat(t.predict(module, DataLoader(rows(), batch_size=4)))
    with torch.no_grad():
        expected = module.net(rows().tensors[0])
    torch.testing.assert_close(predictions, expected[rank::size])


@check
def iterable_data_is_the_users(rank, size):
    class Numbers(IterableDataset):
        def __iter__(self):
            data = rows().tensors
            return (tuple(t[i] for t in data) for i in range(rank, ROWS, size))

    module = Module()
    t = trainer()
    t.fit(module, DataLoader(Numbers(), batch_size=8 // size))
    equal_on_all_ranks(module)
    same(module, reference(Module()))


class Manual(Module):
    def __init__(self, static=False):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, _):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        self.clip_gradients(optimizer, 0.2, "norm")
        optimizer.step()


@check
def manual_optimisation(rank, size):
    for name in ("ring", "ring_static_graph"):
        module = Manual()
        fit_ordered(module, size, strategy=name)
        same(module, reference(Module(), clip=0.2))


class Adversaries(L.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.automatic_optimization = False
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 1)

    def losses(self, x):
        yield 0, self.second(self.first(x)).pow(2).mean()
        yield 1, -self.second(self.first(x).detach()).mean()

    def configure_optimizers(self):
        return [
            torch.optim.SGD(self.first.parameters(), 0.05),
            torch.optim.SGD(self.second.parameters(), 0.05),
        ]

    def training_step(self, batch, _):
        optimizers = self.optimizers()
        losses = self.losses(batch[0])
        for optimizer in optimizers:
            self.toggle_optimizer(optimizer)
            _, loss = next(losses)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.untoggle_optimizer(optimizer)


@check
def several_optimizers_with_toggling(rank, size):
    module = Adversaries()
    fit_ordered(module, size, strategy="ring_find_unused_parameters_true")
    by_hand = Adversaries()
    optimizers = by_hand.configure_optimizers()
    for _ in range(EPOCHS):
        for start in range(0, ROWS, 8):
            for number, loss in by_hand.losses(rows().tensors[0][start : start + 8]):
                by_hand.zero_grad()
                loss.backward()
                optimizers[number].step()
    same(module, by_hand)


class Unused(Module):
    def __init__(self):
        super().__init__()
        self.spare = nn.Linear(6, 2)

    def loss(self, batch):
        branch = self.spare if dist.get_rank() == 0 else self.net
        return nn.functional.mse_loss(branch(batch[0]), batch[1])


@check
def unused_parameters(rank, size):
    fit_ordered(Unused(), size, strategy="ring_find_unused_parameters_true")
    hint = "(?s)ring_find_unused_parameters_true.*Expected to have finished reduction"
    with pytest.raises(RuntimeError, match=hint):
        fit_ordered(Unused(), size)


class Words(Module):
    def __init__(self):
        super().__init__(lambda p: torch.optim.SGD(p, 0.1))
        self.words = nn.EmbeddingBag(10, 6, sparse=True)
        with torch.no_grad():
            self.words.weight.copy_(torch.arange(60).reshape(10, 6) / 60)

    def loss(self, batch):
        indices = (batch[0].abs() * 10).long() % 10
        return nn.functional.mse_loss(self.net(self.words(indices)), batch[1])


@check
def sparse_embeddings(rank, size):
    module = Words()
    fit_ordered(module, size)
    same(module, reference(Words()))


class Normalised(Module):
    def __init__(self, momentum=0.1):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(
            nn.Linear(6, 16),
            nn.BatchNorm1d(16, momentum=momentum),
            nn.Tanh(),
            nn.Unflatten(1, (4, 4)),
            nn.BatchNorm1d(4, affine=False),
            nn.Flatten(),
            nn.Linear(16, 2),
        )


@check
def synchronised_batch_norm(rank, size):
    for momentum in (0.1, None):
        module = Normalised(momentum)
        keys = list(module.state_dict())
        fit_ordered(module, size, sync_batchnorm=True)
        same(module, reference(Normalised(momentum)))
        assert type(module.net[1]) is nn.BatchNorm1d
        assert list(module.state_dict()) == keys
    unsynced = Normalised()
    fit_ordered(unsynced, size)
    assert not torch.allclose(unsynced.net[0].weight, module.net[0].weight, atol=1e-5)
    mixed = Normalised()
    fit_ordered(mixed, size, sync_batchnorm=True, precision="bf16-mixed")
    same(mixed, reference(Normalised(), bf16=True), atol=2e-2)


@check
def batch_norm_with_uneven_batches(rank, size):
    from ringplug.lightning.batch_norm import RingLayerSyncLogic

    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU())
    synced = RingLayerSyncLogic().apply(copy.deepcopy(plain))
    whole = torch.randn(size * (size + 1) // 2 - 1, 2, 6, 6, requires_grad=True)
    # Rank 0 has none, rank 1 has two, rank 2 has three rows.
    start = sum(r + 1 for r in range(1, rank)) if rank else 0
    mine = whole.detach()[start : start + (rank + 1 if rank else 0)].requires_grad_()
    weights = torch.randn(len(whole), 3, 4, 4)
    (plain(whole) * weights).sum().backward()
    out = synced(mine)
    (out * weights[start : start + len(mine)]).sum().backward()
    torch.testing.assert_close(
        mine.grad, whole.grad[start : start + len(mine)], atol=1e-5, rtol=1e-4
    )
    torch.testing.assert_close(synced[1].running_var, plain[1].running_var)
    for a, b in zip(synced.parameters(), plain.parameters(), strict=True):
        total = a.grad.clone()
        dist.all_reduce(total)
        torch.testing.assert_close(total, b.grad, atol=1e-4, rtol=1e-4)
    with pytest.raises(UsageError, match="LazyBatchNorm1d"):
        RingLayerSyncLogic().apply(nn.Sequential(nn.LazyBatchNorm1d()))


@check
def compiled_modules(rank, size):
    module = Module()
    compiled = torch.compile(module, backend="eager")
    sampler = torch.utils.data.DistributedSampler(rows(), shuffle=False)
    t = trainer()
    t.fit(compiled, DataLoader(rows(), batch_size=8 // size, sampler=sampler))
    same(module, reference(Module()))


@check
def learning_rates_scale_on_request(rank, size):
    def rates(strategy, fits=1):
        module = Module()
        optimizer = torch.optim.SGD(module.parameters(), 0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        module.configure_optimizers = lambda: ([optimizer], [scheduler])
        for _ in range(fits):
            fit(module, size, batch=4, max_epochs=1, strategy=strategy())
        return optimizer.param_groups[0]["lr"], scheduler.base_lrs

    assert rates(RingStrategy) == (0.05, [0.1])
    assert rates(lambda: RingStrategy(scale_lr=True)) == (0.05 * size, [0.1 * size])
    # Not a second time when the same optimizer is fitted again.
    assert rates(lambda: RingStrategy(scale_lr=True), fits=2) == (0.025 * size, [0.1 * size])
    # A fresh optimizer, as configure_optimizers usually makes, is scaled in each fit.
    module = Module(lambda p: torch.optim.SGD(p, 0.1))
    t = trainer(RingStrategy(scale_lr=True), max_epochs=1)
    t.fit(module, DataLoader(rows(), batch_size=4))
    assert t.optimizers[0].param_groups[0]["lr"] == 0.1 * size
    t.fit_loop.max_epochs = 2
    t.fit(module, DataLoader(rows(), batch_size=4))
    assert t.optimizers[0].param_groups[0]["lr"] == 0.1 * size


run_checks(int(__import__("os").environ["RANK"]), int(__import__("os").environ["WORLD_SIZE"]))
