"""The columns of a comparison, and their runs. This module does not import torch."""

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, final

from surrogap.checks import one_of
from surrogap.core.catalog import OBJECTIVES
from surrogap.errors import InvalidValueError
from surrogap.experiments.planned import PlannedRun
from surrogap.experiments.recipes import RECIPES
from surrogap.training.config import FIELDS, Config
from surrogap.training.groups import OutputConfig
from surrogap.training.objective_configs import (
    EntropySGDConfig,
    NoEffectError,
    config_class,
)

_TWICE = "-2x"
_NORMS = "-norms"
_REMEDY = "Examples of columns: sam, sam-2x, sam-norms, sam@every=5,rho=0.1."
# Optimizers whose step is proportional to the length of the direction. Others normalise it.
_PROPORTIONAL = ("sgd", "asgd")


@final
@dataclass(frozen=True)
class Column:
    """A column of a comparison: an objective with settings of its own.

    Attributes:
        title: The column as the user typed it.
        objective: The name of the objective.
        is_twice: Whether to train for twice the epochs.
        settings: Values for fields of the configuration, in this column only.

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
        """Parse `NAME[-norms][-2x][@FIELD=VALUE,...]`.

        Raises:
            ValueError: The objective is unknown, or the settings are not a list of fields.
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
                    f"objectives must have settings of the form FIELD=VALUE, got {text!r}. Any "
                    f"field except objective, seed and out can be set. {_REMEDY}"
                )
            settings[one_of(f"setting of {text}", field, FIELDS, remedy=_REMEDY)] = _value(value)
        return cls(text, objective, name.endswith(_TWICE), settings)

    def uses(self, field: str) -> bool:
        """Return whether a field of the configuration has an effect in this column."""
        return FIELDS[field][0] != "objective" or field in vars(config_class(self.objective)())

    def config(self, recipe: str, changes: Mapping[str, Any]) -> Config:
        """Return the configuration of a run in this column."""
        changes = {name: value for name, value in changes.items() if self.uses(name)}
        config = _recipe_for(recipe, self.objective).override(**{**changes, **self.settings})
        config = with_lr_of_gradient(config, given=self.settings)
        return _twice(config) if self.is_twice else config


def column_runs(
    recipe: str,
    changes: Mapping[str, Any],
    methods: Sequence[str],
    seeds: Sequence[int],
    folder: Path,
) -> Iterator[PlannedRun]:
    """Yield the runs of a comparison, seed by seed.

    Args:
        recipe: The name of the recipe that all runs start from. If the recipe also exists for a
            column's objective (`cifar10-resnet18-sam` for `cifar10-resnet18-gsam`), that column
            uses the radius of that recipe; otherwise the objective's default radius.
        changes: New values for fields of the recipes, in all columns that use them.
        methods: The columns, in the syntax of `Column.parse`.
        seeds: The seeds, each for one run per column.
        folder: The parent of the runs' folders.

    Raises:
        NoEffectError: No column uses some change, or a column does not use one of its own settings.
        ValueError: A column or a value is not valid.

    >>> methods = ("vanilla-2x", "asam")
    >>> runs = column_runs("fashion-mnist-gsam", {}, methods, (0, 1), Path("out"))
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
            _check_output(config.output)
            out = str(folder / f"{column.title}-{seed}")
            yield PlannedRun(column.title, config.override(seed=seed, out=out))


def _check_output(output: OutputConfig) -> None:
    """Check that a run of a comparison has test scores, and a checkpoint to measure the gap of."""
    if output.eval_on == "val":
        raise InvalidValueError(
            "eval_on must be test or both in a comparison, got val. Its table has test scores."
        )
    if output.checkpoint_every == 0:
        raise InvalidValueError(
            "checkpoint_every must be above 0 in a comparison, got 0. The gap is measured at the "
            "last checkpoint."
        )


def with_lr_of_gradient(config: Config, given: Container[str] = ()) -> Config:
    """Convert settings that were chosen for gradients to the objective's direction.

    The direction of Entropy-SGD is `gamma * (w - mu)`, so its learning rate is `lr / gamma`. Weight
    decay and the clipping norm are multiplied by `gamma`, which keeps the decay per step and the
    relative clipping. Fields in `given`, which were chosen for the direction, are left unchanged,
    as are other objectives and optimizers that normalise the direction, such as Adam.

    >>> config = with_lr_of_gradient(Config().override(objective="entropy-sgd", gamma=0.5, lr=0.1))
    >>> config.optimizer.lr
    0.2
    """
    objective = config.objective
    is_proportional = config.optimizer.name.lower() in _PROPORTIONAL
    if not isinstance(objective, EntropySGDConfig) or not is_proportional:
        return config
    gamma, values = objective.gamma, config.flat()
    factors = {"lr": 1 / gamma, "lr_min": 1 / gamma, "weight_decay": gamma, "clip_norm": gamma}
    return config.override(
        **{
            name: factor * values[name]
            for name, factor in factors.items()
            if name not in given and values[name] is not None
        }
    )


def _recipe_for(recipe: str, objective: str) -> Config:
    """Return the recipe's variant for an objective, or the recipe with the default radius."""
    own = RECIPES[recipe].config
    sibling = f"{recipe.removesuffix(own.objective.name)}{objective}"
    if sibling in RECIPES:
        return RECIPES[sibling].config
    # Through vanilla, which drops all settings of the recipe's objective except the loss.
    return own.override(objective="vanilla").override(objective=objective)


def _twice(config: Config) -> Config:
    schedule = config.schedule
    steps = None if schedule.steps is None else 2 * schedule.steps
    return config.override(epochs=2 * schedule.epochs, steps=steps)


def _value(text: str) -> Any:
    """Parse a value as the command line does.

    >>> [_value(text) for text in ("5", "0.1", "norms", "true", "none")]
    [5, 0.1, 'norms', True, None]
    """
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return {"true": True, "false": False, "none": None}.get(text.lower(), text)
