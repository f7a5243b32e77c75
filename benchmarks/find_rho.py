"""Validation of find-rho: its suggestions against the test accuracy of full runs.

For each set-up, `surrogap find-rho` runs as a user would run it. Then SAM is trained with each
radius of a full sweep and several seeds. The suggestion is right if it contains a radius whose test
accuracy is within noise of the best one.

The set-ups train on the embedded images. Those for a CPU have no augmentation, and train for so
long that plain training memorises the images, since SAM then has something to improve. `--networks
resnet18 vit mixer` are those of the recipes, for a GPU. Finished runs are not trained again, so
several processes can share the work: pass them different networks and the same `--out`, and run all
networks at the end.

    python benchmarks/find_rho.py --json results/find_rho.json --figure results/find_rho.png

`--record results/find_rho.json` trains nothing: it reads the accuracies from that record, and only
runs find-rho again.
"""

import argparse
import contextlib
import io
import json
import math
import statistics
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import timm
import torch
from matplotlib.figure import Figure
from provenance import provenance, write
from rich.console import Console
from rich.progress import track
from torch import nn

from surrogap.cli.find_rho import main as find_rho
from surrogap.experiments.comparison import spread
from surrogap.experiments.recipes import RECIPES
from surrogap.experiments.text_table import Table
from surrogap.models import architectures
from surrogap.training.config import Config
from surrogap.training.progress import NoDisplay
from surrogap.training.run import train

RHOS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)

# With 16 patches of 7 x 7 pixels.
_TINY = {
    "tiny_vit": partial(architectures.vit, width=64, depth=4, num_heads=2),
    "tiny_mixer": partial(architectures.mixer, width=64, depth=4),
}


def register(name: str) -> None:
    """Register a model with timm, so that surrogap finds it by name."""

    def build(num_classes: int, in_chans: int, **_: object) -> nn.Module:
        return _TINY[name](
            num_classes=num_classes, in_channels=in_chans, image_size=28, patch_size=7
        )

    build.__name__ = name
    build.__module__ = "__main__"
    timm.models.register_model(build)


def on_processor(recipe: str, **changes: object) -> Config:
    """A recipe for a GPU, adapted to a CPU."""
    plain = {"capture": False, "precision": "fp32", "channels_last": False, "device": "cpu"}
    quick = {"augmentation": "none", "tensorboard": False, "checkpoint_every": 10**6}
    return RECIPES[recipe].config.override(**plain, **quick, **changes)


def set_up(network: str) -> Config:
    """The configuration of a network's runs, except for radius and seed."""
    if network == "tiny-resnet":
        # At 14 x 14 pixels, which takes a quarter of the time.
        changes = {"model": "small_resnet18_narrow", "image_size": 14, "epochs": 10}
        return on_processor("fashion-mnist-resnet18-sam", **changes)
    if network in ("tiny-vit", "tiny-mixer"):
        changes = {"model": network.replace("-", "_"), "epochs": 25, "warmup_epochs": 2.0}
        return on_processor(f"fashion-mnist-{network.removeprefix('tiny-')}-sam", **changes)
    if network == "mlp":
        return RECIPES["fashion-mnist-sam"].config
    return RECIPES[f"fashion-mnist-{network}-sam"].config


NETWORKS = ("mlp", "tiny-resnet", "tiny-vit", "tiny-mixer", "resnet18", "vit", "mixer")


def suggestion(config: Config, folder: Path) -> dict[str, Any]:
    """The output of find-rho for a set-up."""
    path = folder / "find-rho.json"
    if not path.exists():
        flat, usual = config.flat(), Config().flat()
        fields = {name: value for name, value in flat.items() if value != usual.get(name)}
        with contextlib.redirect_stdout(io.StringIO()):
            find_rho([*_options(fields | {"out": str(folder)})])
    return json.loads(path.read_text())


