"""The configuration of a run: every setting of the training system, as dataclasses.

A `Config` has a group for each part of the system. It is checked when it is made, written to the
run's folder as JSON, and is what `surrogap train` takes: one flag for each field. The flag of a
group's field `name` is the group's name, and the other flags are the fields' own. So
`Config(objective=SAMConfig(rho=0.1))` is `--objective sam --rho 0.1`, and
`config.override(objective="sam", rho=0.1)` changes both in an existing configuration. The group of
the objective has the fields that the chosen objective uses; any other is an error.

A recipe is a function without arguments that returns a `Config`. `surrogap.experiments.recipes` has
them by name, as `RECIPES`, and `surrogap train --recipe NAME` takes its defaults from there. This
module imports no torch, and that one need not either: that is why `surrogap --help` is quick.
"""

import dataclasses
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, final, get_type_hints

from surrogap.checks import closest
from surrogap.errors import InvalidTypeError, InvalidValueError
from surrogap.training.groups import (
    DataConfig,
    ExecutionConfig,
    ModelConfig,
    OptimizerConfig,
    OutputConfig,
    ScheduleConfig,
)
from surrogap.training.objective_configs import (
    CONFIGS,
    AscentConfig,
    EntropySGDConfig,
    GSAMConfig,
    NoEffectError,
    ObjectiveConfig,
    PerturbedConfig,
    config_class,
    converted,
)

__all__ = [
    "FIELDS",
    "Config",
    "DataConfig",
    "ExecutionConfig",
    "ModelConfig",
    "ObjectiveConfig",
    "OptimizerConfig",
    "OutputConfig",
    "ScheduleConfig",
]

# Fields that no objective has together: earlier versions had one group for all objectives.
_OF_SEVERAL_OBJECTIVES = {"alpha", "lam", "gamma"}


