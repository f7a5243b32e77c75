"""One of two processes that train with each framework: started by `test_ddp.py`.

torchrun --nproc-per-node 2 -m tests.integrations.ranks FOLDER
"""

import sys
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from accelerate import Accelerator
from lightning.fabric import Fabric
from lightning.pytorch.strategies import ModelParallelStrategy
from timm.task import ClassificationTask
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler

from surrogap import GSAM
from surrogap.integrations.lightning import SharpnessAware
from surrogap.integrations.timm import SharpnessAwareTasks
from tests.integrations import test_accelerate, test_huggingface
from tests.integrations.test_accelerate import data, sgd

RHO, ALPHA = 0.05, 0.4


def still_model() -> nn.Module:
    """A language model without dropout."""
    return test_huggingface.language_model(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)


def still_network() -> nn.Module:
    """A network without dropout and statistics."""
    return nn.Sequential(*(test_accelerate.network()[i] for i in (0, 2, 4)))


def gsam(model: nn.Module, optimizer: torch.optim.Optimizer) -> GSAM:
    return GSAM(model, rho=RHO, alpha=ALPHA)


def huggingface(folder: Path, perturb_each: str) -> nn.Module:
    model = still_model()
    test_huggingface.train(
        folder,
        model,
        test_huggingface.texts()[:8],
        options={"objective": gsam, "perturb_each": perturb_each},
    )
    return model


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = still_network()

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return sgd(self)


class ShardedModule(Module):
    def configure_model(self) -> None:
        assert self.device_mesh is not None
        fully_shard(self.net, mesh=self.device_mesh["data_parallel"])


def lightning(folder: Path, module: Module, strategy: Any) -> dict[str, torch.Tensor]:
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_epochs=1,
        accumulate_grad_batches=2,
        gradient_clip_val=0.3,
        callbacks=[SharpnessAware(gsam)],
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        logger=False,
        use_distributed_sampler=False,  # Lightning's shuffles
        default_root_dir=folder,
    )
    sampler = DistributedSampler(data(), shuffle=False)
    trainer.fit(module, DataLoader(data(), 2, sampler=sampler))
    return get_model_state_dict(module.net, options=StateDictOptions(full_state_dict=True))


def accelerate() -> nn.Module:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = still_network()
    wrapped, optimizer, loader = accelerator.prepare(model, sgd(model), DataLoader(data(), 2))
    objective = gsam(wrapped, optimizer)
    for x, y in loader:
        with accelerator.accumulate(wrapped):
            loss = objective.loss(lambda x=x, y=y: cross_entropy(wrapped(x), y))
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(wrapped.parameters(), 0.3)
            optimizer.step()
            optimizer.zero_grad()
    return model


def fabric() -> nn.Module:
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    model = still_network()
    wrapped, optimizer = fabric.setup(model, sgd(model))
    objective = gsam(wrapped, optimizer)
    batches = list(DataLoader(data(), 2))[dist.get_rank() :: 2]
    for index, (x, y) in enumerate(batches):
        is_last = index % 2 == 1 or index == len(batches) - 1
        closure = lambda x=x, y=y: cross_entropy(wrapped(x), y) / 2  # noqa: E731
        objective.backward(closure, backward=fabric.backward, sync=is_last)
        if is_last:
            fabric.clip_gradients(wrapped, optimizer, max_norm=0.3)
            optimizer.step()
            optimizer.zero_grad()
    return model


def timm() -> nn.Module:
    """The loop of timm's script, which itself has no DDP on CPUs."""
    model = still_network()
    optimizer = sgd(model)
    task = ClassificationTask(model, nn.CrossEntropyLoss(), verbose=False).prepare_distributed()
    batches = list(DataLoader(data(), 2))[dist.get_rank() :: 2]
    with SharpnessAwareTasks("gsam", rho=RHO, alpha=ALPHA).installed():
        for index, (x, y) in enumerate(batches):
            is_last = index % 2 == 1 or index == len(batches) - 1
            with nullcontext() if is_last else task.no_sync():
                loss = task(x, y)["loss"]
                loss /= 2
                loss.backward()
            if is_last:
                nn.utils.clip_grad_norm_(model.parameters(), 0.3)
                optimizer.step()
                optimizer.zero_grad()
    return model


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    trained = {
        "huggingface step": huggingface(folder, "step"),
        "huggingface micro_batch": huggingface(folder, "micro_batch"),
        "accelerate": accelerate(),
        "timm": timm(),
        "fabric": fabric(),
    }
    states = {name: model.state_dict() for name, model in trained.items()}
    states["lightning"] = lightning(folder, Module(), "ddp")
    sharding = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    states["lightning fsdp2"] = lightning(folder, ShardedModule(), sharding)
    torch.save(states, folder / f"{dist.get_rank()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(Path(sys.argv[1]))
