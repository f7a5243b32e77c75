"""The sharpness of finished runs, measured at their last weights."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import torch

from surrogap.analysis.gap import DERIVED, surrogate_gaps
from surrogap.analysis.surface import Surface
from surrogap.atomic import atomic_write
from surrogap.experiments.comparison import MEASUREMENTS, NUM_ASCENT_STEPS
from surrogap.experiments.probes import sharpness_at
from surrogap.experiments.surfaces import loss_fn_of, random_subset, unaugmented_loader
from surrogap.experiments.trained import TrainedRun
from surrogap.training.failure import RunFailedError
from surrogap.training.processes import World

# Measures a run at a radius on a device. Returns "rho" and the measured values by name.
MeasureFn = Callable[[TrainedRun, float, torch.device], dict[str, float]]

# The curvature takes tens of gradients, hence a subset: the default size of `--sharpness-images`.
NUM_IMAGES = 1000


def measure_gap(run: TrainedRun, rho: float, device: torch.device) -> dict[str, float]:
    """Measure the gap `h` and `2h / rho^2`, with one perturbation for all training images.

    `worst_gap` is the largest `h` that a few more ascent steps find in the ball. If a model fits
    its training images almost perfectly, its gradient is nearly zero, and the paper's `h` after one
    ascent step says little.

    The images are not augmented, and the model is in evaluation mode.

    Raises:
        RunFailedError: A measured value is not finite.
        ValueError: The run has no checkpoint, or its images are missing.
    """
    splits = run.splits().to(device)
    images = unaugmented_loader(run.config, splits, World(device))
    loss_fn = loss_fn_of(run.config.objective)
    surface = Surface(run.model(splits, device), images, loss_fn, is_checked=False)
    (gap,) = surrogate_gaps(surface, [rho], num_ascent_steps=NUM_ASCENT_STEPS).gaps
    values = {name: getattr(gap, name) for name in ("loss", *DERIVED)}
    return {"rho": rho, **_finite(values, run)}


def measure_sharpness(run: TrainedRun, rho: float, device: torch.device) -> dict[str, float]:
    """Measure the gap and the dominant eigenvalue on a subset of the training images.

    The subset is `NUM_IMAGES` random images, the same for all runs on a dataset. They are not
    augmented, and the model is in evaluation mode. The search for the largest gap in the ball also
    tries the dominant eigenvector, the worst direction at a minimum. Raises the errors of
    `measure_gap`.
    """
    splits = run.splits()
    images = random_subset(splits, NUM_IMAGES)
    batches = list(unaugmented_loader(run.config, images, World(device)))
    loss_fn = loss_fn_of(run.config.objective)
    values = sharpness_at(run.model(splits, device), batches, loss_fn, rho)
    values.setdefault("eigenvalue", math.nan)  # if loss or Hessian is not finite
    return {"num_images": len(images.train), **_finite(values, run)}


def _finite(values: dict[str, float], run: TrainedRun) -> dict[str, float]:
    for name, value in values.items():
        if not math.isfinite(value):
            raise RunFailedError(
                f"{name} must be finite at the end of a run, got {value} in {run.folder}. "
                "Train with a smaller rho or alpha, or measure with a smaller --gap-rho."
            )
    return values


def write_measurements(folder: Path, rho: float, device: torch.device, measure: MeasureFn) -> None:
    """Measure a finished run, and write the values to its folder."""
    values = measure(TrainedRun.read(folder), rho, device)
    with atomic_write(folder / MEASUREMENTS) as temporary:
        temporary.write_text(json.dumps(values, indent=2) + "\n")


def has_measurements(folder: Path, rho: float) -> bool:
    """Return whether a run is finished and was measured at this radius."""
    path = folder / MEASUREMENTS
    return path.is_file() and bool(json.loads(path.read_text())["rho"] == rho)
