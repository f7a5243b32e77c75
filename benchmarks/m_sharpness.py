"""Effect of m, the number of samples that share one perturbation, on SAM and GSAM.

With `scope="replica"`, each process computes the ascent step from its own part of the batch, so m
is the batch size of one process. This script simulates that in one process: a batch of B samples is
split into B / m parts, each part is one `backward` call, and `.grad` ends as the mean of the parts'
directions. There is no BatchNorm, so only the perturbations depend on m.

A seed determines the training images, the initial weights and the order of the batches. All methods
share the seeds and the number of updates, so differences are paired by seed. The radius is chosen
once, at m = B: the one for which SAM has the lowest loss on held-out training images, with two
seeds that are used for nothing else. The test images are not used for this.

The data are an .npz archive with the arrays train_images and test_images (uint8; image, row,
column, channel), train_labels and test_labels (integers from 0).

    python benchmarks/m_sharpness.py --data fashion_mnist.npz \
        --json results/m_sharpness.json --figure results/m_sharpness.png
"""

# ruff: noqa: B023 (backward calls its closure immediately, before the loop moves on)

import argparse
import math
import statistics
import sys
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from provenance import provenance, write
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from surrogap import GSAM, SAM, Vanilla

RHOS = (0.01, 0.02, 0.05, 0.1, 0.2)
NUM_RHO_SEEDS, MAX_HELD_OUT = 2, 10_000
ARRAYS = ("train_images", "train_labels", "test_images", "test_labels")


@dataclass(frozen=True)
class Samples:
    """Images with their labels."""

    images: Tensor
    labels: Tensor

    def __getitem__(self, indices: Tensor | slice) -> "Samples":
        return Samples(self.images[indices], self.labels[indices])

    def __len__(self) -> int:
        return len(self.labels)


def load(path: Path) -> tuple[Samples, Samples]:
    """Load training and test samples from an .npz archive, standardized and in NCHW.

    Raises:
        ValueError: The file cannot be read, or an array is missing or not valid.
    """
    try:
        with np.load(path) as archive:
            found = {name: archive[name] for name in ARRAYS if name in archive}
    except (OSError, ValueError, EOFError, TypeError, zipfile.BadZipFile) as error:
        reason = getattr(error, "strerror", None) or "not an .npz archive"
        raise ValueError(f"--data must be a readable .npz file, got {path} ({reason}).") from error
    if missing := [name for name in ARRAYS if name not in found]:
        raise ValueError(
            f"--data must hold the arrays {', '.join(ARRAYS)}, got {path} without "
            f"{', '.join(missing)}."
        )
    for split in ("train", "test"):
        images, labels = found[f"{split}_images"], found[f"{split}_labels"]
        if images.dtype != np.uint8 or images.ndim != 4:
            raise ValueError(
                f"{split}_images must be uint8 with four dimensions (image, row, column, channel), "
                f"got {images.dtype} of shape {images.shape}."
            )
        if labels.dtype.kind not in "iu" or labels.shape != images.shape[:1] or not len(labels):
            raise ValueError(
                f"{split}_labels must hold an integer for each of the {len(images)} images, "
                f"got {labels.dtype} of shape {labels.shape}."
            )
        if labels.min() < 0:
            raise ValueError(f"{split}_labels must be 0 or above, got {labels.min()}.")
    mean, deviation = found["train_images"].mean() / 255, found["train_images"].std() / 255

    def samples(split: str) -> Samples:
        images = torch.from_numpy(found[f"{split}_images"]).permute(0, 3, 1, 2)
        labels = torch.from_numpy(found[f"{split}_labels"].astype(np.int64))
        return Samples((images.float() / 255 - mean) / max(deviation, 1e-6), labels)

    return samples("train"), samples("test")


def balanced(samples: Samples, num_images: int, seed: int) -> tuple[Samples, Samples]:
    """Split samples into a balanced subset and the rest, both in random order."""
    order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(seed))
    classes = samples.labels.unique()
    of_class = [order[samples.labels[order] == label] for label in classes]
    share = num_images // len(classes)
    chosen = torch.cat([indices[:share] for indices in of_class])
    rest = torch.cat([indices[share:] for indices in of_class])
    rest = rest[torch.randperm(len(rest), generator=torch.Generator().manual_seed(seed))]
    return samples[chosen], samples[rest]