def _options(fields: dict[str, object]) -> Iterator[str]:
    """Fields of a configuration as command-line options."""
    for name, value in fields.items():
        option = name.replace("_", "-")
        if isinstance(value, bool):
            yield f"--{option}" if value else f"--no-{option}"
        else:
            yield from (f"--{option}", str(value))


def accuracy(config: Config, rho: float, seed: int, folder: Path) -> float:
    """The test accuracy after training with a radius; radius 0 is plain training."""
    changes = {"rho": rho} if rho else {"objective": "vanilla"}
    run = config.override(**changes, seed=seed, out=str(folder / f"{rho:g}-{seed}"))
    outcome = train(run, resume=True, progress=NoDisplay())
    if outcome.signal is not None:
        sys.exit(128 + outcome.signal)  # the same command resumes the run
    assert outcome.record is not None
    return float(outcome.record["test_accuracy"])


def measured(args: argparse.Namespace, network: str) -> dict[str, Any]:
    """The suggestion, the accuracies of the sweep, and their comparison."""
    config, folder = set_up(network), args.out / network
    if args.epochs is not None:
        config = config.override(epochs=args.epochs)
    suggested = suggestion(config, folder / "suggestion")
    found: dict[float, list[float]]
    if args.record is not None:
        recorded = json.loads(args.record.read_text())["set_ups"][network]["accuracies"]
        found = {float(rho): values for rho, values in recorded.items()}
    else:
        found = {rho: [] for rho in (0.0, *args.rhos)}
        pairs = [(rho, seed) for seed in range(args.seeds) for rho in found]
        for rho, seed in track(pairs, description=network, console=Console(stderr=True)):
            found[rho].append(accuracy(config, rho, seed, folder))
    return {
        "suggestion": {name: suggested[name] for name in ("low", "high", "center", "words")},
        "accuracies": {f"{rho:g}": values for rho, values in found.items()},
        **judged(suggested, found),
        "configuration": config.to_dict(),
    }


def judged(suggested: dict[str, Any], found: dict[float, list[float]]) -> dict[str, Any]:
    """Compare the best radius of all with the best one within the suggestion.

    Noise is the standard error of a difference between two radii.
    """
    means = {rho: statistics.fmean(values) for rho, values in found.items() if rho}
    best = max(means, key=means.__getitem__)
    noise = pooled_deviation(list(found.values())) * (2 / len(found[best])) ** 0.5
    within = [rho for rho in means if is_within(rho, suggested)]
    if not within:
        return {"best": best, "best_within": None, "lost": None, "noise": noise, "is_right": False}
    best_within = max(within, key=means.__getitem__)
    lost = means[best] - means[best_within]
    return {
        "best": best,
        "best_within": best_within,
        "lost": lost,
        "noise": noise,
        "is_right": lost <= noise,
    }


def is_within(rho: float, suggested: dict[str, Any]) -> bool:
    """True if a radius is within the suggestion, which may lack an end."""
    low, high = suggested["low"], suggested["high"]
    return low is not None and low <= rho <= (high or math.inf)


def pooled_deviation(groups: Sequence[Sequence[float]]) -> float:
    """The standard deviation over seeds, pooled over all radii.

    >>> pooled_deviation([[1.0, 3.0], [5.0, 7.0]])
    1.414...
    """
    return statistics.fmean(statistics.variance(group) for group in groups) ** 0.5


def table(results: dict[str, dict[str, Any]]) -> Table:
    """A column for each set-up; radii within the suggestion have a star."""
    rhos = [rho for rho in next(iter(results.values()))["accuracies"] if rho != "0"]
    rows = []
    for rho in ("0", *rhos):
        cells = []
        for result in results.values():
            values = [100 * value for value in result["accuracies"][rho]]
            star = " *" * is_within(float(rho), result["suggestion"])
            cells.append(spread(values, decimals=2) + star)
        rows.append((rho if rho != "0" else "0 (vanilla)", *cells))
    columns = [verdict(result) for result in results.values()]
    rows += [(label, *(column[label] for column in columns)) for label in columns[0]]
    return Table(("rho", *results), rows, "test accuracy % of SAM; * suggested by find-rho")


