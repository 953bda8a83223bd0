"""Plain PyTorch loops: DistributedOptimizer and the broadcasts, against one process."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn

import ringplug.torch as ring
from ringplug.backend import runtime
from ringplug.backend.errors import MismatchError, UsageError
from tests.checks import check, run_checks

warnings.filterwarnings("ignore", message=".*lr_scheduler.*", category=DeprecationWarning)
STEPS, BATCH = 5, 12


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3)
    )


def data(step):
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randn(BATCH, 6, generator=generator), torch.randn(BATCH, 3, generator=generator)


def loss_of(model, x, y):
    return nn.functional.mse_loss(model(x), y)


def train(model, optimizer, rank=0, size=1, clip=None, scheduler=None):
    for step in range(STEPS):
        x, y = data(step)
        optimizer.zero_grad()
        loss_of(model, x[rank::size], y[rank::size]).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        if scheduler:
            scheduler.step()


def same(model, reference, atol=1e-6):
    for own, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(own.detach(), other.detach(), atol=atol, rtol=1e-5)


def equal_on_all_ranks(model):
    flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    everyone = ring.allgather_object(flat)
    assert all(torch.equal(one, flat) for one in everyone)


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, weight_decay=1e-3),
    "adam": lambda p: torch.optim.Adam(p, 0.01),
    "adamw amsgrad": lambda p: torch.optim.AdamW(p, 0.01, amsgrad=True),
}


@check
def equals_one_process(rank, size):
    for make in OPTIMIZERS.values():
        for clip in (None, 0.1):
            reference = network()
            train(reference, make(reference.parameters()), clip=clip)
            model = network(seed=rank)
            ring.broadcast_parameters(model.state_dict(), root_rank=0)
            optimizer = ring.DistributedOptimizer(
                make(model.parameters()), model.named_parameters()
            )
            train(model, optimizer, rank, size, clip=clip)
            same(model, reference)
            equal_on_all_ranks(model)


@check
def schedulers_made_before_or_after(rank, size):
    for before in (True, False):
        reference, model = network(), network()
        plain = torch.optim.SGD(reference.parameters(), 0.1)
        train(reference, plain, scheduler=torch.optim.lr_scheduler.StepLR(plain, 2, 0.5))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            if before:
                scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
            assert ring.DistributedOptimizer(optimizer, model.named_parameters()) is optimizer
            if not before:
                scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
            train(model, optimizer, rank, size, scheduler=scheduler)
        assert optimizer.param_groups[0]["lr"] == plain.param_groups[0]["lr"]
        same(model, reference)


@check
def the_old_step_of_a_scheduler_still_reduces(rank, size):
    # Only rank 0 computes a gradient; the others' part of the round is in step().
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    ring.DistributedOptimizer(optimizer)
    if rank == 0:
        loss_of(model, *data(0)).backward()
    optimizer.step()
    equal_on_all_ranks(model)


@check
def accumulates_over_passes(rank, size):
    reference, model = network(), network()
    plain = torch.optim.SGD(reference.parameters(), 0.05)
    optimizer = ring.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.05), backward_passes_per_step=2
    )
    calls = runtime.current().plan([], name="probe").lane.transport.traffic
    for step in range(0, 4, 2):
        plain.zero_grad()
        optimizer.zero_grad()
        entered = calls.calls
        for part in (step, step + 1):
            x, y = data(part)
            loss_of(reference, x, y).backward()
            before = model[0].weight.grad
            loss_of(model, x[rank::size], y[rank::size]).backward()
            if part == step:
                assert before is None
                assert calls.calls == entered, "the first pass must not communicate"
        plain.step()
        optimizer.step()
    same(model, reference)
    # An unfinished window is reduced by step().
    x, y = data(9)
    plain.zero_grad()
    optimizer.zero_grad()
    loss_of(reference, x, y).backward()
    loss_of(model, x[rank::size], y[rank::size]).backward()
    plain.step()
    optimizer.step()
    same(model, reference)
    optimizer.set_backward_passes_per_step(1)
    plain.zero_grad()
    optimizer.zero_grad()
    loss_of(reference, x, y).backward()
    loss_of(model, x[rank::size], y[rank::size]).backward()
    torch.testing.assert_close(model[0].weight.grad, reference[0].weight.grad)


@check
def several_backward_passes_in_one_step(rank, size):
    reference, model = network(), network()
    plain = torch.optim.SGD(reference.parameters(), 0.05)
    optimizer = ring.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.05))
    for part in (0, 1):
        x, y = data(part)
        loss_of(reference, x, y).backward()
        loss_of(model, x[rank::size], y[rank::size]).backward()
    plain.step()
    optimizer.step()
    same(model, reference)
    summed = network()
    optimizer = ring.DistributedOptimizer(torch.optim.SGD(summed.parameters(), 0.05), op=ring.Sum)
    x, y = data(0)
    loss_of(summed, x[rank::size], y[rank::size]).backward()
    reference.zero_grad()
    loss_of(network(), x, y).backward()
    fresh = network()
    loss_of(fresh, x, y).backward()
    torch.testing.assert_close(summed[0].weight.grad, fresh[0].weight.grad * size)
    with pytest.raises(UsageError, match="reduced already in this step"):
        loss_of(summed, x, y).backward()


@check
def parameters_unused_on_some_or_all_ranks(rank, size):
    model = nn.ModuleDict({name: nn.Linear(2, 1) for name in ("left", "right", "never")})
    ring.broadcast_parameters(model.state_dict())
    never = copy.deepcopy(model["never"].state_dict())
    optimizer = ring.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=0.1),
        model.named_parameters(),
    )
    for _ in range(3):
        optimizer.zero_grad()
        model["left" if rank == 0 else "right"](torch.ones(1, 2)).sum().backward()
        torch.testing.assert_close(model["left"].weight.grad, torch.full((1, 2), 1 / size))
        assert model["never"].weight.grad is None
        optimizer.step()
    equal_on_all_ranks(model)
    # Not moved by weight decay either.
    assert torch.equal(model["never"].weight, never["weight"])
    optimizer.zero_grad()
    optimizer.step()
    equal_on_all_ranks(model)


@check
def synchronize_and_skip(rank, size):
    reference, model = network(), network()
    plain = torch.optim.SGD(reference.parameters(), 0.05)
    optimizer = ring.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.05))
    x, y = data(0)
    loss_of(reference, x, y).backward()
    loss_of(model, x[rank::size], y[rank::size]).backward()
    optimizer.synchronize()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
    with optimizer.skip_synchronize():
        optimizer.step()
    plain.step()
    same(model, reference)


@check
def gradient_scalers_see_averages(rank, size):
    model = network()
    optimizer = ring.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.05))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step in range(4):
        x, y = data(step)
        optimizer.zero_grad()
        loss = loss_of(model, x[rank::size], y[rank::size])
        if step == 2 and rank == 0:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    # The overflow of one rank made all skip that step, and halve the scale.
    assert scaler.get_scale() == 4.0
    equal_on_all_ranks(model)


@check
def closures(rank, size):
    reference, model = network(), network()
    x, y = data(0)

    def closure_for(network, optimizer, x, y):
        def closure():
            optimizer.zero_grad()
            loss = loss_of(network, x, y)
            loss.backward()
            return loss

        return closure

    plain = torch.optim.LBFGS(reference.parameters(), lr=0.1, max_iter=5, max_eval=5)
    optimizer = ring.DistributedOptimizer(
        torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=5, max_eval=5)
    )
    plain.step(closure_for(reference, plain, x, y))
    # The stopping rules look at the loss, which is each rank's own; the count is fixed here.
    optimizer.step(closure_for(model, optimizer, x[rank::size], y[rank::size]))
    same(model, reference, atol=1e-5)


@check
def compressed(rank, size):
    for compression, atol in ((ring.Compression.fp16, 1e-4), (ring.Compression.bf16, 2e-3)):
        reference, model = network(), network()
        train(reference, torch.optim.SGD(reference.parameters(), 0.05))
        optimizer = ring.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), 0.05), compression=compression
        )
        train(model, optimizer, rank, size)
        same(model, reference, atol=atol)
        equal_on_all_ranks(model)


@check
def layouts_and_dtypes(rank, size):
    torch.manual_seed(0)
    conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    embedding = nn.Embedding(5, 2, sparse=True)
    half = nn.Linear(3, 2).bfloat16()
    parts = nn.ModuleList([conv, embedding, half])
    optimizer = ring.DistributedOptimizer(
        torch.optim.SGD(parts.parameters(), 0.1), parts.named_parameters(), sparse_as_dense=True
    )
    images = torch.randn(2 * size, 3, 5, 5).contiguous(memory_format=torch.channels_last)
    reference = copy.deepcopy(conv)
    reference(images).pow(2).mean().backward()
    loss = conv(images[rank::size]).pow(2).mean() + embedding(torch.tensor([rank])).sum()
    (loss + half(torch.ones(1, 3, dtype=torch.bfloat16)).float().sum()).backward()
    torch.testing.assert_close(conv.weight.grad, reference.weight.grad)
    rows = embedding.weight.grad.to_dense().sum(1)
    torch.testing.assert_close(rows[:size], torch.full((size,), 2 / size))
    optimizer.step()
    equal_on_all_ranks(parts.float())


@check
def state_dicts_and_pickles_are_plain(rank, size):
    model = network()
    plain = torch.optim.Adam(model.parameters(), 0.01)
    keys = set(plain.state_dict()), set(plain.state_dict()["param_groups"][0])
    optimizer = ring.DistributedOptimizer(plain, model.named_parameters())
    train(model, optimizer, rank, size)
    state = optimizer.state_dict()
    assert (set(state), set(state["param_groups"][0])) == keys
    assert isinstance(optimizer, torch.optim.Adam)
    loaded = pickle.loads(pickle.dumps(optimizer))
    assert type(loaded) is torch.optim.Adam
    assert b"ringplug" not in pickle.dumps(optimizer)
    optimizer.load_state_dict(copy.deepcopy(state))
    train(model, optimizer, rank, size)
    equal_on_all_ranks(model)


@check
def broadcasts_of_state(rank, size):
    model = network(seed=rank)
    optimizer = torch.optim.Adam(model.parameters(), 0.01 * (rank + 1))
    if rank == 1:
        loss_of(model, *data(rank)).backward()
        optimizer.step()
    ring.broadcast_parameters(model.named_parameters(), root_rank=1)
    ring.broadcast_optimizer_state(optimizer, root_rank=1)
    equal_on_all_ranks(model)
    assert optimizer.param_groups[0]["lr"] == 0.02
    steps = ring.allgather_object(optimizer.state_dict()["state"][0]["exp_avg"])
    assert all(torch.equal(one, steps[0]) for one in steps)
    with_buffers = nn.BatchNorm1d(3)
    with_buffers.running_mean.fill_(rank)
    ring.broadcast_parameters(with_buffers.state_dict(), root_rank=0)
    assert with_buffers.running_mean.tolist() == [0.0] * 3
    with pytest.raises(MismatchError, match=r"weight: rank 0 has float32\[2, 3\], rank 1 has"):
        ring.broadcast_parameters(nn.Linear(3, 2 + rank).state_dict())


@check
def ranks_out_of_step(rank, size):
    model = network()
    optimizer = ring.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.05))
    loss_of(model, *data(0)).backward()
    if rank == 0:
        with pytest.raises(MismatchError, match="different number of backward passes"):
            loss_of(model, *data(0)).backward()
    else:
        optimizer.step()
        optimizer._ringplug_reducer._exchange._round += 1
        with pytest.raises(MismatchError, match="different number of backward passes"):
            loss_of(model, *data(0)).backward()


@check
def refusals(rank, size):
    model = network()
    make = lambda: torch.optim.SGD(model.parameters(), 0.1)
    named = list(model.named_parameters())
    for text, call in (
        ("above 0", lambda: ring.DistributedOptimizer(make(), backward_passes_per_step=0)),
        ("tuples", lambda: ring.DistributedOptimizer(make(), list(model.parameters()))),
        ("more than once", lambda: ring.DistributedOptimizer(make(), [*named, named[0]])),
        ("lacks 1 parameters", lambda: ring.DistributedOptimizer(make(), named[1:])),
        ("Average, Sum, Min", lambda: ring.DistributedOptimizer(make(), op=6)),
        ("expected one of", lambda: ring.DistributedOptimizer(make(), compression="zip")),
    ):
        with pytest.raises(ValueError, match=text):
            call()
    optimizer = ring.DistributedOptimizer(make())
    with pytest.raises(UsageError, match="already"):
        ring.DistributedOptimizer(optimizer)


@check
def parameter_groups_added_later(rank, size):
    first, second = nn.Linear(2, 1), nn.Linear(2, 1)
    both = nn.ModuleList([first, second])
    ring.broadcast_parameters(both.state_dict())
    optimizer = ring.DistributedOptimizer(torch.optim.SGD(first.parameters(), 0.1))
    optimizer.add_param_group({"params": list(second.parameters())})
    x = torch.full((1, 2), float(rank))
    (first(x) + second(x)).sum().backward()
    assert second.weight.grad.tolist() == [[(size - 1) / 2] * 2]
    optimizer.step()
    equal_on_all_ranks(both)


class Interrupt(torch.autograd.Function):
    """Raises in backward, as a lack of memory does."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise MemoryError


@check
def an_interrupted_backward_is_forgotten(rank, size):
    model = network()
    ring.broadcast_parameters(model.state_dict())
    optimizer = ring.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1))
    reference = network()
    x, _ = data(0)
    layers = list(model)
    hidden = Interrupt.apply(nn.Sequential(*layers[:-1])(x))
    with pytest.raises(MemoryError):
        (layers[-1](hidden).sum() * 1000).backward()
    optimizer.zero_grad()
    train(model, optimizer, rank, size)
    train(reference, torch.optim.SGD(reference.parameters(), 0.1))
    same(model, reference)
    equal_on_all_ranks(model)


ring.init()
run_checks(ring.rank(), ring.size())
ring.shutdown()
