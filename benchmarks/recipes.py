"""Training time and results of recipes on this machine.

The recipes are trained one after another as `surrogap train --recipe NAME` trains them, up to the
last checkpoint. Those after --pace are trained for only three epochs, to estimate the time of a
full run.

    python benchmarks/recipes.py fashion-mnist-resnet18-gsam --pace cifar10-vit-gsam
"""

import argparse
import statistics
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from provenance import provenance, write
from rich.console import Console
from rich.progress import Progress
from training_loop import Clock

from surrogap.checks import one_of
from surrogap.experiments.recipes import RECIPES
from surrogap.training.run import train

NUM_PACE_EPOCHS = 3
RESULTS = ("test_accuracy", "test_loss", "test_calibration_error")


class Bar(Clock):
    """A clock that also shows a progress bar."""

    def __init__(self, name: str, bars: Progress) -> None:
        super().__init__()
        self._bars = bars
        self._task = bars.add_task(name, total=None)

    def start(self, title: str, step: int, num_steps: int) -> None:
        """See `surrogap.training.progress.ProgressDisplay`."""
        self._bars.update(self._task, total=num_steps)

    def step(self, step: int) -> None:
        """See `surrogap.training.progress.ProgressDisplay`."""
        self._bars.update(self._task, completed=step)


def trained(name: str, data: str | None, num_epochs: int | None, bars: Progress) -> dict[str, Any]:
    """Train a recipe, and return its time and scores.

    Args:
        name: The name of the recipe.
        data: The dataset to use instead of the recipe's, unless that is embedded.
        num_epochs: The number of epochs to train; None for all.
        bars: The display of the progress bar.
    """
    config, clock, start = RECIPES[name].config, Bar(name, bars), time.perf_counter()
    if data is not None and config.data.name != "embedded":
        config = config.override(data=data)
    whole = config.schedule.epochs
    if num_epochs is not None:
        warmup = min(config.schedule.warmup_epochs, num_epochs - 1)
        config = config.override(epochs=num_epochs, warmup_epochs=warmup)
    with tempfile.TemporaryDirectory() as folder:
        outcome = train(config.override(out=f"{folder}/run"), progress=clock)
    if outcome.signal is not None:
        sys.exit(128 + outcome.signal)
    assert outcome.record is not None  # the run has finished
    seconds = time.perf_counter() - start
    epoch = statistics.median(b - a for a, b in pairwise(clock.times))
    row = {"epochs": whole, "trained_epochs": config.schedule.epochs, "seconds_per_epoch": epoch}
    if num_epochs is not None:
        return row | {"estimated_seconds": seconds + (whole - num_epochs) * epoch}
    return row | {"seconds": seconds} | {key: outcome.record[key] for key in RESULTS}


def line(name: str, row: dict[str, Any]) -> str:
    if "estimated_seconds" in row:
        minutes = f"{row['estimated_seconds'] / 60:.1f} (estimated)"
        return f"| {name} | {row['epochs']} | {minutes} | | | |"
    accuracy, loss, error = (row[key] for key in RESULTS)
    results = f"{accuracy:.2%} | {loss:.4f} | {error:.2%}"
    return f"| {name} | {row['epochs']} | {row['seconds'] / 60:.1f} | {results} |"


def arguments() -> argparse.Namespace:
    """The command line, checked; an error exits with status 2."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("recipes", nargs="*", metavar="NAME", help="recipes to train completely")
    parser.add_argument(
        "--pace", nargs="+", default=[], metavar="NAME", help="recipes to train for three epochs"
    )
    parser.add_argument(
        "--data", help="dataset for recipes without embedded images, as for surrogap train"
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="the file for the record")
    args = parser.parse_args()
    if not args.recipes + args.pace:
        parser.error("Name at least one recipe. `surrogap recipes` lists them.")
    try:
        for name in args.recipes + args.pace:
            one_of("a recipe", name, RECIPES, remedy="`surrogap recipes` lists them.")
    except ValueError as error:
        parser.error(str(error))
    return args


def main() -> None:
    args = arguments()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    record = provenance(args, device) | {"recipes": {}}
    console = Console(stderr=True)
    print("| recipe | epochs | minutes | test accuracy | test loss | calibration error |")
    print("|---|---|---|---|---|---|")
    num_epochs_of = dict.fromkeys(args.pace, NUM_PACE_EPOCHS) | dict.fromkeys(args.recipes)
    with Progress(console=console, disable=not console.is_terminal) as bars:
        for name, num_epochs in num_epochs_of.items():
            row = record["recipes"][name] = trained(name, args.data, num_epochs, bars)
            write(record, args.json)  # after each recipe, so that an interrupt loses only one
            print(line(name, row), flush=True)


if __name__ == "__main__":
    try:
        main()
    except (ImportError, RuntimeError, ValueError) as error:
        sys.exit(f"error: {error}")