def verdict(result: dict[str, Any]) -> dict[str, str]:
    """The last rows of a set-up's column."""
    suggested, lost = result["suggestion"], result["lost"]
    ends = [suggested[end] for end in ("low", "high")]
    low, high = ("-" if end is None else f"{end:.2g}" for end in ends)
    return {
        "suggested": f"{low} to {high}",
        "points lost by it": "-" if lost is None else f"{100 * lost:.2f}",
        "noise, points": f"{100 * result['noise']:.2f}",
        "right": "yes" if result["is_right"] else "no",
    }


def figure(results: dict[str, dict[str, Any]]) -> Figure:
    """Test accuracy against the radius, with the suggested range shaded."""
    num_rows = math.ceil(len(results) / 2)
    drawn = Figure(figsize=(8.4, 3.2 * num_rows), dpi=150, layout="constrained")
    drawn.suptitle("Fashion-MNIST: test accuracy of SAM against rho, and the range of find-rho")
    panels = list(drawn.subplots(num_rows, 2, squeeze=False).flat)
    for axes, (network, result) in zip(panels, results.items(), strict=False):
        found = {float(rho): values for rho, values in result["accuracies"].items()}
        vanilla = found.pop(0.0)
        axes.axhline(
            100 * statistics.fmean(vanilla), color="grey", linestyle="--", label="vanilla, mean"
        )
        points = [(rho, 100 * value) for rho, values in found.items() for value in values]
        axes.semilogx(*zip(*points, strict=True), "o", color="C0", alpha=0.5, label="SAM, one seed")
        means = [100 * statistics.fmean(values) for values in found.values()]
        axes.semilogx(list(found), means, color="C0", label="SAM, mean")
        low, high = (result["suggestion"][end] for end in ("low", "high"))
        if low is not None:
            axes.axvspan(low, high or max(found), color="C2", alpha=0.15, label="suggested")
        axes.set(title=network, xlabel="rho", ylabel="test accuracy, %")
        axes.set_xticks(list(found), [f"{rho:g}" for rho in found])
        axes.minorticks_off()
    for axes in panels[len(results) :]:
        axes.axis("off")
    panels[0].legend(frameon=False)
    return drawn


def arguments() -> argparse.Namespace:
    """The command line, checked; an error exits with status 2."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=NETWORKS[:4])
    parser.add_argument("--rhos", nargs="+", type=float, default=RHOS)
    parser.add_argument("--seeds", type=int, default=3, help="runs per radius")
    parser.add_argument("--epochs", type=int, help="epochs per run; by default the set-up's")
    parser.add_argument("--out", type=Path, default=Path("runs/find_rho"), help="the runs' folder")
    parser.add_argument("--record", type=Path, help="a record to read the accuracies from")
    parser.add_argument("--json", type=Path, help="the file for the record")
    parser.add_argument("--figure", type=Path, help="the .png file for the figure")
    args = parser.parse_args()
    if args.seeds < 2:
        parser.error(f"--seeds must be at least 2 to estimate noise, got {args.seeds}.")
    if not min(args.rhos) > 0:
        parser.error(f"--rhos must be positive, got {min(args.rhos):g}. Vanilla always runs.")
    return args


def main() -> None:
    """Measure all networks, print the table, and write the files."""
    args = arguments()
    for name in _TINY:
        register(name)
    results = {network: measured(args, network) for network in args.networks}
    table(results).print()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    write(provenance(args, device) | {"set_ups": results}, args.json)
    if args.figure:
        args.figure.parent.mkdir(parents=True, exist_ok=True)
        figure(results).savefig(args.figure)


if __name__ == "__main__":
    main()
