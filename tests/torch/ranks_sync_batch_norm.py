"""SyncBatchNorm, the broadcasts and elastic states, against one process."""

from __future__ import annotations

import copy
import pickle
import sys

import numpy as np
import pytest
import torch
from torch import nn

import ringplug.torch as hvd
from ringplug.torch.elastic import ElasticSampler, TorchState, run
from ringplug.torch.elastic import state as elastic_state
from ringplug.torch.sync_batch_norm import SyncBatchNorm
from tests.checks import check, run_checks


def close(one, other, atol=1e-6):
    torch.testing.assert_close(one.detach(), other.detach(), atol=atol, rtol=1e-5)


def batches(size, inner, counts):
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(count, 4, *inner, generator=generator) * 3 + 1 for count in counts[:size]]


PLAIN = {0: nn.BatchNorm1d, 1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}


def compare(rank, size, inner, counts, dtype=torch.float32, atol=1e-6, **arguments):
    """Two steps of the layer on this rank's batch, and of torch's on all batches."""
    layer = SyncBatchNorm(4, **arguments).to(dtype)
    plain = PLAIN[len(inner)](4, **arguments).to(dtype)
    if arguments.get("affine", True):
        weights = torch.tensor([1.0, 2.0, 0.5, -1.0], dtype=dtype)
        for one in (layer, plain):
            one.weight.data.copy_(weights)
            one.bias.data.copy_(weights / 2)
    for scale in (1.0, 2.0):
        parts = [(part * scale).to(dtype) for part in batches(size, inner, counts)]
        mine = parts[rank].clone().requires_grad_()
        every = torch.cat(parts).requires_grad_()
        start = sum(counts[:rank])
        own = slice(start, start + counts[rank])
        out, expected = layer(mine), plain(every)
        assert out.dtype is dtype
        close(out, expected[own], atol)
        # The same layer twice in one graph.
        out, expected = layer(out * 2), plain(expected * 2)
        factor = torch.linspace(-1, 1, every.numel()).reshape(every.shape).to(dtype)
        (out * factor[own]).sum().backward()
        (expected * factor).sum().backward()
        close(mine.grad, every.grad[own], atol)
        if layer.affine:
            for name in ("weight", "bias"):
                total = hvd.allreduce(getattr(layer, name).grad, op=hvd.Sum, name=name)
                close(total, getattr(plain, name).grad, atol * 10)
    if layer.track_running_stats:
        close(layer.running_mean, plain.running_mean, atol)
        close(layer.running_var, plain.running_var, atol)
        assert layer.num_batches_tracked == plain.num_batches_tracked
    layer.eval()
    plain.eval()
    x = batches(1, inner, [3])[0].to(dtype)
    if arguments.get("track_running_stats", True):
        close(layer(x), plain(x), atol)


@check
def equals_one_process_with_all_batches(rank, size):
    for inner in ((), (5,), (3, 2), (2, 3, 2)):
        compare(rank, size, inner, [4] * size)
        compare(rank, size, inner, [2, 5, 1, 3])
    compare(rank, size, (3,), [3, 0, 2, 0])
    compare(rank, size, (3,), [2] * 4, dtype=torch.float64, atol=1e-12)


@check
def arguments(rank, size):
    compare(rank, size, (3,), [2, 3, 1, 4], momentum=None)
    compare(rank, size, (3,), [2, 3, 1, 4], momentum=0.7, eps=0.1)
    compare(rank, size, (3,), [2, 3, 1, 4], affine=False)
    compare(rank, size, (3,), [2, 3, 1, 4], track_running_stats=False)


@check
def sixteen_bit_inputs(rank, size):
    for dtype in (torch.bfloat16, torch.float16):
        layer, plain = SyncBatchNorm(4), nn.BatchNorm1d(4)
        parts = [part.to(dtype) for part in batches(size, (40,), [9] * 4)]
        out = layer(parts[rank])
        assert out.dtype is dtype
        close(out.float(), plain(torch.cat(parts).float())[9 * rank : 9 * rank + 9], 0.05)
        close(layer.running_mean, plain.running_mean)
        close(layer.running_var, plain.running_var, 1e-5)


@check
def what_layers_refuse(rank, size):
    layer = SyncBatchNorm(4)
    with pytest.raises(ValueError, match="at least 2D"):
        layer(torch.ones(4))
    with pytest.raises(ValueError, match="4 channels"):
        layer(torch.ones(2, 3))
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        layer(torch.ones(1 if rank == 0 else 0, 4))


