"""Throughput of the training loop relative to a bare captured step.

The bare step is only replayed on one batch. The loop is that of `surrogap train`: it shuffles,
augments, writes records, evaluates after each epoch, and saves a checkpoint once a minute. Both
have the same model, objective, optimizer and precision. The first epoch, in which the step is
captured, is left out; the others are measured in wall-clock time. The bare step is timed before and
after the loop, which shows the machine's drift.

    python benchmarks/training_loop.py --data cifar10.npz --json results/training_loop_h200.json
"""

import argparse
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from provenance import provenance, write

from surrogap import capture
from surrogap.training.components import components_of
from surrogap.training.config import Config
from surrogap.training.processes import World
from surrogap.training.progress import ProgressDisplay
from surrogap.training.run import train


class Clock(ProgressDisplay):
    """Record the time at the end of each epoch, after its evaluation."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def step(self, step: int) -> None:
        """See `ProgressDisplay`."""

    def record(self, record: Mapping[str, Any]) -> None:
        """See `ProgressDisplay`."""
        if record["kind"] == "epoch":
            self.times.append(time.perf_counter())


def noise(folder: Path) -> Path:
    """Write noise with the size and number of CIFAR-10's images."""
    generator = np.random.default_rng(0)
    arrays: dict[str, Any] = {"classes": np.array([str(i) for i in range(10)])}
    for part, number in {"train": 50_000, "test": 10_000}.items():
        arrays[f"{part}_images"] = generator.integers(256, size=(number, 32, 32, 3), dtype="u1")
        arrays[f"{part}_labels"] = np.arange(number) % 10
    np.savez(folder / "images.npz", **arrays)
    return folder / "images.npz"


def bare(config: Config, num_steps: int) -> float:
    """Images per second of the step alone, on one batch."""
    components = components_of(config, World(torch.device(config.execution.device, 0)))
    components.model.train()
    batch = next(iter(components.images))
    step = capture(
        components.objective, components.optimizer, components.step._loss_and_accuracy, batch
    )
    for _ in range(20):
        step(*batch)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(num_steps):
        step(*batch)
    torch.cuda.synchronize()
    return num_steps * config.data.batch_size / (time.perf_counter() - start)


def loop(config: Config) -> list[float]:
    """Images per second of each epoch except the first."""
    clock = Clock()
    outcome = train(config, progress=clock)
    images = outcome.num_steps // config.schedule.epochs * config.data.batch_size
    return [images / (b - a) for a, b in zip(clock.times[:-1], clock.times[1:], strict=True)]


def measured(config: Config, num_bare_steps: int) -> dict[str, Any]:
    before = bare(config, num_bare_steps)
    epochs = loop(config)
    after = bare(config, num_bare_steps)
    step, whole = (before + after) / 2, len(epochs) / sum(1 / epoch for epoch in epochs)
    return {
        "bare_images_per_second": [before, after],
        "epochs_images_per_second": epochs,
        "loop_over_bare": whole / step,
    }


parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument("--model", default="small_resnet18")
parser.add_argument("--objective", default="gsam")
parser.add_argument("--batch-sizes", type=int, nargs="+", default=[128, 512])
parser.add_argument("--epochs", type=int, default=6)
parser.add_argument("--data", help="images, as for surrogap train; by default noise like CIFAR-10")
parser.add_argument("--bare-steps", type=int, default=300)
parser.add_argument("--json", type=Path)
if __name__ == "__main__":
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("A captured step requires a CUDA GPU, and torch found none.")
    rows = {}
    for batch_size in args.batch_sizes:
        with tempfile.TemporaryDirectory() as folder:
            config = Config().override(
                model=args.model,
                data=args.data or str(noise(Path(folder))),
                objective=args.objective,
                batch_size=batch_size,
                lr=0.01,
                epochs=args.epochs,
                precision="bf16",
                channels_last=True,
                capture=True,
                device="cuda",
                tensorboard=False,
                out=f"{folder}/run",
            )
            row = rows[batch_size] = measured(config, args.bare_steps)
        before, after = row["bare_images_per_second"]
        print(
            f"{args.model} {args.objective}, batch {batch_size}, bf16, captured, light augmentation"
        )
        print(f"  bare step  {before:>10,.0f} images/s before, {after:,.0f} after")
        print("  loop       " + "  ".join(f"{e:>10,.0f}" for e in row["epochs_images_per_second"]))
        print(f"  loop keeps {row['loop_over_bare']:.1%}", flush=True)
    write(provenance(args, "cuda") | {"batch_sizes": rows}, args.json)
