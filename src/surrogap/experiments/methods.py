"""The runs of a comparison: objectives with one budget, and seeds. Nothing here needs torch."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, final

from surrogap.checks import one_of
from surrogap.core.catalog import OBJECTIVES
from surrogap.errors import InvalidValueError
from surrogap.experiments.recipes import RECIPES
from surrogap.training.config import FIELDS, Config
from surrogap.training.objective_configs import (
    AscentConfig,
    EntropySGDConfig,
    NoEffectError,
    ObjectiveConfig,
    PerturbedConfig,
    config_class,
)

_TWICE = "-2x"
_NORMS = "-norms"
_REMEDY = "A column is like sam, sam-2x, sam-norms or sam@every=5,rho=0.1."
# Optimizers whose step is proportional to the direction's length. Others normalise it.
_PROPORTIONAL = ("sgd", "asgd")


@final
@dataclass(frozen=True)
class Planned:
    """A run among others.

    Attributes:
        method: Its difference from the others: in a comparison, the column.
        config: The run's configuration.
    """

    method: str
    config: Config

    @property
    def num_passes(self) -> float:
        """Forward-backward passes over the batch in a step, as a mean over steps."""
        return num_passes(self.config.objective)

    @property
    def cost(self) -> float:
        """The run's length, in passes through the images or through batches."""
        schedule = self.config.schedule
        return self.num_passes * (schedule.steps or schedule.epochs)


def num_passes(objective: ObjectiveConfig) -> float:
    """Return the forward-backward passes over the batch in a step, as a mean over steps.

    A first pass on a part of the batch counts as that part, and a plain step as one pass. Plain
    steps before `start_epoch` are left out.

    >>> num_passes(Config().override(objective="sam", climb_fraction=0.25, every=5).objective)
    1.05
    """
    passes: float = OBJECTIVES[objective.name].num_passes(**objective.arguments())
    if isinstance(objective, AscentConfig):
        passes += objective.climb_fraction - 1
    return 1 + (passes - 1) / (objective.every if isinstance(objective, PerturbedConfig) else 1)


