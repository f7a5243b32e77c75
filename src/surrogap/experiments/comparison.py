"""Runs side by side: a table, a figure and the numbers, from what is in the runs' folders."""

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

from surrogap.errors import InvalidValueError
from surrogap.experiments.figures import curves_with_bands, new_figure
from surrogap.experiments.methods import Planned
from surrogap.experiments.tables import Table
from surrogap.training.records import read_records, training_loss

MEASURED = "measured.json"
NUM_ASCENT_STEPS = 5

# Attributes of a result, each with what it is called, a factor and its decimals.
_LINES = {
    "test_accuracy": ("test accuracy %", 100.0, 2),
    "test_loss": ("test loss", 1.0, 4),
    "test_calibration_error": ("calibration error %", 100.0, 2),
    "gap": ("gap h", 1.0, 4),
    "sharpness": ("2h/rho^2", 1.0, 2),
    "worst_gap": ("worst h", 1.0, 4),
    "worst_sharpness": ("worst 2h/rho^2", 1.0, 2),
}
_MEASURED = ("gap", "sharpness", "worst_gap", "worst_sharpness")
_SUMMARISED = (*_LINES, "seconds")

# What is drawn of the epochs' records.
_PANELS = {
    "test_accuracy": "test accuracy",
    "test_loss": "test loss",
    "loss": "training loss",
}


@final
@dataclass(frozen=True)
class Result:
    """The results of a run.

    Attributes:
        method: The objective, perhaps for twice the epochs.
        seed: Its seed.
        num_passes: Forward-backward passes over the batch in a step, as a mean over steps.
        num_epochs: How often it went through the images.
        test_accuracy: At the end, as a fraction.
        test_loss: Likewise, the mean cross-entropy.
        test_calibration_error: Likewise.
        gap: `h` over the training images at the last weights, for the comparison's one radius.
        sharpness: `2h / rho^2` of that.
        worst_gap: The largest `h` found in the ball, by a few steps of ascent.
        worst_sharpness: `2h / rho^2` of that.
        seconds: The time of all training steps.
        epochs: The records of its epochs.
    """

    method: str
    seed: int
    num_passes: float
    num_epochs: int
    test_accuracy: float
    test_loss: float
    test_calibration_error: float
    gap: float
    sharpness: float
    worst_gap: float
    worst_sharpness: float
    seconds: float
    epochs: list[dict[str, Any]]


def read_result(planned: Planned) -> Result:
    """Read the results of a finished run from its folder."""
    folder = planned.config.folder
    epochs = [record for record in read_records(folder) if record["kind"] == "epoch"]
    last, measured = epochs[-1], json.loads((folder / MEASURED).read_text())
    return Result(
        method=planned.method,
        seed=planned.config.execution.seed,
        num_passes=planned.num_passes,
        num_epochs=last["epoch"],
        test_accuracy=last["test_accuracy"],
        test_loss=last["test_loss"],
        test_calibration_error=last["test_calibration_error"],
        **{name: measured[name] for name in _MEASURED},
        seconds=last["seconds"],
        epochs=epochs,
    )


def by_method(results: Sequence[Result]) -> dict[str, list[Result]]:
    """The results of each method, in the order in which they came."""
    methods: dict[str, list[Result]] = {}
    for result in results:
        methods.setdefault(result.method, []).append(result)
    return methods


def table(results: Sequence[Result], title: str) -> Table:
    """A column for each method: mean and deviation over seeds.

    Args:
        results: Of all runs.
        title: What was compared.
    """
    methods = by_method(results)
    lines = {"epochs": [str(runs[0].num_epochs) for runs in methods.values()]}
    for name, (label, factor, decimals) in _LINES.items():
        lines[label] = [
            spread([factor * getattr(run, name) for run in runs], decimals)
            for runs in methods.values()
        ]
    lines["time"] = [_relative_time(runs, methods) for runs in methods.values()]
    return Table(("", *methods), [(label, *cells) for label, cells in lines.items()], title)


def legend(results: Sequence[Result], rho: float) -> str:
    """Explain the lines of the table."""
    methods = by_method(results)
    num_seeds = len(next(iter(methods.values())))
    seeds = f"Mean ± deviation over {num_seeds} seeds" if num_seeds > 1 else "One seed"
    time = "at the median pace, relative to vanilla's" if "vanilla" in methods else "in seconds"
    return (
        f"{seeds}, after the last epoch. h: over all training images at the last weights, "
        f"rho = {rho:g} for all, after one step of ascent; worst: after {NUM_ASCENT_STEPS} more, "
        f"anywhere in the ball. Time: of all steps, {time}."
    )


