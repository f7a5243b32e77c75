"""GSAM with sharded weights (FSDP2), on scikit-learn's digits.

    torchrun --nproc-per-node 2 examples/fsdp2.py --checkpoint /tmp/digits_fsdp2

All processes share one perturbation. A stopped run resumes with any number of processes.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

from surrogap import GSAM
from surrogap.rho import ProportionalToLR

EPOCHS, BATCH_SIZE, LR, RHO = 8, 64, 1e-3, 0.1  # BATCH_SIZE is global
parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument("--checkpoint", type=Path, help="a folder to save to and resume from")
args = parser.parse_args()
if not dist.is_torchelastic_launched():
    parser.error("Start it with torchrun --nproc-per-node 2 examples/fsdp2.py.")
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if device.type == "cuda":
    torch.cuda.set_device(dist.get_node_local_rank())
dist.init_process_group()  # NCCL for CUDA, gloo for the CPU
rank, world_size = dist.get_rank(), dist.get_world_size()

x, y = (torch.from_numpy(array).to(device) for array in load_digits(return_X_y=True))
(x, x_test), (y, y_test) = (x.float() / 16).split([1280, 517]), y.split([1280, 517])

torch.manual_seed(0)  # the same weights in all processes
blocks = [nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.LayerNorm(256)) for _ in range(2)]
model = nn.Sequential(nn.Linear(64, 256), *blocks, nn.Linear(256, 10)).to(device)
for module in (*blocks, model):
    fully_shard(module)
optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.05)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * len(x) // BATCH_SIZE)
rho = ProportionalToLR(optimizer, rho_max=RHO, rho_min=RHO / 5, lr_max=LR, lr_min=0.0)
objective = GSAM(model, rho=rho, alpha=0.4)

checkpoints = sorted(args.checkpoint.glob("*/.metadata")) if args.checkpoint else []
if checkpoints:
    weights, moments = get_state_dict(model, optimizer)  # tensors for dcp.load to fill
    state = {"model": weights, "optimizer": moments, "scheduler": scheduler}
    dcp.load(state, checkpoint_id=checkpoints[-1].parent)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
for epoch in range(scheduler.last_epoch * BATCH_SIZE // len(x), EPOCHS):
    torch.manual_seed(epoch)  # the same batches in all processes
    seen = torch.zeros(2, device=device)
    for batch in torch.randperm(len(x)).split(BATCH_SIZE):
        mine = batch[rank::world_size]
        objective.loss(lambda: cross_entropy(model(x[mine]), y[mine])).backward()  # noqa: B023
        report = objective.report
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        seen += torch.stack([report.loss, report.gap]) * BATCH_SIZE / len(x) / world_size
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
dist.destroy_process_group()