@check
def converted_models(rank, size):
    plain = nn.Sequential(nn.Conv2d(2, 4, 1), nn.BatchNorm2d(4), nn.Sequential(nn.BatchNorm2d(4)))
    model = SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(plain))
    assert [type(one) for one in model.modules()].count(SyncBatchNorm) == 2
    model.load_state_dict(plain.state_dict())
    hvd.broadcast_parameters(model.state_dict(), 0)
    model(torch.full((2, 2, 3, 3), float(rank)))
    everyone = hvd.allgather_object(model.state_dict()["2.0.running_var"])
    assert all(torch.equal(one, everyone[0]) for one in everyone)
    copied = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    copied(torch.full((2, 2, 3, 3), float(rank)))
    assert type(SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm1d(4))) is SyncBatchNorm


@check
def layers_of_process_sets(rank, size):
    if size == 1:
        return
    inside = hvd.add_process_set(range(size - 1))
    layer, plain = SyncBatchNorm(4, process_set=inside), nn.BatchNorm1d(4)
    parts = batches(size, (), [3] * 4)
    if rank == size - 1:
        close(layer(parts[rank]), plain(parts[rank]))
    else:
        close(layer(parts[rank]), plain(torch.cat(parts[:-1]))[3 * rank : 3 * rank + 3])
    hvd.remove_process_set(inside)


# -- broadcasts


@check
def parameters_in_all_forms(rank, size):
    root = size - 1
    for form in (
        lambda model: model.state_dict(),
        lambda model: list(model.named_parameters()),
        lambda model: model.named_parameters(),
        lambda model: list(model.parameters()),
        lambda model: [(None, one) for one in model.parameters()],
        lambda model: dict(reversed(model.state_dict().items())) if rank else model.state_dict(),
    ):
        torch.manual_seed(rank)
        model = nn.Sequential(nn.Conv2d(3, 2, 3), nn.Linear(2, 3), nn.Linear(600, 700))
        model.to(memory_format=torch.channels_last)
        hvd.broadcast_parameters(form(model), root_rank=root)
        torch.manual_seed(root)
        expected = nn.Sequential(nn.Conv2d(3, 2, 3), nn.Linear(2, 3), nn.Linear(600, 700))
        for own, other in zip(model.parameters(), expected.parameters(), strict=True):
            assert torch.equal(own, other)
    for wrong in (42, "weights", torch.ones(2), {torch.ones(1)}, [1, 2], None):
        with pytest.raises(ValueError, match="invalid params of type"):
            hvd.broadcast_parameters(wrong, root_rank=0)


@check
def parameters_of_all_dtypes_cost_few_rounds(rank, size):
    dtypes = [
        torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
        torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64,
    ]  # fmt: skip
    tensors = {
        f"{number}": torch.full((3,), rank + 1).to(dtypes[number % len(dtypes)])
        for number in range(500)
    }
    tensors |= {"scalar": torch.tensor(float(rank)), "empty": torch.ones(0), "note": "text"}
    tensors["strided"] = torch.full((4, 6), float(rank))[:, ::2]
    from ringplug.backend import runtime

    traffic = runtime.current().named._lane.transport.traffic
    before = traffic.calls
    hvd.broadcast_parameters(tensors, root_rank=0)
    assert traffic.calls - before < 10
    for name, tensor in tensors.items():
        if name not in ("note", "empty"):
            value = 0.0 if name in ("scalar", "strided") else torch.ones(1).to(tensor.dtype)
            assert (tensor == value).all(), name


def trained(kind, rank, **arguments):
    torch.manual_seed(rank)
    model = nn.Linear(3, 2)
    optimizer = kind(model.parameters(), **arguments)
    for _ in range(rank + 1):
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    return model, optimizer


def assert_same_state(optimizer, expected):
    own, other = optimizer.state_dict(), expected.state_dict()
    assert own["state"].keys() == other["state"].keys()
    for key, slots in other["state"].items():
        for name, value in slots.items():
            got = own["state"][key][name]
            assert type(got) is type(value)
            if isinstance(value, torch.Tensor):
                assert got.dtype == value.dtype
                assert torch.equal(got, value)
            else:
                assert got == value
    assert own["param_groups"] == other["param_groups"]
    for group, like in zip(own["param_groups"], other["param_groups"], strict=True):
        assert [type(value) for value in group.values()] == [type(v) for v in like.values()]