def network(shape: torch.Size, num_classes: int) -> nn.Sequential:
    """Three strided convolutions with GroupNorm, which normalizes each sample separately."""
    channels, height, width = shape
    layers: list[nn.Module] = []
    for num_filters in (16, 32, 64):
        layers += [nn.Conv2d(channels, num_filters, 3, stride=2, padding=1, bias=False)]
        layers += [nn.GroupNorm(4, num_filters), nn.ReLU()]
        channels, height, width = num_filters, math.ceil(height / 2), math.ceil(width / 2)
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels * height * width, num_classes))


@dataclass(frozen=True)
class Recipe:
    """The settings that all runs share.

    Attributes:
        num_images: The number of training images.
        num_classes: The number of classes.
        batch_size: B, the number of samples per update.
        num_epochs: The number of epochs.
        lr: The initial learning rate of a cosine schedule that ends at 0.
        alpha: GSAM's alpha.
    """

    num_images: int
    num_classes: int
    batch_size: int
    num_epochs: int
    lr: float
    alpha: float

    def objective(self, method: str, model: nn.Module, rho: float) -> Vanilla | SAM | GSAM:
        """The objective of a method, by name."""
        if method == "GSAM":
            return GSAM(model, rho=rho, alpha=self.alpha)
        return SAM(model, rho=rho) if method == "SAM" else Vanilla(model)


def train(
    method: str,
    m: int,
    rho: float,
    recipe: Recipe,
    data: Samples,
    seed: int,
    tick: Callable[[], Any],
) -> nn.Module:
    """Train a model. Initial weights and batches depend only on the seed."""
    torch.manual_seed(seed)
    model = network(data.images.shape[1:], recipe.num_classes)
    objective = recipe.objective(method, model, rho)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=recipe.lr, momentum=0.9, nesterov=True, weight_decay=5e-4
    )
    num_batches = len(data) // recipe.batch_size
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(
        optimizer, recipe.num_epochs * num_batches
    )
    order = torch.Generator().manual_seed(seed)
    for _ in range(recipe.num_epochs):
        shuffled = torch.randperm(len(data), generator=order)
        for batch in shuffled[: num_batches * recipe.batch_size].split(recipe.batch_size):
            for part in map(data.__getitem__, batch.split(m)):
                # The mean over the part times m / B, since the parts' directions add up.
                objective.backward(
                    lambda: cross_entropy(model(part.images), part.labels) * m / recipe.batch_size
                )
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        tick()
    return model


@torch.no_grad()
def evaluate(model: nn.Module, samples: Samples) -> tuple[float, float]:
    """Return the mean loss, and the accuracy in percent.

    Raises:
        RuntimeError: The loss is not finite.
    """
    logits = torch.cat([model(images) for images in samples.images.split(1000)])
    loss = cross_entropy(logits, samples.labels).item()
    if not math.isfinite(loss):
        raise RuntimeError(f"the loss must stay finite, got {loss}. Lower --lr or --rho.")
    return loss, 100 * (logits.argmax(dim=1) == samples.labels).float().mean().item()


def find_rho(recipe: Recipe, train_data: Samples, seeds: range, tick: Callable[[], Any]) -> Any:
    """Choose rho by the loss of SAM at m = B on held-out images."""
    runs = []
    for seed in seeds:
        data, held_out = balanced(train_data, recipe.num_images, seed)
        for rho in RHOS:
            model = train("SAM", recipe.batch_size, rho, recipe, data, seed, tick)
            loss, accuracy = evaluate(model, held_out[:MAX_HELD_OUT])
            runs.append({"rho": rho, "seed": seed, "loss": loss, "accuracy": accuracy})
    means = {rho: statistics.mean(r["loss"] for r in runs if r["rho"] == rho) for rho in RHOS}
    return {"chosen": min(means, key=lambda rho: means[rho]), "mean_loss": means, "runs": runs}


def spread(values: list[float]) -> dict[str, float]:
    deviation = statistics.stdev(values)
    error = deviation / math.sqrt(len(values))
    return {"mean": statistics.mean(values), "deviation": deviation, "standard_error": error}


def summarize(runs: list[dict[str, Any]], batch_size: int) -> list[dict[str, Any]]:
    """Means over seeds, also of the paired differences from m = B and from Vanilla."""
    by_variant: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for run in sorted(runs, key=lambda run: run["seed"]):
        by_variant.setdefault((run["method"], run["m"]), []).append(run)

    def values(method: str, m: int, key: str) -> list[float]:
        return [run[key] for run in by_variant[method, m]]

    summary = []
    for method, m in by_variant:
        row: dict[str, Any] = {"method": method, "m": m}
        for key in ("test_loss", "test_accuracy", "train_loss"):
            mine = values(method, m, key)
            row[key] = spread(mine)
            for name, other in (("B", method), ("vanilla", "Vanilla")):
                if (method, m) == (other, batch_size):
                    continue
                differences = np.subtract(mine, values(other, batch_size, key)).tolist()
                num_below = sum(difference < 0 for difference in differences)
                row[f"{key}_minus_{name}"] = spread(differences) | {"num_below": num_below}
        summary.append(row)
    return summary


