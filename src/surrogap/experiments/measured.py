"""The sharpness at the end of a run: the surrogate gap and the curvature at its last weights."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from surrogap.analysis.gap import surrogate_gaps
from surrogap.analysis.surface import Surface
from surrogap.atomic import atomic_write
from surrogap.data import loader
from surrogap.experiments.comparison import MEASURED, NUM_ASCENT_STEPS
from surrogap.experiments.probes import measured_at
from surrogap.experiments.runs import Run
from surrogap.experiments.surfaces import eval_batch_size, part_of, still_surface
from surrogap.training.failure import RunFailedError
from surrogap.training.losses import loss_of
from surrogap.training.processes import World

# From a run, a radius and a device to what was measured: "rho" and whatever else.
Measured = Callable[[Run, float, torch.device], dict[str, float]]

# The curvature takes some tens of gradients. Training with --sharpness-every measures on as many.
NUM_IMAGES = 1000


def gap_of(run: Run, rho: float, device: torch.device) -> dict[str, float]:
    """The gap `h` at a radius, with one perturbation for all training images, and `2h / rho^2`.

    Beside the paper's `h`, of one step of ascent, is that of the worst place that a few more steps
    find in the ball. A network that has learned its images by heart has hardly a gradient left, and
    its `h` of one step says little.

    The images are as they are, without augmentation, and the network is in evaluation mode.

    Args:
        run: A run with a checkpoint.
        rho: The radius.
        device: Where to compute.

    Raises:
        RunFailedError: Something is not finite there.
        ValueError: It has no checkpoint, or its images are not where they were.
    """
    splits = run.splits().to(device)
    loss = loss_of(run.config.objective)
    images = loader(
        splits,
        "train",
        batch_size=eval_batch_size(run.config),
        shuffle=False,
        drop_last=False,
        device=device,
        size=run.config.model.image_size,
        num_workers=run.config.data.num_workers,
    )

    def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return loss(model(batch[0]), batch[1])

    surface = Surface(run.network(splits, device), images, loss_fn, is_checked=False)
    (found,) = surrogate_gaps(surface, [rho], num_ascent_steps=NUM_ASCENT_STEPS).gaps
    names = ("loss", "gap", "sharpness", "worst_gap", "worst_sharpness")
    return {"rho": rho, **_finite({name: getattr(found, name) for name in names}, run)}


def sharpness_of(run: Run, rho: float, device: torch.device) -> dict[str, float]:
    """The gap at a radius and the dominant eigenvalue, on some of the training images.

    They are `NUM_IMAGES` drawn at random, the same ones for all runs on a set, and as they are. The
    network is in evaluation mode. The search for the worst place in the ball tries the eigenvector
    too, which at a minimum points there.

    Args:
        run: A run with a checkpoint.
        rho: The radius.
        device: Where to compute.

    Raises:
        RunFailedError: Something is not finite there.
        ValueError: It has no checkpoint, or its images are not where they were.
    """
    splits = run.splits()
    few = part_of(splits, NUM_IMAGES)
    model = run.network(splits, device)
    surface = still_surface(run.config, model, few, World(device), eval_batch_size(run.config))
    return {"num_images": len(few.train), **_finite(measured_at(surface, rho), run)}


def _finite(found: dict[str, float], run: Run) -> dict[str, float]:
    for name, value in found.items():
        if not math.isfinite(value):
            raise RunFailedError(
                f"{name} must be finite where a run has ended, got {value} in {run.folder}. "
                "Train with a smaller rho or alpha, or measure with a smaller --gap-rho."
            )
    return found


def measure(folder: Path, rho: float, device: torch.device, measured: Measured) -> None:
    """Measures a run unless that is done already, and writes it to the run's folder."""
    path = folder / MEASURED
    if not is_measured(folder, rho):
        found = measured(Run.read(folder), rho, device)
        with atomic_write(path) as temporary:
            temporary.write_text(json.dumps(found, indent=2) + "\n")


def is_measured(folder: Path, rho: float) -> bool:
    """Return whether a run is finished, and was measured at this radius."""
    path = folder / MEASURED
    if not path.is_file():
        return False
    found: dict[str, Any] = json.loads(path.read_text())
    return bool(found["rho"] == rho)