@check
def optimizer_states(rank, size):
    arguments = {
        torch.optim.SGD: {"lr": 0.1 * (rank + 1), "momentum": 0.5, "nesterov": rank == 0},
        torch.optim.Adam: {"lr": 0.1, "betas": (0.1 + rank / 10, 0.9), "amsgrad": rank == 0},
        torch.optim.Rprop: {"lr": 0.1, "step_sizes": (1e-5 * (rank + 1), 100)},
        torch.optim.ASGD: {"lr": 0.2},
        torch.optim.Adafactor: {"lr": 0.2},
    }
    for wrap in (False, True):
        for kind, own in arguments.items():
            _, optimizer = trained(kind, rank, **own)
            # A deep copy has the types and the values of root.
            expected = hvd.broadcast_object(copy.deepcopy(optimizer), 0)
            model = nn.Linear(3, 2)
            fresh = kind(model.parameters(), **own)
            if rank == 0:
                fresh = optimizer
            if wrap:
                fresh = hvd.DistributedOptimizer(fresh)
            groups = fresh.param_groups[0]
            hvd.broadcast_optimizer_state(fresh, root_rank=0)
            assert fresh.param_groups[0] is groups
            assert_same_state(fresh, expected)


@check
def optimizer_states_of_odd_types(rank, size):
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.5 * (rank + 1)))
    group = optimizer.param_groups[0]
    group["nothing"] = None if rank == 0 else 3
    group["scalar"] = np.float32(rank)
    group["nested"] = {"a": [rank, (rank, torch.full((2,), float(rank)))]}
    held = group["lr"]
    slot = torch.full((2,), float(rank), dtype=torch.float64)
    optimizer.state[model.weight] = {"slot": slot, "step": rank, "none": None, "big": 2**60 + rank}
    hvd.broadcast_optimizer_state(optimizer, root_rank=0, model=model)
    assert group["lr"] is held
    assert held.item() == 0.5
    assert group["nothing"] is None
    assert type(group["scalar"]) is np.float32
    assert group["nested"]["a"][0] == 0
    assert group["nested"]["a"][1][1].tolist() == [0.0, 0.0]
    state = optimizer.state[model.weight]
    assert state["slot"] is slot
    assert slot.tolist() == [0.0, 0.0]
    assert (state["step"], state["none"], state["big"]) == (0, None, 2**60)
    with pytest.raises(ValueError, match="LBFGS"):
        hvd.broadcast_optimizer_state(torch.optim.LBFGS(model.parameters()), root_rank=0)
    with pytest.raises(ValueError, match="expected an optimizer"):
        hvd.broadcast_optimizer_state(model, root_rank=0)
    if size > 1:
        with pytest.raises(hvd.HorovodInternalError, match="weight|parameter"):
            hvd.broadcast_optimizer_state(torch.optim.SGD([nn.Parameter(torch.ones(rank + 1))]), 0)


@check
def a_fresh_optimizer_makes_no_step(rank, size):
    class Frozen(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Parameter(torch.tensor([1, 3]), requires_grad=False)
            self.b = nn.Parameter(torch.rand(4))

    model = Frozen()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    before = model.b.detach().clone()
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert torch.equal(model.b, before)
    assert not optimizer.state
    assert model.a.grad is None
    assert torch.equal(hvd.broadcast(model.b.grad, root_rank=0), torch.zeros(4))


# -- elastic


@check
def states_commit_restore_and_synchronise(rank, size):
    model = nn.Linear(2, 2)
    nn.init.constant_(model.weight, rank + 1.0)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1 * (rank + 1))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    state = TorchState(
        model, optimizer, schedule=schedule, batch=20 + rank, epoch=10 + rank, history=[rank]
    )
    state.sync()
    assert (state.batch, state.epoch, state.history) == (20, 10, [0])
    assert state.model is model
    assert (model.weight == 1.0).all()
    assert optimizer.param_groups[0]["lr"] == 0.1
    kept = copy.deepcopy(model.state_dict())
    for _ in range(2):
        # Twice: what is restored must not be what was saved itself.
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        schedule.step()
        state.batch, state.epoch = 21, 11
        state.history.append(1)
        state.restore()
        assert (state.batch, state.epoch, state.history) == (20, 10, [0])
        assert all(torch.equal(model.state_dict()[name], kept[name]) for name in kept)
        assert optimizer.param_groups[0]["lr"] == 0.1
        assert not optimizer.state_dict()["state"]
        assert schedule.last_epoch == 0
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    state.batch = 22
    state.commit()
    moved = copy.deepcopy(model.state_dict())
    step = copy.deepcopy(optimizer.state_dict()["state"][0]["exp_avg"])
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        state.restore()
        assert torch.equal(optimizer.state_dict()["state"][0]["exp_avg"], step)
        assert all(torch.equal(model.state_dict()[name], moved[name]) for name in moved)
    other = nn.Linear(2, 2)
    state.model = other
    state.restore()
    assert state.model is other
    state.batch = 30 + rank
    state.sync()
    assert state.batch == 30


