"""What PyTorch builds on process groups, on the backend ring; against one process."""

from __future__ import annotations

import copy
import tempfile
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel as DDP

import ringplug.torch  # noqa: F401
from ringplug.backend.errors import RingplugError, TransportError
from ringplug.torch.comm_hooks import compress_hook
from tests.checks import check, run_checks

warnings.filterwarnings("ignore")
STEPS, BATCH = 4, 12


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3)
    )


def data(step):
    generator = torch.Generator().manual_seed(100 + step)
    return (
        torch.randn(BATCH, 6, generator=generator),
        torch.randn(BATCH, 3, generator=generator),
    )


def train(model, optimizer, rank=0, size=1, steps=STEPS, forward=None):
    for step in range(steps):
        x, y = data(step)
        x, y = x[rank::size], y[rank::size]
        optimizer.zero_grad()
        loss = nn.functional.mse_loss((model if forward is None else forward)(x), y)
        loss.backward()
        optimizer.step()


def sgd(model):
    return torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)


def alone(make_optimizer=sgd, steps=STEPS):
    model = network()
    train(model, make_optimizer(model), steps=steps)
    return model


def same(model, reference, atol=1e-6):
    for own, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(own.detach(), other.detach(), atol=atol, rtol=1e-5)


def equal_on_all_ranks(model):
    flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    everyone = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, flat)
    assert all(torch.equal(one, flat) for one in everyone)


@check
def ddp_equals_one_process(rank, size):
    for options in (
        {},
        {"static_graph": True},
        {"gradient_as_bucket_view": True},
        {"bucket_cap_mb": 0.0005},
        {"find_unused_parameters": True},
    ):
        # Weights differ by rank on purpose: DDP copies rank 0's.
        model = DDP(network(seed=rank), **options)
        train(model, sgd(model), rank, size)
        same(model.module, alone())
        equal_on_all_ranks(model)


@check
def reduced_on_the_calling_thread(rank, size):
    group = dist.group.WORLD
    group.overlap = False
    try:
        model = DDP(network(), bucket_cap_mb=0.0005)
        train(model, sgd(model), rank, size)
        same(model.module, alone())
    finally:
        group.overlap = True


@check
def parameters_unused_on_some_ranks(rank, size):
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.left, self.right = nn.Linear(2, 1), nn.Linear(2, 1)

        def forward(self, x):
            return self.left(x) if rank == 0 else self.right(x)

    model = DDP(Branches(), find_unused_parameters=True)
    for _ in range(3):
        model.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
    assert model.module.left.weight.grad.tolist() == [[1 / size] * 2]
    torch.testing.assert_close(
        model.module.right.weight.grad, torch.full((1, 2), (size - 1) / size)
    )


@check
def accumulation_without_synchronisation(rank, size):
    model, reference = DDP(network()), network()
    for step in range(2):
        x, y = data(step)
        nn.functional.mse_loss(reference(x), y).backward()
        x, y = x[rank::size], y[rank::size]
        if step == 0:
            with model.no_sync():
                nn.functional.mse_loss(model(x), y).backward()
        else:
            nn.functional.mse_loss(model(x), y).backward()
    for own, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad)


@check
def communication_hooks(rank, size):
    for hook, atol in (
        (default_hooks.allreduce_hook, 1e-6),
        (default_hooks.fp16_compress_hook, 2e-3),
    ):
        model = DDP(network())
        model.register_comm_hook(None, hook)
        train(model, sgd(model), rank, size)
        same(model.module, alone(), atol=atol)
        equal_on_all_ranks(model)
    model = DDP(network())
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    train(model, sgd(model), rank, size, steps=6)
    equal_on_all_ranks(model)


@check
def own_compression(rank, size):
    for name, atol in (("none", 1e-6), ("fp16", 1e-4), ("bf16", 1e-3)):
        model = DDP(network())
        model.register_comm_hook(dist.group.WORLD, compress_hook(name))
        sent = dist.group.WORLD.lane.transport.traffic.sent
        train(model, sgd(model), rank, size)
        moved = dist.group.WORLD.lane.transport.traffic.sent - sent
        same(model.module, alone(), atol=atol)
        equal_on_all_ranks(model)
        if name == "none":
            whole = moved
        # Half of the gradients' bytes.
        assert name == "none" or moved * 2 == pytest.approx(whole, rel=0.03), (moved, whole)
    # Gradients near the largest float16 on every rank: only their mean fits.
    model = DDP(nn.Linear(1, 1, bias=False))
    model.register_comm_hook(None, compress_hook("fp16"))
    model(torch.full((1, 1), 60000.0)).sum().backward()
    assert model.module.weight.grad.item() == 60000.0


@check
def sparse_gradients(rank, size):
    class Bag(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.bag, self.out = nn.EmbeddingBag(10, 4, sparse=True), nn.Linear(4, 1)

        def forward(self, x):
            return self.out(self.bag(x))

    for hook in (None, "bf16"):
        torch.manual_seed(0)
        reference, model = Bag(), DDP(Bag())
        if hook:
            model.register_comm_hook(None, compress_hook(hook))
        optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (reference, model)]
        x = torch.arange(2 * size * 3).reshape(2 * size, 3) % 10
        for _ in range(3):
            for optimizer in optimizers:
                optimizer.zero_grad()
            reference(x).pow(2).mean().backward()
            model(x[rank::size]).pow(2).mean().backward()
            assert model.module.bag.weight.grad.is_sparse
            for optimizer in optimizers:
                optimizer.step()
        same(model.module, reference, atol=1e-6 if hook is None else 1e-2)


