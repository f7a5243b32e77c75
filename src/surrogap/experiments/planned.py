"""A planned run: a configuration to train, and its cost. This module does not import torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import final

from surrogap.core.catalog import OBJECTIVES
from surrogap.training.config import Config
from surrogap.training.objective_configs import AscentConfig, ObjectiveConfig, PerturbedConfig


@final
@dataclass(frozen=True)
class PlannedRun:
    """One of several runs that are trained one after another.

    Attributes:
        method: A name that distinguishes it from the other runs; in a comparison, the column.
        config: The configuration.
    """

    method: str
    config: Config

    @property
    def subject(self) -> str:
        """The model and the dataset, in a line."""
        data = self.config.data.name
        shown = "Fashion-MNIST" if data == "embedded" else Path(data).stem
        return f"{self.config.model.name} on {shown}"

    @property
    def num_passes(self) -> float:
        """Forward-backward passes over the batch per step, averaged over the run."""
        epochs = self.config.schedule.epochs
        return num_passes(self.config.objective, epochs) / epochs

    @property
    def cost(self) -> float:
        """The length of the run: passes times steps, or times epochs without `steps`."""
        schedule = self.config.schedule
        return self.num_passes * (schedule.steps or schedule.epochs)


def num_passes(objective: ObjectiveConfig, epochs: float) -> float:
    """Return the forward-backward passes over the training images in the first `epochs`.

    A first pass over a fraction of the batch counts as that fraction.

    >>> num_passes(Config().override(objective="sam", start_epoch=20).objective, epochs=100)
    180.0
    """
    passes: float = OBJECTIVES[objective.name].num_passes(**objective.arguments())
    if isinstance(objective, AscentConfig):
        passes += objective.climb_fraction - 1
    if not isinstance(objective, PerturbedConfig):
        return passes * epochs
    return epochs + (passes - 1) * max(epochs - objective.start_epoch, 0) / objective.every