@check
def handlers_can_be_registered(rank, size):
    class Counter:
        n = 0

    class CounterHandler(elastic_state.StateHandler):
        def save(self):
            self.saved = self.value.n

        def restore(self):
            self.value.n = self.saved

        def sync(self):
            self.value.n = hvd.broadcast_object(self.value.n)
            self.save()

    registry = elastic_state.get_handler_registry()
    elastic_state.set_handler_registry([(Counter, CounterHandler), *registry])
    try:
        counter = Counter()
        state = TorchState(counter=counter)
        counter.n = rank + 5
        state.sync()
        counter.n = 0
        state.restore()
        assert counter.n == 5
        assert state.model is None
    finally:
        elastic_state.set_handler_registry(registry)


@check
def samplers_share_out_what_is_left(rank, size):
    dataset = list(range(8 * size))
    sampler = ElasticSampler(dataset, shuffle=True)
    state = TorchState(sampler=sampler)
    state.sync()
    loader = torch.utils.data.DataLoader(dataset, batch_size=2, sampler=sampler)
    orders = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        seen = []
        for index, batch in enumerate(loader):
            sampler.record_batch(index, 2)
            seen += batch.tolist()
            assert sampler.processed_num == 2 * (index + 1) * size
        everyone = [one for part in hvd.allgather_object(seen) for one in part]
        assert sorted(everyone) == dataset
        orders.append(everyone)
    assert orders[0] != orders[1]
    sampler.set_epoch(2)
    first = list(sampler)[:4]
    sampler.record_batch(0, 2)
    sampler.record_batch(1, 2)
    state.commit()
    assert sampler.state_dict() == {"epoch": 2, "processed_num": 4 * size}
    sampler.record_batch(2, 2)
    state.restore()
    assert sampler.processed_num == 4 * size
    assert len(sampler) == 4
    rest = list(sampler)
    everyone = [one for part in hvd.allgather_object(first + rest) for one in part]
    assert sorted(everyone) == dataset
    sampler.set_epoch(3)
    assert len(sampler) == 8
    plain = ElasticSampler(list(range(size + 1)), shuffle=False)
    assert list(plain) == [rank, (rank + size) % (size + 1)]
    few = ElasticSampler([7], shuffle=False)
    assert list(few) == [0]
    few.record_batch(0, 1)
    few.reset()
    assert list(few) == []
    assert len(few) == 0


@check
def functions_run_on_states(rank, size):
    calls = []

    @run
    def train(state, more, word=""):
        calls.append((state.batch, more, word))
        if len(calls) == 1:
            state.batch = 8
            state.on_hosts_updated(1, 2)
            state.commit()
        if len(calls) == 2:
            state.batch = 9
            state.commit()
            state.batch = 10
            raise hvd.HorovodInternalError("a rank is gone")
        return "unreachable"

    state = TorchState(batch=rank + 5)
    resets = []
    state.register_reset_callbacks([lambda: resets.append(1), lambda: resets.append(2)])
    with pytest.raises(hvd.HorovodInternalError, match="a rank is gone") as caught:
        train(state, 3, word="w")
    assert calls == [(5, 3, "w"), (8, 3, "w")]
    assert resets == [1, 2]
    assert state.batch == 9
    if sys.version_info >= (3, 11):
        assert "not offered yet" in caught.value.__notes__[0]
    assert run(lambda state: state.batch)(state) == 9
    assert train.__name__ == "train"


@check
def horovods_module_names(rank, size):
    from ringplug import elastic
    from ringplug.torch.elastic.sampler import ElasticSampler as sampler
    from ringplug.torch.functions import broadcast_parameters

    assert elastic.ObjectState is hvd.elastic.ObjectState
    assert sampler is hvd.elastic.ElasticSampler
    assert broadcast_parameters is hvd.broadcast_parameters
    assert hvd.SyncBatchNorm is SyncBatchNorm


hvd.init(process_sets="dynamic")
run_checks(hvd.rank(), hvd.size())
hvd.shutdown()
