"""Accuracy of memory="low": its direction against the exact one during training.

Trains a model on the embedded images with GSAM and memory="exact". Every few steps it compares
the directions of both modes at the same weights on the same batch, and computes the exact direction
again: its difference from the first is noise. Then it trains with each mode from the same seeds,
and scores the models on the test images. cuDNN runs in deterministic mode, since the noise would
otherwise hide the error.

    python benchmarks/low_memory.py --json results/low_memory.json
"""

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from provenance import provenance, write
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn
from torch.optim import SGD
from torch.optim.lr_scheduler import CosineAnnealingLR

from surrogap import GSAM
from surrogap.core.arithmetic import Memory
from surrogap.data import load, loader
from surrogap.evaluation import evaluate
from surrogap.models import create

SETTINGS: dict[str, Any] = {"rho": 0.05, "alpha": 0.4}
MODES: tuple[Memory, ...] = ("exact", "low")


class Training:
    """One run, whose steps the caller takes."""

    def __init__(self, args: argparse.Namespace, memory: Memory, seed: int) -> None:
        torch.manual_seed(seed)
        self.splits = load("embedded")
        self.device = torch.device(args.device)
        self.model = create(args.model, num_classes=10, image_size=28, in_channels=1).to(
            self.device
        )
        self.objective = GSAM(self.model, memory=memory, **SETTINGS)
        self.batches = loader(
            self.splits, batch_size=128, augmentation="light", seed=seed, device=self.device
        )
        self.optimizer = SGD(self.model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
        self.schedule = CosineAnnealingLR(self.optimizer, args.epochs * len(self.batches))
        self.num_epochs = args.epochs

    def steps(self) -> Iterator[Callable[[], Tensor]]:
        """Yield the closure of each step, and take the step afterwards."""
        for _ in range(self.num_epochs):
            for x, y in self.batches:

                def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
                    return nn.functional.cross_entropy(self.model(x), y)

                yield closure
                self.objective.backward(closure)
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.schedule.step()

    def accuracy(self) -> float:
        """The accuracy on the test images."""
        test = loader(self.splits, "test", batch_size=500, device=self.device)
        return evaluate(self.model, test).accuracy


def errors(args: argparse.Namespace) -> list[dict[str, float]]:
    """The relative error of the low-memory direction, and the noise, during training."""
    run = Training(args, "exact", seed=0)
    objectives = {memory: GSAM(run.model, memory=memory, **SETTINGS) for memory in MODES}
    result = []
    total = run.num_epochs * len(run.batches)
    steps = track(run.steps(), total=total, description="directions", console=Console(stderr=True))
    for index, closure in enumerate(steps):
        if index % args.every:
            continue
        found = {memory: direction(run.model, objectives[memory], closure) for memory in MODES}
        difference = (found["low"] - found["exact"]).norm() / found["exact"].norm()
        again = direction(run.model, objectives["exact"], closure)
        noise = (again - found["exact"]).norm() / found["exact"].norm()
        result.append({"step": index, "error": float(difference), "noise": float(noise)})
    return result


def direction(model: nn.Module, objective: GSAM, closure: Callable[[], Tensor]) -> Tensor:
    """The objective's direction, without a change of the model's gradients and buffers."""
    buffers = [buffer.clone() for buffer in model.buffers()]
    objective.backward(closure)
    gradients = [p.grad.reshape(-1) for p in model.parameters() if p.grad is not None]
    result = torch.cat(gradients).double()
    model.zero_grad()
    for buffer, before in zip(model.buffers(), buffers, strict=True):
        buffer.copy_(before)
    return result


def accuracies(args: argparse.Namespace) -> dict[str, list[float]]:
    result: dict[str, list[float]] = {memory: [] for memory in MODES}
    pairs = [(memory, seed) for seed in range(args.seeds) for memory in MODES]
    for memory, seed in track(pairs, description="trainings", console=Console(stderr=True)):
        run = Training(args, memory, seed)
        for _ in run.steps():
            pass
        result[memory].append(run.accuracy())
    return result


def arguments() -> argparse.Namespace:
    """The command line, checked; an error exits with status 2."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="small_resnet18", help="a model of surrogap.models")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--every", type=int, default=10, help="steps between comparisons")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--device", default="cuda", help="on a CPU both modes are the same")
    parser.add_argument("--json", type=Path, metavar="PATH", help="the file for the record")
    args = parser.parse_args()
    if min(args.epochs, args.every, args.seeds) < 1:
        parser.error("--epochs, --every and --seeds must be at least 1.")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda requires a CUDA GPU, and torch found none.")
    return args


def main() -> None:
    args = arguments()
    torch.backends.cudnn.deterministic = True
    record = provenance(args, args.device)
    record |= {"errors": errors(args), "accuracies": accuracies(args)}
    write(record, args.json)
    for name in ("error", "noise"):
        values = [entry[name] for entry in record["errors"]]
        print(f"relative {name}: median {statistics.median(values):.2e}, most {max(values):.2e}")
    for memory, values in record["accuracies"].items():
        print(f'accuracy with memory="{memory}": {", ".join(f"{v:.4f}" for v in values)}')


if __name__ == "__main__":
    try:
        main()
    except (RuntimeError, ValueError) as error:
        sys.exit(f"error: {error}")