def table(summary: list[dict[str, Any]], num_seeds: int) -> Table:
    """A table of means with deviations, and of differences with standard errors."""

    def level(values: dict[str, float], spec: str) -> str:
        return f"{values['mean']:{spec}} ± {values['deviation']:{spec}}"

    def difference(values: dict[str, float] | None, spec: str) -> str:
        if values is None:
            return ""
        below = f"{values['num_below']}/{num_seeds}"
        return f"{values['mean']:+{spec}} ± {values['standard_error']:{spec}} ({below})"

    result = Table(box=box.MARKDOWN)
    for header in ("method", "m", "test loss", "minus m = B", "minus Vanilla"):
        result.add_column(header, justify="left" if header == "method" else "right")
    for header in ("accuracy %", "minus m = B", "train loss"):
        result.add_column(header, justify="right")
    for row in summary:
        result.add_row(
            row["method"],
            "any" if row["method"] == "Vanilla" else str(row["m"]),
            level(row["test_loss"], ".4f"),
            difference(row.get("test_loss_minus_B"), ".4f"),
            difference(row.get("test_loss_minus_vanilla"), ".4f"),
            level(row["test_accuracy"], ".2f"),
            difference(row.get("test_accuracy_minus_B"), ".2f"),
            level(row["train_loss"], ".4f"),
        )
    return result


def figure(summary: list[dict[str, Any]], title: str) -> Figure:
    """Test loss and accuracy against m, with standard errors; Vanilla is a band."""
    result = Figure(figsize=(9, 3.8), layout="constrained")
    panels = {"test_loss": "test loss", "test_accuracy": "test accuracy (%)"}
    axes = result.subplots(1, len(panels))
    for axis, (key, label) in zip(axes, panels.items(), strict=True):
        vanilla = next(row[key] for row in summary if row["method"] == "Vanilla")
        low, high = (vanilla["mean"] + sign * vanilla["standard_error"] for sign in (-1, 1))
        axis.axhspan(low, high, color="0.85", lw=0, label="Vanilla, ± standard error")
        axis.axhline(vanilla["mean"], color="0.4", lw=1.2, ls="--", label="Vanilla")
        # Shifted, so that error bars do not hide each other.
        for method, marker, color, shift in (
            ("SAM", "o", "tab:blue", 0.96),
            ("GSAM", "s", "tab:orange", 1.04),
        ):
            rows = [row for row in summary if row["method"] == method]
            axis.errorbar(
                [row["m"] * shift for row in rows],
                [row[key]["mean"] for row in rows],
                [row[key]["standard_error"] for row in rows],
                marker=marker,
                color=color,
                capsize=3,
                lw=1.5,
                ms=5,
                label=method,
            )
        ticks = sorted({row["m"] for row in summary})
        axis.set_xscale("log", base=2)
        axis.set_xticks(ticks, [str(tick) for tick in ticks])
        axis.set_xlabel("m, samples that share a perturbation")
        axis.set_ylabel(label)
        axis.grid(alpha=0.25)
    axes[0].legend(frameon=False)
    result.suptitle(title, fontsize=10)
    return result


