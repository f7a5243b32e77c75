"""`surrogap show`: show a run, its summary and its curves, or a comparison.

surrogap show runs/a
surrogap show runs/compare-fashion-mnist-gsam
surrogap show runs/a --png curves.png
"""

import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tyro.conf import Positional

from surrogap.atomic import atomic_write
from surrogap.cli.options import options
from surrogap.errors import InvalidValueError
from surrogap.experiments.charts import CHART_WIDTH, Point, chart, side_by_side
from surrogap.experiments.tables import Table
from surrogap.training.config import Config
from surrogap.training.flags import OptionalPath

FIGURE = "curves.png"
COMPARISON = "comparison.json"

# What is drawn of the epochs' records, where it was recorded.
_CURVES = {
    "loss": "training loss",
    "test_loss": "test loss",
    "accuracy": "training accuracy",
    "val_accuracy": "validation accuracy",
    "test_accuracy": "test accuracy",
    "gap": "gap h",
    "cosine": "cosine of g and g_p",
    "lr": "learning rate",
    "rho": "radius rho",
}
# And of what --sharpness-every measured.
_SHARPNESS = {"eigenvalue": "dominant eigenvalue", "worst_sharpness": "worst 2h/rho^2"}


@dataclass(frozen=True)
class Show:
    """Show a run: its summary and its curves. Of a folder of surrogap compare, show the table."""

    run: Positional[Path]
    """The run's folder, or that of a comparison."""

    png: OptionalPath = None
    """Where to draw the curves. By default curves.png, in the run's folder."""


def main(arguments: Sequence[str]) -> int:
    """Shows a run, and returns the exit status.

    Raises:
        ValueError: There is no such run, or it has no record yet.
    """
    chosen = options(Show, "show", arguments)
    if (chosen.run / COMPARISON).is_file() and not (chosen.run / "config.json").exists():
        _show_comparison(chosen.run / COMPARISON)
        return 0
    from surrogap.experiments.runs import Run

    run = Run.read(chosen.run)
    records = run.records()
    epochs = [record for record in records if record["kind"] == "epoch"]
    points = epochs if epochs else [record for record in records if record["kind"] == "step"]
    if not records:
        raise InvalidValueError(
            f"run must have records, got none yet in {run.folder}. Train it for an epoch."
        )
    summary(run.folder, run.config, records).print()
    if not points:  # it has failed before the first
        return 0
    measured = [record for record in records if record["kind"] == "sharpness"]
    steps = epochs[0]["step"] / epochs[0]["epoch"] if epochs else 1.0
    curves = {
        label: curve
        for kind, names in ((points, _CURVES), (measured, _SHARPNESS))
        for name, label in names.items()
        if (curve := _curve(kind, name, steps))
    }
    if _can_draw():
        charts = [chart(label, curve, width=26, height=5) for label, curve in curves.items()]
        fits_two = shutil.get_terminal_size().columns >= 2 * CHART_WIDTH
        print("", *(side_by_side(charts) if fits_two else charts), sep="\n")
    else:
        print("", *(_in_words(label, curve) for label, curve in curves.items()), sep="\n")
    path = run.folder / FIGURE if chosen.png is None else chosen.png
    _draw(path, curves, str(run.folder), "epoch" if epochs else "step")
    print(f"\nCurves: {path}")
    return 0


