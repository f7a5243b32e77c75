"""The recipe: a configuration with a name and what to expect of it, without torch."""

from dataclasses import dataclass
from typing import final

from surrogap.training.config import Config


@final
@dataclass(frozen=True)
class Recipe:
    """A configuration with a name, and what one needs to know before one spends hours on it.

    Attributes:
        name: What `--recipe` takes.
        config: What it trains.
        reproduces: What it reproduces, in a line.
        expected: What comes out, and who says so.
        notes: What else there is to know: where it departs from its source, and why.
        num_processes: On how many devices it is meant to run.

    >>> recipe = Recipe("fast", Config(), reproduces="nothing", expected="not run here")
    >>> recipe().schedule.epochs
    20
    >>> recipe.command
    'surrogap train --recipe fast'
    """

    name: str
    config: Config
    reproduces: str
    expected: str
    notes: str = ""
    num_processes: int = 1

    def __call__(self) -> Config:
        """The configuration."""
        return self.config

    @property
    def command(self) -> str:
        """The command that trains it."""
        if self.num_processes == 1:
            return f"surrogap train --recipe {self.name}"
        many = f"torchrun --nproc-per-node {self.num_processes} -m surrogap.cli"
        return f"{many} train --recipe {self.name}"