def arguments() -> tuple[argparse.Namespace, Samples, Samples]:
    """The command line and its data, checked; an error exits with status 2."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--data", type=Path, metavar="PATH", required=True, help="an .npz of images and labels")
    add("--json", type=Path, metavar="PATH", help="the file for the record")
    add("--figure", type=Path, metavar="PATH", help="the file for the figure: .png, .svg or .pdf")
    add("--seeds", type=int, default=5, help="runs of each method and m")
    add("--images", type=int, default=5000, help="training images, balanced over classes")
    add("--epochs", type=int, default=10, help="epochs per run")
    add("--batch", type=int, default=64, help="B, the samples per update")
    add("--smallest", type=int, default=4, help="the smallest m; B is halved down to it")
    add("--lr", type=float, default=0.02, help="initial learning rate of the cosine schedule")
    add("--alpha", type=float, default=0.4, help="GSAM's alpha")
    add("--rho", type=float, help="the radius; by default chosen at m = B")
    args = parser.parse_args()
    for name, least in {"seeds": 2, "images": 1, "epochs": 1, "batch": 1, "smallest": 1}.items():
        if getattr(args, name) < least:
            parser.error(f"--{name} must be at least {least}, got {getattr(args, name)}.")
    if args.batch % args.smallest or (args.batch // args.smallest).bit_count() != 1:
        parser.error(
            "--batch must be --smallest times a power of two, "
            f"got --batch {args.batch} and --smallest {args.smallest}."
        )
    for name in ("lr", "alpha", "rho"):
        value = getattr(args, name)
        if value is not None and not 0 <= value < math.inf:
            parser.error(f"--{name} must be finite and at least 0, got {value}.")
    if args.figure and args.figure.suffix not in (".png", ".svg", ".pdf"):
        parser.error(f"--figure must end in .png, .svg or .pdf, got {args.figure}.")
    try:
        train_data, test_data = load(args.data)
    except ValueError as error:
        parser.error(str(error))
    counts = train_data.labels.unique(return_counts=True)[1]
    most = int(counts.min()) - (args.rho is None)  # choosing rho needs a held-out image
    if args.images % len(counts) or not args.batch <= args.images <= most * len(counts):
        parser.error(
            f"--images must be a multiple of the {len(counts)} classes, at least --batch "
            f"({args.batch}) and at most {most * len(counts)}, got {args.images}."
        )
    for path in filter(None, (args.json, args.figure)):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.open("ab").close()  # fail now, not after all runs
        except OSError as error:
            parser.error(f"--json and --figure must be writable, got {path} ({error.strerror}).")
    return args, train_data, test_data


def main() -> None:
    args, train_data, test_data = arguments()
    torch.set_num_threads(1)  # tensors this small gain nothing from more threads
    num_classes = int(torch.cat([train_data.labels, test_data.labels]).max()) + 1
    recipe = Recipe(args.images, num_classes, args.batch, args.epochs, args.lr, args.alpha)
    halvings = (args.batch // args.smallest).bit_length()
    sizes = [args.batch >> index for index in range(halvings)]
    variants = [("Vanilla", args.batch)]
    variants += [(method, m) for method in ("SAM", "GSAM") for m in sizes]
    record = provenance(args, "cpu") | {"rho": {"chosen": args.rho}, "runs": []}
    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal) as progress:
        num_checks = NUM_RHO_SEEDS * len(RHOS) if args.rho is None else 0
        num_epochs = (num_checks + args.seeds * len(variants)) * args.epochs
        task = progress.add_task("finding rho", total=num_epochs)
        tick = partial(progress.advance, task)
        if args.rho is None:
            seeds = range(args.seeds, args.seeds + NUM_RHO_SEEDS)
            record["rho"] = find_rho(recipe, train_data, seeds, tick)
            write(record, args.json)
        rho = record["rho"]["chosen"]
        for seed in range(args.seeds):
            data, _ = balanced(train_data, args.images, seed)
            for method, m in variants:
                progress.update(task, description=f"seed {seed}, {method}, m = {m}")
                start = time.perf_counter()
                model = train(method, m, rho, recipe, data, seed, tick)
                run = {"method": method, "m": m, "seed": seed}
                run["seconds"] = time.perf_counter() - start
                run["test_loss"], run["test_accuracy"] = evaluate(model, test_data)
                run["train_loss"], run["train_accuracy"] = evaluate(model, data)
                record["runs"].append(run)
                write(record, args.json)
    record["summary"] = summary = summarize(record["runs"], args.batch)
    write(record, args.json)
    title = (
        f"{args.data.stem}, {args.images:,} training images, batch size {args.batch}, "
        f"rho = {rho:g}, alpha = {args.alpha:g}; mean and standard error of {args.seeds} seeds"
    )
    if args.figure:
        figure(summary, title).savefig(args.figure, dpi=150)
    output = Console(width=140)
    for radius, loss in record["rho"].get("mean_loss", {}).items():
        output.print(f"rho {radius:<5g} SAM's loss at m = B on images left out: {loss:.4f}")
    output.print(
        f"rho = {rho:g}. Levels: mean ± deviation over {args.seeds} seeds. Differences, seed by "
        "seed:\nmean ± standard error (in how many seeds below 0)."
    )
    output.print(table(summary, args.seeds))


if __name__ == "__main__":
    try:
        main()
    except RuntimeError as error:
        sys.exit(f"error: {error}")