def spread(values: Sequence[float], decimals: int, sign: str = "") -> str:
    """Mean ± standard deviation; of a single value, the value.

    >>> spread([1.0, 2.0], decimals=2)
    '1.50 ± 0.71'
    """
    mean = f"{statistics.fmean(values):{sign}.{decimals}f}"
    return mean + (f" ± {statistics.stdev(values):.{decimals}f}" if len(values) > 1 else "")


def _relative_time(runs: Sequence[Result], methods: Mapping[str, Sequence[Result]]) -> str:
    """Times vanilla's; in seconds where vanilla is not among the methods."""
    if "vanilla" not in methods:
        return f"{statistics.fmean(run.seconds for run in runs):.1f} s"
    return f"{_time(runs) / _time(methods['vanilla']):.2f}"


def _time(runs: Sequence[Result]) -> float:
    """Epochs by the median pace, which does not mind a busy moment."""
    paces = [float(record["images_per_second"]) for run in runs for record in run.epochs]
    return runs[0].num_epochs / statistics.median(paces)


def differences(results: Sequence[Result]) -> list[str]:
    """Return the differences in test accuracy from the first method, seed by seed."""
    (first, base), *others = by_method(results).items()
    lines = []
    for method, runs in others:
        points = [
            100 * (run.test_accuracy - own.test_accuracy)
            for run, own in zip(runs, base, strict=True)
        ]
        found = spread(points, decimals=2, sign="+")
        lines.append(f"{method} minus {first}, seed by seed: {found} points of test accuracy.")
    return lines


def numbers(results: Sequence[Result], rho: float) -> dict[str, Any]:
    """All of it, for JSON."""
    summary = {
        method: {name: moments([getattr(run, name) for run in runs]) for name in _SUMMARISED}
        for method, runs in by_method(results).items()
    }
    return {"rho": rho, "summary": summary, "runs": [asdict(result) for result in results]}


def read_comparison(path: Path) -> tuple[list[Result], float]:
    """Return the results and the radius of a `comparison.json`.

    Raises:
        ValueError: It is damaged.
    """
    try:
        found = json.loads(path.read_text())
        return [Result(**run) for run in found["runs"]], float(found["rho"])
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise InvalidValueError(
            f"comparison must be a file that surrogap compare wrote, got {path}, which is damaged "
            f"({error}). Run the same surrogap compare again to write it."
        ) from error


def moments(values: Sequence[float]) -> dict[str, float | None]:
    """Mean and standard deviation; None for the deviation of a single value."""
    deviation = statistics.stdev(values) if len(values) > 1 else None
    return {"mean": statistics.fmean(values), "deviation": deviation}


def draw(results: Sequence[Result], path: Path, title: str) -> None:
    """Draws the curves of all methods, and how sharp they end, to a PNG.

    The horizontal axis counts passes through the images, so that methods end together if they cost
    as much: an epoch of SAM's is two.
    """
    methods = by_method(results)
    num_seeds = len(next(iter(methods.values())))
    band = (
        f"{num_seeds} seeds: mean, and band from lowest to highest" if num_seeds > 1 else "1 seed"
    )
    figure, axes = new_figure(2, 2, f"{title} ({band})")
    for axis, (name, label) in zip(axes, _PANELS.items(), strict=False):
        for method, runs in methods.items():
            curves_with_bands(axis, method, [_curve(run, name) for run in runs])
        axis.set(xlabel="passes through the training images", ylabel=label)
    if any(value > 0 for run in results for _, value in _curve(run, "loss")):
        axes[2].set_yscale("log")
    for number, (method, runs) in enumerate(methods.items()):
        values = [run.worst_sharpness for run in runs]
        axes[3].bar(method, statistics.fmean(values), color=f"C{number}", alpha=0.5)
        axes[3].plot([method] * len(values), values, "o", color=f"C{number}")
    axes[3].set(ylabel="worst 2h/rho^2 at the end")
    axes[0].legend()
    figure.savefig(path)


def _curve(run: Result, name: str) -> list[tuple[float, float]]:
    values = [training_loss(r) if name == "loss" else r.get(name) for r in run.epochs]
    return [
        (record["epoch"] * run.num_passes, value)
        for record, value in zip(run.epochs, values, strict=True)
        if value is not None and math.isfinite(value)
    ]
