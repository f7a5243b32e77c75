"""Which runs a comparison has: objectives with the same budget, and seeds. It needs no torch."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final, get_args, get_type_hints

from surrogap.experiments.recipes import RECIPES
from surrogap.training.arguments import one_of
from surrogap.training.config import Config
from surrogap.training.groups import ObjectiveConfig

TWICE = "-2x"
OBJECTIVES: tuple[str, ...] = get_args(get_type_hints(ObjectiveConfig)["name"])


@final
@dataclass(frozen=True)
class Planned:
    """A run among others.

    Attributes:
        method: How it differs from them: in a comparison by an objective, perhaps for twice the
            epochs.
        config: What to train, and where.
    """

    method: str
    config: Config

    @property
    def num_passes(self) -> int:
        """How many times a step goes through its batch."""
        objective = self.config.objective
        if objective.name == "entropy-sgd":
            return objective.inner_steps
        return 2 if objective.has_radius else 1

    @property
    def cost(self) -> int:
        """How long it takes, in passes through the images or through batches."""
        schedule = self.config.schedule
        return self.num_passes * (schedule.steps or schedule.epochs)


def planned(
    recipe: str,
    changes: Mapping[str, Any],
    methods: Sequence[str],
    seeds: Sequence[int],
    folder: Path,
) -> Iterator[Planned]:
    """The runs of a comparison, seed by seed.

    Args:
        recipe: The recipe that they start from. Where it has siblings for other objectives, such
            as `cifar10-resnet18-sam` beside `cifar10-resnet18-gsam`, an objective has the radius
            of its own; others have their default radius.
        changes: Other values for fields of the recipes, in all runs.
        methods: Objectives; with `-2x` behind the name, for twice the epochs.
        seeds: One run of each method for each.
        folder: Where the runs' folders shall be.

    Raises:
        ValueError: A method is unknown, or a value is not valid.

    >>> runs = list(planned("fashion-mnist-gsam", {}, ("vanilla-2x", "asam"), (0, 1), Path("out")))
    >>> [str(run.config.folder) for run in runs]
    ['out/vanilla-2x-0', 'out/asam-0', 'out/vanilla-2x-1', 'out/asam-1']
    """
    for seed in seeds:
        for method in methods:
            out = str(folder / f"{method}-{seed}")
            config = _config(recipe, method).override(**changes, seed=seed, out=out)
            yield Planned(method, config if method in OBJECTIVES else _twice(config))


def _config(recipe: str, method: str) -> Config:
    """A recipe for another objective: its sibling's, or its own with the default radius."""
    own = RECIPES[recipe]()
    known = (*OBJECTIVES, *(f"{name}{TWICE}" for name in OBJECTIVES))
    objective = one_of("objectives", method, known).removesuffix(TWICE)
    sibling = f"{recipe.removesuffix(own.objective.name)}{objective}"
    if sibling in RECIPES:
        return RECIPES[sibling]()
    return own.override(objective=objective, rho=None, rho_min=None, alpha=None)


def _twice(config: Config) -> Config:
    schedule = config.schedule
    steps = None if schedule.steps is None else 2 * schedule.steps
    return config.override(epochs=2 * schedule.epochs, steps=steps)
