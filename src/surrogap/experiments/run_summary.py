"""The summary of a run, and its curves, from its records."""

import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from surrogap.atomic import atomic_write
from surrogap.errors import InvalidValueError
from surrogap.experiments.plotting import Points, new_figure
from surrogap.experiments.text_table import Table
from surrogap.experiments.trained import TrainedRun
from surrogap.training.config import Config
from surrogap.training.records import Record, training_loss

# Values of epoch records that are drawn, if they were recorded.
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
# Values of sharpness records, which `--sharpness-every` writes.
_SHARPNESS = {"eigenvalue": "dominant eigenvalue", "worst_sharpness": "worst 2h/rho^2"}
# Settings of an objective that are shown unless they have these values, which have no effect.
_SETTINGS = {
    **dict.fromkeys(("rho", "rho_min", "alpha", "perturb")),
    "climb_fraction": 1.0,
    "every": 1,
    "start_epoch": 0,
}


def summary_table(run: TrainedRun, records: Sequence[Record]) -> Table:
    """Return the settings of a run, its progress and its scores."""
    config, last = run.config, records[-1]
    epochs = [record for record in records if record["kind"] == "epoch"]
    rows = [
        ("model", config.model.name),
        ("data", f"{config.data.name}, augmentation {config.data.augmentation}"),
        ("objective", _objective(config)),
        ("optimizer", f"{config.optimizer.name}, lr {config.optimizer.lr:g}"),
        ("steps", _steps(run, last["step"], epochs)),
    ]
    if epochs:
        rows.append(("epochs", f"{epochs[-1]['epoch']}"))
        rows.append(("training time", f"{epochs[-1]['seconds']:.1f} s"))
        rows.append(("throughput", f"{epochs[-1]['images_per_second']:,.0f} images/s"))
    scored = [record for record in epochs if record.get("test_accuracy") is not None]
    if scored:
        end = scored[-1]
        rows += [
            ("test accuracy", f"{100 * end['test_accuracy']:.2f} %"),
            ("test loss", _number(end["test_loss"], "{:.4f}")),
            ("calibration error", _number(end["test_calibration_error"], "{:.2f} %", factor=100)),
        ]
    skipped = sum(record["kind"] == "skip" for record in records)
    if skipped:
        rows.append(("skipped steps", f"{skipped}, whose loss was not finite"))
    overflows = sum(record.get("overflows", 0) for record in epochs)
    if overflows:
        rows.append(("overflows", f"{overflows} steps, whose gradient was not finite"))
    if last["kind"] == "failure":
        rows.append(("failed", last["reason"]))
    return Table(("", str(run.folder)), rows)


def _objective(config: Config) -> str:
    values = {name: getattr(config.objective, name, None) for name in _SETTINGS}
    settings = ", ".join(
        f"{name} {value if isinstance(value, str) else format(value, 'g')}"
        for name, value in values.items()
        if value is not None and value != _SETTINGS[name]
    )
    return config.objective.name + (f" ({settings})" if settings else "")


def _steps(run: TrainedRun, step: int, epochs: Sequence[Record]) -> str:
    """Return the number of steps; for an unfinished run, also the total and how to continue."""
    schedule = run.config.schedule
    end = schedule.steps or (schedule.epochs * epochs[0]["step"] if epochs else None)
    if step == end:
        return f"{step}"
    total = f"{schedule.epochs} epochs" if end is None else f"{end}"
    command = f"surrogap train --resume --out {shlex.quote(str(run.folder))}"
    return f"{step} of {total}, unfinished ({command} continues)"


def _number(value: float | None, text: str, factor: float = 1.0) -> str:
    return "not finite" if value is None else text.format(factor * value)


def curves_of(records: Sequence[Record]) -> tuple[dict[str, Points], str]:
    """Return the curves of a run by their label, and the unit of their x axis.

    The unit is the epoch; before the end of the first epoch it is the step.
    """
    epochs = [record for record in records if record["kind"] == "epoch"]
    points = epochs or [record for record in records if record["kind"] == "step"]
    measured = [record for record in records if record["kind"] == "sharpness"]
    steps_per_unit = epochs[0]["step"] / epochs[0]["epoch"] if epochs else 1.0

    def position(record: Record) -> float:
        return float(record.get("epoch", record["step"] / steps_per_unit))

    curves = {
        label: found
        for kind, labels in ((points, _CURVES), (measured, _SHARPNESS))
        for name, label in labels.items()
        if (found := curve(kind, name, position))
    }
    return curves if points else {}, "epoch" if epochs else "step"


def curve(records: Sequence[Record], name: str, position: Callable[[Record], float]) -> Points:
    """Return a value's curve over records. Records without a finite value are left out."""
    values = [training_loss(r) if name == "loss" else r.get(name) for r in records]
    pairs = zip(records, values, strict=True)
    return [(position(record), float(value)) for record, value in pairs if value is not None]


def draw_curves(path: Path, curves: Mapping[str, Points], title: str, unit: str) -> None:
    """Draw curves to an image file, two panels in a row.

    Raises:
        ValueError: The file is not writable.
    """
    figure, axes = new_figure(-(-len(curves) // 2), 2, title)
    for axis, (label, curve) in zip(axes, curves.items(), strict=False):
        axis.plot(*zip(*curve, strict=True))
        axis.set(xlabel=unit, ylabel=label)
    for axis in axes[len(curves) :]:
        axis.set_axis_off()
    try:
        with atomic_write(path) as temporary:
            figure.savefig(temporary)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise InvalidValueError(
            f"png must be a writable file, got {path} ({reason}). Pass another --png."
        ) from error
