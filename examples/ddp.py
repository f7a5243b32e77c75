"""GSAM in several processes with DistributedDataParallel, on scikit-learn's digits.

    torchrun --nproc-per-node 2 examples/ddp.py --checkpoint /tmp/digits_ddp

Each process perturbs the weights along its own gradient. The same command resumes a stopped run.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from surrogap import GSAM
from surrogap.rho import ProportionalToLR

EPOCHS, BATCH_SIZE, LR, RHO = 8, 64, 0.1, 0.1  # BATCH_SIZE is global
parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument("--checkpoint", type=Path, help="a folder to save to and resume from")
args = parser.parse_args()
if not dist.is_torchelastic_launched():
    parser.error("Start it with torchrun --nproc-per-node 2 examples/ddp.py.")
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if device.type == "cuda":
    torch.cuda.set_device(dist.get_node_local_rank())
dist.init_process_group()  # NCCL for CUDA, gloo for the CPU
rank, world_size = dist.get_rank(), dist.get_world_size()

x, y = (torch.from_numpy(array).to(device) for array in load_digits(return_X_y=True))
x = x.float().reshape(-1, 1, 8, 8) / 16
train_data, (x_test, y_test) = TensorDataset(x[:1280], y[:1280]), (x[1280:], y[1280:])
sampler = DistributedSampler(train_data)
loader = DataLoader(train_data, BATCH_SIZE // world_size, sampler=sampler)

layers = [nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)]
model = DistributedDataParallel(nn.Sequential(*layers, nn.Flatten(), nn.Linear(512, 10)).to(device))
optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9, weight_decay=1e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * len(loader))
rho = ProportionalToLR(optimizer, rho_max=RHO, rho_min=RHO / 5, lr_max=LR, lr_min=0.0)
objective = GSAM(model, rho=rho, alpha=0.4)

checkpoints = sorted(args.checkpoint.glob("*/.metadata")) if args.checkpoint else []
if checkpoints:
    weights, moments = get_state_dict(model, optimizer)  # tensors for dcp.load to fill
    state = {"model": weights, "optimizer": moments, "scheduler": scheduler}
    dcp.load(state, checkpoint_id=checkpoints[-1].parent)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
for epoch in range(scheduler.last_epoch // len(loader), EPOCHS):
    sampler.set_epoch(epoch)
    seen = torch.zeros(2, device=device)
    for x, y in loader:
        objective.loss(lambda: nn.functional.cross_entropy(model(x), y)).backward()  # noqa: B023
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        report = objective.report
        seen += torch.stack([report.loss, report.gap]) / len(loader) / world_size
    dist.all_reduce(seen)
    if rank == 0:
        print(f"epoch {epoch + 1}: loss {seen[0]:.4f}, gap {seen[1]:.4f}")
    if args.checkpoint:
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": moments, "scheduler": scheduler}
        dcp.save(state, checkpoint_id=args.checkpoint / f"epoch_{epoch + 1:03}")

with torch.no_grad():
    num_right = (model.eval()(x_test[rank::world_size]).argmax(1) == y_test[rank::world_size]).sum()
dist.all_reduce(num_right)
if rank == 0:
    print(f"test accuracy {num_right / len(y_test):.4f}")
objective = model = None  # they hold the process group, and gloo must end before Python exits
dist.destroy_process_group()
