"""A planned run: a configuration to train, and its cost. This module does not import torch."""

from dataclasses import dataclass
from typing import final

from surrogap.core.catalog import OBJECTIVES
from surrogap.training.config import Config
from surrogap.training.objective_configs import AscentConfig, ObjectiveConfig, PerturbedConfig


@final
@dataclass(frozen=True)
class PlannedRun:
    """One of several runs that are trained one after another.

    Attributes:
        method: The name of what sets it apart from the other runs. In a comparison, the column.
        config: The configuration.
    """

    method: str
    config: Config

    @property
    def num_passes(self) -> float:
        """Forward-backward passes over the batch per step, averaged over steps."""
        return num_passes(self.config.objective)

    @property
    def cost(self) -> float:
        """The length of the run: passes times steps, or times epochs without `steps`."""
        schedule = self.config.schedule
        return self.num_passes * (schedule.steps or schedule.epochs)


def num_passes(objective: ObjectiveConfig) -> float:
    """Return the forward-backward passes over the batch per step, averaged over steps.

    A first pass over a fraction of the batch counts as that fraction, and a plain step as one pass.
    Plain steps before `start_epoch` are not counted.

    >>> num_passes(Config().override(objective="sam", climb_fraction=0.25, every=5).objective)
    1.05
    """
    passes: float = OBJECTIVES[objective.name].num_passes(**objective.arguments())
    if isinstance(objective, AscentConfig):
        passes += objective.climb_fraction - 1
    return 1 + (passes - 1) / (objective.every if isinstance(objective, PerturbedConfig) else 1)
