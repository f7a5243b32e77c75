"""A comparison of finished runs: the table, the figure and the numbers."""

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

from surrogap.analysis.gap import DERIVED
from surrogap.errors import InvalidValueError
from surrogap.experiments.planned import PlannedRun, num_passes
from surrogap.experiments.plotting import Points, banded, curves_with_bands, new_figure
from surrogap.experiments.run_summary import curve
from surrogap.experiments.text_table import Table, filled
from surrogap.training.records import Record, read_records

MEASUREMENTS = "measurements.json"
NUM_ASCENT_STEPS = 5

# Attributes of a run in the rows of the table: the label, a factor and the number of decimals.
_ROWS = {
    "test_accuracy": ("test accuracy %", 100.0, 2),
    "test_loss": ("test loss", 1.0, 4),
    "test_calibration_error": ("calibration error %", 100.0, 2),
    "gap": ("gap h", 1.0, 4),
    "sharpness": ("2h/rho^2", 1.0, 2),
    "worst_gap": ("worst h", 1.0, 4),
    "worst_sharpness": ("worst 2h/rho^2", 1.0, 2),
}

# Values of epoch records that are drawn: the label and a factor.
_PANELS = {
    "test_accuracy": ("test accuracy, %", 100.0),
    "test_loss": ("test loss", 1.0),
    "loss": ("training loss", 1.0),
}