@check
def half_precision_models(rank, size):
    model = DDP(network().bfloat16())
    for step in range(2):
        x, y = data(step)
        nn.functional.mse_loss(model(x[rank::size].bfloat16()), y[rank::size].bfloat16()).backward()
    assert all(p.grad.dtype is torch.bfloat16 for p in model.parameters())
    equal_on_all_ranks(model)


@check
def uneven_inputs_with_join(rank, size):
    model = DDP(network())
    optimizer = sgd(model)
    with Join([model]):
        for step in range(3 + rank):
            optimizer.zero_grad()
            model(data(step)[0]).pow(2).mean().backward()
            optimizer.step()
    equal_on_all_ranks(model)


@check
def zero_redundancy_optimizer(rank, size):
    model = DDP(network())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
    train(model, optimizer, rank, size)
    same(model.module, alone(lambda m: torch.optim.Adam(m.parameters(), 0.01)), atol=1e-5)
    optimizer.consolidate_state_dict(to=0)


@check
def fully_sharded(rank, size):
    model = network()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    train(model, sgd(model), rank, size)
    for own, other in zip(model.parameters(), alone().parameters(), strict=True):
        torch.testing.assert_close(own.full_tensor(), other.detach(), atol=1e-6, rtol=1e-5)


@check
def functional_collectives(rank, size):
    tensor = torch.ones(4) * (rank + 1)
    total = functional.all_reduce(tensor, "sum", dist.group.WORLD)
    assert total.tolist() == [sum(range(1, size + 1))] * 4
    gathered = functional.all_gather_tensor(tensor, 0, dist.group.WORLD)
    assert gathered[::4].tolist() == [r + 1.0 for r in range(size)]
    part = functional.reduce_scatter_tensor(torch.ones(size * 2), "sum", 0, dist.group.WORLD)
    assert part.tolist() == [size] * 2


@check
def meshes_checkpoints_and_objects(rank, size):
    mesh = init_device_mesh("cpu", (1, size), mesh_dim_names=("outer", "inner"))["inner"]
    whole = torch.arange(4.0 * size).reshape(2 * size, 2)
    sharded = distribute_tensor(whole, mesh, [Shard(0)])
    assert torch.equal((sharded + 1).full_tensor(), whole + 1)
    assert torch.equal(sharded.redistribute(mesh, [Replicate()]).to_local(), whole)
    box = [tempfile.mkdtemp(prefix="ringplug-dcp-") if rank == 0 else None]
    dist.broadcast_object_list(box, 0)
    dcp.save({"sharded": sharded}, checkpoint_id=box[0])
    loaded = {"sharded": distribute_tensor(torch.zeros_like(whole), mesh, [Shard(0)])}
    dcp.load(loaded, checkpoint_id=box[0])
    assert torch.equal(loaded["sharded"].full_tensor(), whole)
    scattered = [None]
    parts = [f"part {other}" for other in range(size)] if rank == 0 else None
    dist.scatter_object_list(scattered, parts, src=0)
    assert scattered == [f"part {rank}"]
    gathered = [None] * size if rank == 0 else None
    dist.gather_object(rank, gathered, dst=0)
    assert rank or gathered == list(range(size))
    if rank == 0:
        dist.send_object_list(["a message"], dst=1)
    elif rank == 1:
        received = [None]
        dist.recv_object_list(received, src=0)
        assert received == ["a message"]


@check
def compiled(rank, size):
    model = DDP(network())
    train(model, sgd(model), rank, size, forward=torch.compile(model, backend="eager"))
    same(model.module, alone())


class _Broken:
    """A transport whose next calls fail."""

    def __init__(self, lane):
        self.lane, self.plain = lane, lane.transport.allreduce

    def __enter__(self):
        self.lane.transport.allreduce = self.fail

    def fail(self, *_):
        raise TransportError("the ring link is down")

    def __exit__(self, *_):
        self.lane.transport.allreduce = self.plain
        self.lane._broken = None


@check
def failures_reach_the_caller(rank, size):
    lane = dist.group.WORLD.lane
    model = DDP(network())
    with _Broken(lane):
        with pytest.raises(RingplugError, match="the ring link is down"):
            dist.all_reduce(torch.ones(1))
        work = dist.all_reduce(torch.ones(1), async_op=True)
        with pytest.raises(RingplugError, match="the ring link is down"):
            work.wait()
        with pytest.raises(RuntimeError, match="the ring link is down"):
            model(torch.ones(1, 6)).sum().backward()
    dist.barrier()
    # The process lives, and the next step is right.
    model = DDP(copy.deepcopy(model.module))
    model.zero_grad()
    model(torch.full((1, 6), float(rank))).sum().backward()
    equal_on_all_ranks(model)


dist.init_process_group("ring")
run_checks(dist.get_rank(), dist.get_world_size())
dist.destroy_process_group()
