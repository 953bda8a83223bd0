"""A PyTorch script as users of Horovod write them; it knows nothing of ringplug."""

import argparse

import horovod.torch as hvd
import torch
import torch.nn as nn
import torch.nn.functional as F
from horovod.torch.mpi_ops import Average
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--fp16-allreduce", action="store_true")
parser.add_argument("--use-adasum", action="store_true")
args = parser.parse_args()

hvd.init()
torch.manual_seed(42 + hvd.rank())

features = torch.linspace(-1, 1, 256).reshape(64, 4)
labels = (features.sum(1) > 0).long()
dataset = TensorDataset(features, labels)
sampler = DistributedSampler(dataset, num_replicas=hvd.size(), rank=hvd.rank())
loader = DataLoader(dataset, batch_size=8, sampler=sampler)

model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
lr_scaler = hvd.size() if not args.use_adasum else 1
if hvd.nccl_built():
    lr_scaler = hvd.local_size()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05 * lr_scaler, momentum=0.5)

hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none
optimizer = hvd.DistributedOptimizer(
    optimizer,
    named_parameters=model.named_parameters(),
    compression=compression,
    op=hvd.Adasum if args.use_adasum else hvd.Average,
    gradient_predivide_factor=1.0,
)


def metric_average(val, name):
    tensor = torch.tensor(val)
    avg_tensor = hvd.allreduce(tensor, name=name)
    return avg_tensor.item()


for epoch in range(args.epochs):
    model.train()
    sampler.set_epoch(epoch)
    for data, target in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(data), target)
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        total = F.cross_entropy(model(features), labels)
    print(f"loss {metric_average(total.item(), 'avg_loss'):.6f}")

handle = hvd.allreduce_async(torch.ones(3), op=Average, name="last")
assert hvd.synchronize(handle).tolist() == [1.0] * 3
assert hvd.broadcast_object({"epoch": hvd.rank()}, root_rank=1) == {"epoch": 1}

state = hvd.elastic.TorchState(model=model, optimizer=optimizer, batch=0, epoch=0)


@hvd.elastic.run
def resume(state):
    state.epoch += 1
    state.commit()
    return state.epoch


assert resume(state) == 1
print("done")