@final
@dataclass(frozen=True)
class Config:
    """A run.

    Attributes:
        model: The network.
        data: The images.
        objective: The objective.
        optimizer: The optimizer.
        schedule: Training length and learning-rate schedule.
        execution: Device, precision and parallelism.
        output: Records, evaluations and checkpoints.

    Raises:
        TypeError: A value has the wrong type.
        ValueError: A value is unknown or out of bounds, or two do not go together.

    >>> config = Config().override(objective="sam", rho=0.1)
    >>> config.override(rho=0.2, lr=0.05).objective.rho
    0.2
    >>> Config.from_dict(config.to_dict()) == config
    True
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    objective: ObjectiveConfig = field(default_factory=GSAMConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    execution: ExecutionConfig = field(default_factory=ExecutionConfig)
    output: OutputConfig = field(default_factory=OutputConfig)

    def __post_init__(self) -> None:
        if self.data.batch_size % self.execution.micro_batches:
            raise InvalidValueError(
                f"micro_batches must divide batch_size, got {self.execution.micro_batches} and "
                f"batch_size={self.data.batch_size}. Pass parts of one size."
            )
        lr, lr_min = self.optimizer.lr, self.schedule.lr_min
        if lr_min > lr:
            raise InvalidValueError(
                f"lr_min must not exceed lr, got lr_min={lr_min} and lr={lr}. "
                "The learning rate decays from lr to lr_min."
            )
        self._check_walks()
        self._check_climb()
        self._check_radius()

    def _check_walks(self) -> None:
        """A captured step divides losses, and EntropySGD's direction does not follow them."""
        execution = self.execution
        has_walks = (
            isinstance(self.objective, EntropySGDConfig) and execution.perturbation == "each"
        )
        if has_walks and execution.capture and execution.micro_batches > 1:
            raise InvalidValueError(
                "perturbation must be shared for entropy-sgd where a step is captured, got each. "
                "Pass --perturbation shared, or --no-capture."
            )

    def _check_climb(self) -> None:
        objective, num_parts = self.objective, self.execution.micro_batches
        if isinstance(objective, AscentConfig) and objective.climb_fraction < 1 and num_parts > 1:
            raise InvalidValueError(
                f"climb_fraction must be 1 where a batch is split into micro-batches, got "
                f"{objective.climb_fraction} and micro_batches={num_parts}. Pass one of the two."
            )

    def _check_radius(self) -> None:
        objective = self.objective
        if not isinstance(objective, PerturbedConfig) or objective.rho_min is None:
            return
        if self.schedule.decay == "constant" or self.schedule.lr_min == self.optimizer.lr:
            raise InvalidValueError(
                "rho_min must be left out where the learning rate does not decay, got "
                f"{objective.rho_min}. The radius follows the learning rate: pass rho alone, or "
                "let lr decay."
            )

    @property
    def folder(self) -> Path:
        """Where the run is kept: `out`, or a folder named by what is trained."""
        if self.output.out is not None:
            return Path(self.output.out).expanduser()
        data = Path(self.data.name).stem
        words = (data, self.model.name, self.objective.name, str(self.execution.seed))
        return Path("runs") / "-".join(words)

    def override(self, **values: Any) -> Self:
        """The same configuration with other values for some fields, named as the flags are.

        Under another objective, the settings that both share stay as they are; see `converted`.

        Raises:
            NoEffectError: The objective does not use a field.
            ValueError: There is no such field, or a value is not valid.

        >>> Config().override(objective="vanilla", epochs=40).schedule.epochs
        40
        """
        groups: dict[str, dict[str, Any]] = {group: {} for group in _GROUPS}
        for flag, value in values.items():
            if flag not in FIELDS:
                raise InvalidValueError(_unknown("field", flag, FIELDS))
            group, name = FIELDS[flag]
            groups[group][name] = value
        objective = converted(self.objective, groups["objective"].pop("name", self.objective.name))
        check_effect(groups["objective"], objective)
        old: dict[str, Any] = vars(self) | {"objective": objective}
        new = {g: dataclasses.replace(old[g], **changes) for g, changes in groups.items()}
        return dataclasses.replace(self, **new)

    def flat(self) -> dict[str, Any]:
        """All fields, named as the flags are.

        >>> Config().flat()["objective"]
        'gsam'
        """
        return {
            group if name == "name" else name: getattr(own, name)
            for group, own in vars(self).items()
            for name in _names(own)
        }

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """The groups as dictionaries, which JSON can hold."""
        values = dataclasses.asdict(self)
        values["optimizer"]["betas"] = list(self.optimizer.betas)
        return values

    def to_json(self) -> str:
        """The configuration as it is in a run's folder."""
        return json.dumps(self.to_dict(), indent=2) + "\n"

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """A configuration from what `to_dict` returned; what is left out has its default.

        Raises:
            TypeError: A value has the wrong type.
            ValueError: A group or a field is unknown, or a value is not valid.
        """
        if not isinstance(values, Mapping):
            raise InvalidTypeError(
                "configuration must be groups of fields, as a run's config.json has them, got "
                f"{values!r}. Pass such groups."
            )
        groups: dict[str, Any] = {}
        for group, fields in values.items():
            if group not in _GROUPS:
                raise InvalidValueError(_unknown("group", group, _GROUPS))
            if not isinstance(fields, Mapping):
                raise InvalidTypeError(
                    f"{group} must be a group of fields, got {fields!r}. Pass one."
                )
            kind: Any = _objective_class(fields) if group == "objective" else _GROUPS[group]
            for name in fields.keys() - _names(kind):
                raise InvalidValueError(_unknown(f"field of {group}", name, _names(kind)))
            values_of = {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}
            groups[group] = kind(**values_of)
        return cls(**groups)


def check_effect(names: Iterable[str], objective: ObjectiveConfig) -> None:
    """Check that an objective uses the fields of objectives that are named.

    Raises:
        NoEffectError: It does not use one.

    >>> check_effect(["rho", "alpha"], GSAMConfig())
    """
    for name in names:
        if name not in _names(objective):
            raise NoEffectError(name, objective.name)


def _objective_class(fields: Mapping[str, Any]) -> type[ObjectiveConfig]:
    if fields.keys() >= _OF_SEVERAL_OBJECTIVES:
        raise InvalidValueError(
            "configuration must hold the fields of one objective, got one of an earlier version "
            "of surrogap, with those of all. Train it again in another folder, or use that version."
        )
    kind = config_class(fields.get("name", GSAMConfig.name))
    known = {name for other in CONFIGS.values() for name in _names(other)}
    check_effect(sorted(known & fields.keys()), kind())
    return kind


def _unknown(kind: str, name: str, known: Iterable[str]) -> str:
    guess = closest(name, known)
    remedy = f"The closest is {guess!r}." if guess else f"Known are {', '.join(sorted(known))}."
    return f"{kind} must be one that a configuration has, got {name!r}. {remedy}"


def _names(group: Any) -> list[str]:
    return [f.name for f in dataclasses.fields(group)]


_GROUPS: dict[str, Any] = get_type_hints(Config)

# From a flag's name, with underscores, to the group and the field that it sets.
FIELDS: dict[str, tuple[str, str]] = {
    group if f.name == "name" else f.name: (group, f.name)
    for group, kind in _GROUPS.items()
    for own in (CONFIGS.values() if group == "objective" else (kind,))
    for f in dataclasses.fields(own)
}
