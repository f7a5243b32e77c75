"""Cost of checking that the loss is finite: in every pass, or once per step.

Both variants are the eager training step of `surrogap train`. In every pass: the closure reads the
loss before returning it, followed by an all-reduce with several processes; training used to do
this. Once per step: the losses of all passes are read together before the optimizer's step, and
buffers are copied before the passes. The variants alternate in one run, and the best time of each
counts.

    python benchmarks/finite_check.py --json results/finite_check.json
    python benchmarks/finite_check.py --processes 2 --device cpu
"""

import argparse
import os
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.multiprocessing as mp
from provenance import provenance, write
from torch import Tensor

from surrogap.core.report import Report
from surrogap.training.components import Components, components_of
from surrogap.training.config import Config
from surrogap.training.processes import World, joined
from surrogap.training.step import EagerStep, NonFiniteLossError, step_metrics

Step = Callable[[Tensor, Tensor], Tensor]


def asking_in_every_pass(step: EagerStep) -> Step:
    """The same step, but with a check of the loss in each closure."""

    def closure_of(images: Tensor, targets: Tensor) -> Callable[[], tuple[Tensor, Tensor]]:
        def closure() -> tuple[Tensor, Tensor]:
            loss, right = step._loss_and_accuracy(images, targets)
            if step.world.largest(int(not loss.isfinite())):
                raise NonFiniteLossError
            return loss / step._divisor, right

        return closure

    def call(images: Tensor, targets: Tensor) -> Tensor:
        num_micro_batches = step._num_micro_batches
        parts = list(
            zip(images.chunk(num_micro_batches), targets.chunk(num_micro_batches), strict=True)
        )
        closures = [closure_of(*part) for part in parts]
        if step._shares_perturbation or num_micro_batches == 1:
            report = step.objective.backward(closures)
        else:
            reports = [
                step.objective.backward(closure, sync=closure is closures[-1])
                for closure in closures
            ]
            report = Report.mean(reports, divisor=step._divisor)
        step._update()
        return step_metrics(report)

    return call


def images(folder: Path, batch_size: int) -> Path:
    """Write one batch of noise in the format of CIFAR-10."""
    generator = np.random.default_rng(0)
    arrays: dict[str, Any] = {"classes": np.array([str(i) for i in range(10)])}
    for part in ("train", "test"):
        arrays[f"{part}_images"] = generator.integers(256, size=(batch_size, 32, 32, 3), dtype="u1")
        arrays[f"{part}_labels"] = np.arange(batch_size) % 10
    np.savez(folder / "images.npz", **arrays)
    return folder / "images.npz"


def seconds(step: Step, batch: tuple[Tensor, Tensor], num_steps: int) -> float:
    """The mean time of a step."""
    device = batch[0].device
    start = time.perf_counter()
    for _ in range(num_steps):
        step(*batch)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - start) / num_steps


def compared(components: Components, num_turns: int, num_steps: int) -> dict[str, float]:
    """The best time of each variant, in milliseconds."""
    assert isinstance(components.step, EagerStep)
    ways = {"every pass": asking_in_every_pass(components.step), "once per step": components.step}
    batch = next(iter(components.images))
    components.model.train()
    best = dict.fromkeys(ways, float("inf"))
    for turn in range(num_turns + 1):
        for name, way in ways.items():
            found = seconds(way, batch, num_steps)
            if turn:  # the first turn is a warm-up
                best[name] = min(best[name], 1e3 * found)
    return best


def measure(config: Config, world: World, args: argparse.Namespace) -> dict[str, Any]:
    rows = {}
    for micro_batches in args.micro_batches:
        own = config.override(micro_batches=micro_batches, perturbation="each")
        components = components_of(own, world)
        rows[str(micro_batches)] = compared(components, args.turns, args.steps)
    return rows


def of_rank(rank: int, config: Config, args: argparse.Namespace, path: Path, port: int) -> None:
    """One of several processes; the first saves the result."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    values = (rank, rank, args.processes, "localhost", port)
    os.environ |= {name: str(value) for name, value in zip(names, values, strict=True)}
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo" if args.device == "cpu" else None)
    with joined(args.device) as world:
        rows = measure(config, world, args)
        if world.is_first:
            torch.save(rows, path)
    torch.distributed.destroy_process_group()


def run(args: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        config = Config().override(
            model=args.model,
            data=str(images(Path(folder), args.batch_size)),
            augmentation="none",
            objective=args.objective,
            batch_size=args.batch_size,
            lr=0.01,
            device=args.device,
            out=f"{folder}/run",
        )
        if args.processes == 1:
            with joined(args.device) as world:
                return measure(config, world, args)
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        path = Path(folder) / "rows.pt"
        mp.spawn(of_rank, (config, args, path, port), nprocs=args.processes)
        rows: dict[str, Any] = torch.load(path)
        return rows


parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument("--model", default="small_resnet18")
parser.add_argument("--objective", default="gsam")
parser.add_argument("--batch-size", type=int, default=128)
parser.add_argument("--micro-batches", type=int, nargs="+", default=[1, 4])
parser.add_argument("--processes", type=int, default=1)
parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
parser.add_argument("--turns", type=int, default=8, help="turns per variant; the best counts")
parser.add_argument("--steps", type=int, default=20, help="steps per turn")
parser.add_argument("--json", type=Path)
if __name__ == "__main__":
    args = parser.parse_args()
    rows = run(args)
    print(f"{args.model} {args.objective}, batch {args.batch_size}, {args.processes} process(es)")
    print("micro-batches  every pass  once per step  ratio")
    for number, best in rows.items():
        before, after = best["every pass"], best["once per step"]
        print(f"{number:>13}  {before:>7.2f} ms  {after:>10.2f} ms  {after / before:>5.3f}")
    write(provenance(args, args.device) | {"milliseconds": rows}, args.json)