def summary(folder: Path, config: Config, records: Sequence[Mapping[str, Any]]) -> Table:
    """What was trained, how far it came, and what came out."""
    last = records[-1]
    shown = ("rho", "rho_min", "alpha", "perturb", "climb_fraction", "every", "start_epoch")
    settings = {name: value for name, value in vars(config.objective).items() if name in shown}
    unused = {"climb_fraction": 1.0, "every": 1, "start_epoch": 0}
    listed = ", ".join(
        f"{name} {value if isinstance(value, str) else format(value, 'g')}"
        for name, value in settings.items()
        if value is not None and unused.get(name) != value
    )
    epochs = [record for record in records if record["kind"] == "epoch"]
    scored = [record for record in epochs if record.get("test_accuracy") is not None]
    rows = [
        ("network", config.model.name),
        ("images", f"{config.data.name}, augmentation {config.data.augmentation}"),
        ("objective", config.objective.name + (f" ({listed})" if listed else "")),
        ("optimizer", f"{config.optimizer.name}, lr {config.optimizer.lr:g}"),
        ("steps", _steps(folder, config, last["step"], epochs)),
    ]
    if epochs:
        rows.append(("epochs", f"{epochs[-1]['epoch']}"))
        rows.append(("time", f"{epochs[-1]['seconds']:.1f} s of training"))
        rows.append(("throughput", f"{epochs[-1]['images_per_second']:,.0f} images/s"))
    if scored:
        end = scored[-1]
        rows += [
            ("test accuracy", f"{100 * end['test_accuracy']:.2f} %"),
            ("test loss", _told(end["test_loss"], "{:.4f}")),
            ("calibration error", _told(end["test_calibration_error"], "{:.2f} %", factor=100)),
        ]
    skipped = sum(record["kind"] == "skip" for record in records)
    if skipped:
        rows.append(("skipped steps", f"{skipped}, since their loss was not finite"))
    overflows = sum(record.get("overflows", 0) for record in epochs)
    if overflows:
        rows.append(("overflows", f"{overflows} steps, since a gradient was not finite"))
    if last["kind"] == "failure":
        rows.append(("failed", last["reason"]))
    return Table(("", str(folder)), rows)


def _steps(folder: Path, config: Config, step: int, epochs: Sequence[Mapping[str, Any]]) -> str:
    """Return the number of steps, and for an unfinished run how many there are and how to go on."""
    if config.schedule.steps is not None:
        end: int | None = config.schedule.steps
    else:
        end = config.schedule.epochs * epochs[0]["step"] if epochs else None
    if step == end:
        return f"{step}"
    whole = f"{config.schedule.epochs} epochs" if end is None else f"{end}"
    return f"{step} of {whole}, unfinished (surrogap train --resume --out {folder} continues)"


def _show_comparison(path: Path) -> None:
    from surrogap.experiments.comparison import differences, legend, read_comparison, table

    results, rho = read_comparison(path)
    table(results, str(path.parent)).print()
    print(textwrap.fill(legend(results, rho), width=100))
    print(*differences(results), sep="\n")


def _told(value: float | None, text: str, factor: float = 1.0) -> str:
    return "not finite" if value is None else text.format(factor * value)


def _curve(records: Sequence[Mapping[str, Any]], name: str, steps: float) -> list[Point]:
    """A quantity over epochs, or over steps if an epoch counts as one step."""
    from surrogap.training.records import training_loss

    values = [training_loss(r) if name == "loss" else r.get(name) for r in records]
    return [
        (float(record.get("epoch", record["step"] / steps)), float(value))
        for record, value in zip(records, values, strict=True)
        if value is not None
    ]


def _can_draw() -> bool:
    return (sys.stdout.encoding or "").lower().startswith("utf")


def _in_words(label: str, curve: Sequence[Point]) -> str:
    return f"{label}: from {curve[0][1]:.4g} to {curve[-1][1]:.4g}"


def _draw(path: Path, curves: Mapping[str, Sequence[Point]], title: str, unit: str) -> None:
    from surrogap.experiments.figures import new_figure

    num_rows = -(-len(curves) // 2)
    figure, axes = new_figure(num_rows, 2, title)
    for axis, (label, curve) in zip(axes, curves.items(), strict=False):
        axis.plot(*zip(*curve, strict=True))
        axis.set(xlabel=unit, ylabel=label)
    for axis in axes[len(curves) :]:
        axis.set_axis_off()
    try:
        with atomic_write(path) as temporary:
            figure.savefig(temporary)
    except (OSError, ValueError) as error:
        raise InvalidValueError(
            f"png must be a file that can be written, got {path} ({error}). Pass another one."
        ) from error