@final
@dataclass(frozen=True)
class Column:
    """A column of a comparison: an objective with settings of its own.

    Attributes:
        title: The column as it was typed.
        objective: The objective's name.
        is_twice: True for twice the epochs.
        settings: Fields of the configuration that differ from the other columns'.

    >>> Column.parse("sam-2x@every=5,rho=0.1").settings
    {'every': 5, 'rho': 0.1}
    >>> Column.parse("gsam-norms") == Column("gsam-norms", "gsam", False, {"perturb": "norms"})
    True
    """

    title: str
    objective: str
    is_twice: bool
    settings: Mapping[str, Any]

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read NAME[-norms][-2x][@FIELD=VALUE,...].

        Raises:
            ValueError: It does not name an objective, or what follows is not a list of fields.
        """
        name, has_settings, rest = text.partition("@")
        objective, settings = name.removesuffix(_TWICE), {}
        if objective.endswith(_NORMS):
            objective, settings = objective.removesuffix(_NORMS), {"perturb": "norms"}
        one_of("objectives", objective, OBJECTIVES, remedy=_REMEDY)
        for pair in rest.split(",") if has_settings else ():
            field, is_pair, value = pair.partition("=")
            field = field.replace("-", "_")
            if not is_pair or field in ("objective", "seed", "out"):
                raise InvalidValueError(
                    f"objectives must have settings as FIELD=VALUE, got {text!r}. Set any field "
                    f"but the objective, the seed and the folder. {_REMEDY}"
                )
            settings[field] = _value(value)
        return cls(text, objective, name.endswith(_TWICE), settings)

    def uses(self, field: str) -> bool:
        """Return True if a field of the configuration has an effect on this column."""
        return FIELDS[field][0] != "objective" or field in vars(config_class(self.objective)())

    def config(self, recipe: str, changes: Mapping[str, Any]) -> Config:
        """Return the configuration of a run in this column.

        Args:
            recipe: The recipe that all columns start from.
            changes: Other values for fields, in all columns that use them.
        """
        changes = {name: value for name, value in changes.items() if self.uses(name)}
        config = _recipe(recipe, self.objective).override(**{**changes, **self.settings})
        if "lr" not in self.settings:
            config = with_lr_of_gradient(config)
        return _twice(config) if self.is_twice else config


def planned(
    recipe: str,
    changes: Mapping[str, Any],
    methods: Sequence[str],
    seeds: Sequence[int],
    folder: Path,
) -> Iterator[Planned]:
    """Yield the runs of a comparison, seed by seed.

    Args:
        recipe: The recipe that they start from. Where it has siblings for other objectives, such
            as `cifar10-resnet18-sam` beside `cifar10-resnet18-gsam`, an objective has the radius
            of its own; others have their default radius.
        changes: Other values for fields of the recipes, in all columns that use them.
        methods: The columns, as `Column.parse` reads them.
        seeds: One run of each method for each.
        folder: The folder that holds the runs' folders.

    Raises:
        NoEffectError: No column uses one of the changes, or a column does not use its own setting.
        ValueError: A method is unknown, or a value is not valid.

    >>> runs = list(planned("fashion-mnist-gsam", {}, ("vanilla-2x", "asam"), (0, 1), Path("out")))
    >>> [str(run.config.folder) for run in runs]
    ['out/vanilla-2x-0', 'out/asam-0', 'out/vanilla-2x-1', 'out/asam-1']
    """
    columns = list(map(Column.parse, methods))
    for name in changes:
        if not any(column.uses(name) for column in columns):
            raise NoEffectError(name, " or ".join(column.objective for column in columns))
    for seed in seeds:
        for column in columns:
            config = column.config(recipe, changes)
            out = str(folder / f"{column.title}-{seed}")
            yield Planned(column.title, config.override(seed=seed, out=out))


def with_lr_of_gradient(config: Config) -> Config:
    """Return a configuration whose learning rate is meant for a gradient, for its objective.

    Entropy-SGD's direction is `gamma * (w - mu)`, so its learning rate is `lr / gamma`. What is
    relative to the direction follows: the decay of the weights in a step, and the clipping, stay.
    Optimizers that normalise the direction, such as Adam, need nothing, nor do other objectives.

    >>> config = with_lr_of_gradient(Config().override(objective="entropy-sgd", gamma=0.5, lr=0.1))
    >>> config.optimizer.lr
    0.2
    """
    objective, optimizer = config.objective, config.optimizer
    if not isinstance(objective, EntropySGDConfig) or optimizer.name not in _PROPORTIONAL:
        return config
    gamma, clip_norm = objective.gamma, optimizer.clip_norm
    return config.override(
        lr=optimizer.lr / gamma,
        lr_min=config.schedule.lr_min / gamma,
        weight_decay=optimizer.weight_decay * gamma,
        clip_norm=None if clip_norm is None else clip_norm * gamma,
    )


def _recipe(recipe: str, objective: str) -> Config:
    """A recipe for another objective: its sibling's, or its own with the default radius."""
    own = RECIPES[recipe]()
    sibling = f"{recipe.removesuffix(own.objective.name)}{objective}"
    if sibling in RECIPES:
        return RECIPES[sibling]()
    # By way of vanilla, which keeps nothing of the recipe's objective but the loss.
    return own.override(objective="vanilla").override(objective=objective)


def _twice(config: Config) -> Config:
    schedule = config.schedule
    steps = None if schedule.steps is None else 2 * schedule.steps
    return config.override(epochs=2 * schedule.epochs, steps=steps)


def _value(text: str) -> Any:
    """Read a value as the command line would.

    >>> [_value(text) for text in ("5", "0.1", "norms", "true", "none")]
    [5, 0.1, 'norms', True, None]
    """
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return {"true": True, "false": False, "none": None}.get(text.lower(), text)
