"""How sharp a run ended: the surrogate gap over its training images, at its last weights."""

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from surrogap.analysis.gap import surrogate_gaps
from surrogap.analysis.surface import Surface
from surrogap.data import loader
from surrogap.experiments.comparison import MEASURED, NUM_ASCENT_STEPS
from surrogap.experiments.runs import Run
from surrogap.training.losses import loss_of


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
        ValueError: It has no checkpoint, or its images are not where they were.
    """
    splits = run.splits().to(device)
    loss = loss_of(run.config.objective)
    images = loader(
        splits,
        "train",
        batch_size=run.config.data.eval_batch_size or 4 * run.config.data.batch_size,
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
    return {
        "rho": rho,
        "loss": found.loss,
        "gap": found.gap,
        "sharpness": found.sharpness,
        "worst_gap": found.worst_gap,
        "worst_sharpness": found.worst_sharpness,
    }


def measure(folder: Path, rho: float, device: torch.device) -> None:
    """Measures a run unless that is done already, and writes it to the run's folder."""
    path = folder / MEASURED
    if not is_measured(folder, rho):
        found = gap_of(Run.read(folder), rho, device)
        temporary = path.with_name(f".{path.name}")
        temporary.write_text(json.dumps(found, indent=2) + "\n")
        os.replace(temporary, path)


def is_measured(folder: Path, rho: float) -> bool:
    """Whether a run is finished, and its gap is known for this radius."""
    path = folder / MEASURED
    if not path.is_file():
        return False
    found: dict[str, Any] = json.loads(path.read_text())
    return bool(found["rho"] == rho)
