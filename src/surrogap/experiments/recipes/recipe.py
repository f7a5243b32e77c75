"""A named configuration with its expected result, and the objectives of recipes.

This module does not import torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, final

from surrogap.training.config import Config

RECIPE_OBJECTIVES = ("vanilla", "sam", "gsam")


@final
@dataclass(frozen=True)
class Recipe:
    """A named configuration with its expected result.

    Attributes:
        name: The name for `--recipe`.
        config: The configuration.
        reproduces: The result that it reproduces, in one line.
        expected: The expected scores, and their source.
        accuracies: The paper's top-1 accuracies in percent, by test set; empty if it has none.
        notes: Differences from the source, with reasons, and other remarks.
        num_processes: The number of devices that it is meant for.

    >>> recipe = Recipe("fast", Config(), reproduces="nothing", expected="not run here")
    >>> recipe.command
    'surrogap train --recipe fast'
    """

    name: str
    config: Config
    reproduces: str
    expected: str
    notes: str = ""
    num_processes: int = 1
    accuracies: Mapping[str, float] = field(default_factory=dict)

    @property
    def command(self) -> str:
        """The command that trains the recipe."""
        if self.num_processes == 1:
            return f"surrogap train --recipe {self.name}"
        launcher = f"torchrun --nproc-per-node {self.num_processes} -m surrogap.cli"
        return f"{launcher} train --recipe {self.name}"


def recipe_objective(name: str, rho: float, rho_min: float, alpha: float) -> dict[str, Any]:
    """Return the settings of one of `RECIPE_OBJECTIVES`. SAM's radius is constant."""
    settings = {
        "vanilla": {},
        "sam": {"rho": rho},
        "gsam": {"rho": rho, "rho_min": rho_min, "alpha": alpha},
    }
    return {"objective": name, **settings[name]}