@final
@dataclass(frozen=True)
class ComparedRun:
    """The results of a finished run.

    Attributes:
        method: The column of the run: an objective and its settings.
        seed: The seed.
        num_passes: Forward-backward passes over the batch per step, averaged over steps.
        num_epochs: The number of epochs.
        test_accuracy: The last test accuracy, as a fraction.
        test_loss: The last test loss, a mean cross-entropy.
        test_calibration_error: The last calibration error on the test images.
        gap: `h` over the training images at the last weights, at the radius of the comparison.
        sharpness: `2h / rho^2` for `gap`.
        worst_gap: The largest `h` that a few more ascent steps found in the ball.
        worst_sharpness: `2h / rho^2` for `worst_gap`.
        seconds: The time of all training steps.
        epochs: The epoch records.
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


def read_results(folder: Path) -> tuple[list[Record], dict[str, float]]:
    """Read the epoch records and the measurements of a finished run."""
    epochs = [record for record in read_records(folder) if record["kind"] == "epoch"]
    return epochs, json.loads((folder / MEASUREMENTS).read_text())


def read_compared_run(planned: PlannedRun) -> ComparedRun:
    """Read the results of a finished run from its folder."""
    epochs, measured = read_results(planned.config.folder)
    last = epochs[-1]
    return ComparedRun(
        method=planned.method,
        seed=planned.config.execution.seed,
        num_passes=num_passes(planned.config.objective, last["epoch"]) / last["epoch"],
        num_epochs=last["epoch"],
        test_accuracy=last["test_accuracy"],
        test_loss=last["test_loss"],
        test_calibration_error=last["test_calibration_error"],
        **{name: measured[name] for name in DERIVED},
        seconds=last["seconds"],
        epochs=epochs,
    )


def by_method(runs: Sequence[ComparedRun]) -> dict[str, list[ComparedRun]]:
    """Group runs by method, in their order."""
    methods: dict[str, list[ComparedRun]] = {}
    for run in runs:
        methods.setdefault(run.method, []).append(run)
    return methods


def print_comparison(runs: Sequence[ComparedRun], rho: float, *, title: str) -> None:
    """Print the table, its legend, and the differences from the first method.

    The gaps were measured at the radius `rho`.
    """
    comparison_table(runs, title).print()
    for text in (legend(runs, rho), *differences(runs)):
        print(filled(text))


def comparison_table(runs: Sequence[ComparedRun], title: str) -> Table:
    """Return a table with a column per method: mean and standard deviation over seeds."""
    methods = by_method(runs)
    rows = {"epochs": [str(own[0].num_epochs) for own in methods.values()]}
    for name, (label, factor, decimals) in _ROWS.items():
        rows[label] = [
            spread([factor * getattr(run, name) for run in own], decimals)
            for own in methods.values()
        ]
    rows["time"] = [_relative_time(own, methods) for own in methods.values()]
    return Table(("", *methods), [(label, *cells) for label, cells in rows.items()], title)


def legend(runs: Sequence[ComparedRun], rho: float) -> str:
    """Return an explanation of the rows of the table."""
    methods = by_method(runs)
    num_seeds = len(next(iter(methods.values())))
    time = "at the median speed, relative to vanilla" if "vanilla" in methods else "in seconds"
    return (
        f"{averaged(num_seeds)}, after the last epoch. h: over all training images at the last "
        f"weights, with rho = {rho:g} for all methods, after one ascent step. Worst: after "
        f"{NUM_ASCENT_STEPS} more ascent steps within the ball. Time: of all training steps, "
        f"{time}."
    )


def averaged(num_seeds: int) -> str:
    """Return the start of a legend for values that `spread` formats."""
    return f"Mean ± standard deviation over {num_seeds} seeds" if num_seeds > 1 else "One seed"


def spread(values: Sequence[float], decimals: int, sign: str = "") -> str:
    """Format the mean ± the standard deviation, or a single value.

    >>> spread([1.0, 2.0], decimals=2)
    '1.50 ± 0.71'
    """
    mean = f"{statistics.fmean(values):{sign}.{decimals}f}"
    return mean + (f" ± {statistics.stdev(values):.{decimals}f}" if len(values) > 1 else "")


def _relative_time(
    runs: Sequence[ComparedRun], methods: Mapping[str, Sequence[ComparedRun]]
) -> str:
    """Return the time relative to vanilla, or in seconds if vanilla is not compared."""
    if "vanilla" not in methods:
        return f"{statistics.fmean(run.seconds for run in runs):.1f} s"
    return f"{_time(runs) / _time(methods['vanilla']):.2f}"


def _time(runs: Sequence[ComparedRun]) -> float:
    """Return the time of training at the median speed, which is robust to short interruptions."""
    paces = [float(record["images_per_second"]) for run in runs for record in run.epochs]
    return runs[0].num_epochs / statistics.median(paces)


def differences(runs: Sequence[ComparedRun]) -> list[str]:
    """Return sentences on the differences in test accuracy from the first method, by seed."""
    (first, base), *others = by_method(runs).items()
    lines = []
    for method, own in others:
        points = [
            100 * (run.test_accuracy - other.test_accuracy)
            for run, other in zip(own, base, strict=True)
        ]
        difference = spread(points, decimals=2, sign="+")
        lines.append(
            f"{method} minus {first}, seed by seed: {difference} percentage points of test "
            "accuracy."
        )
    return lines


def numbers(runs: Sequence[ComparedRun], rho: float) -> dict[str, Any]:
    """Return all results, for JSON."""
    summary = {
        method: {name: moments([getattr(run, name) for run in own]) for name in (*_ROWS, "seconds")}
        for method, own in by_method(runs).items()
    }
    return {"rho": rho, "summary": summary, "runs": [asdict(run) for run in runs]}


def read_comparison(path: Path) -> tuple[list[ComparedRun], float]:
    """Read the results and the radius from a `comparison.json`.

    Raises:
        ValueError: The file is damaged.
    """
    try:
        found = json.loads(path.read_text())
        return [ComparedRun(**run) for run in found["runs"]], float(found["rho"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise InvalidValueError(
            f"comparison must be a file that surrogap compare wrote, got {path}, which is damaged "
            f"({error}). Run the same surrogap compare again to write it."
        ) from error


def moments(values: Sequence[float]) -> dict[str, float | None]:
    """Return mean and standard deviation; the deviation of a single value is None."""
    deviation = statistics.stdev(values) if len(values) > 1 else None
    return {"mean": statistics.fmean(values), "deviation": deviation}


def draw(runs: Sequence[ComparedRun], path: Path, title: str) -> None:
    """Draw the curves of all methods, and their final sharpness, to a PNG file.

    The x axis counts forward-backward passes over the training images, so methods of equal cost end
    at the same point.
    """
    methods = by_method(runs)
    num_seeds = len(next(iter(methods.values())))
    figure, axes = new_figure(2, 2, f"{title} ({banded(num_seeds)})")
    passes = {method: own[0].num_passes for method, own in methods.items()}
    several = ", ".join(f"{method}: {number:g}" for method, number in passes.items() if number != 1)
    xlabel = "epochs x passes per step" + f" ({several})" * bool(several)
    for axis, (name, (label, factor)) in zip(axes, _PANELS.items(), strict=False):
        for method, own in methods.items():
            curves_with_bands(axis, method, [_curve(run, name) for run in own], factor)
        axis.set(xlabel=xlabel, ylabel=label)
    if any(value > 0 for run in runs for _, value in _curve(run, "loss")):
        axes[2].set_yscale("log")
    for index, (method, own) in enumerate(methods.items()):
        values = [run.worst_sharpness for run in own]
        axes[3].bar(method, statistics.fmean(values), color=f"C{index}", alpha=0.5)
        axes[3].plot([method] * len(values), values, "o", color=f"C{index}")
    axes[3].set(ylabel="worst 2h/rho^2 at the end")
    axes[0].legend()
    figure.savefig(path)


def _curve(run: ComparedRun, name: str) -> Points:
    return curve(run.epochs, name, lambda record: record["epoch"] * run.num_passes)
