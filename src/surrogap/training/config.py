"""The configuration of a run: every setting of the training system, as dataclasses.

A `Config` consists of groups of fields. It is checked when it is built, and written to the run's
folder as JSON. `surrogap train` has one flag for each field: for the field `name` of a group the
flag is the name of the group, and for all others it is the name of the field. So
`Config(objective=SAMConfig(rho=0.1))` is `--objective sam --rho 0.1`, and
`config.override(objective="sam", rho=0.1)` changes both in an existing configuration. The group of
the objective has only the fields that the chosen objective uses.

A recipe is a named `Config` with its expected result. `surrogap.experiments.recipes.RECIPES` has
all recipes, and `surrogap train --recipe NAME` takes its defaults from one. These modules do not
import torch, so that `surrogap --help` is fast.
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

CONFIG = "config.json"  # the file in the folder of a run


@final
@dataclass(frozen=True)
class Config:
    """The configuration of a run.

    Attributes:
        model: The model.
        data: The images.
        objective: The objective.
        optimizer: The optimizer.
        schedule: Training length and learning-rate schedule.
        execution: Device, precision and parallelism.
        output: Records, evaluations and checkpoints.

    Raises:
        TypeError: A value has the wrong type.
        ValueError: A value is unknown or out of bounds, or two values do not fit together.

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
                f"batch_size={self.data.batch_size}. Pass a divisor of the batch size."
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
        """A captured step divides losses, and EntropySGD's direction is not linear in them."""
        execution = self.execution
        has_walks = (
            isinstance(self.objective, EntropySGDConfig) and execution.perturbation == "each"
        )
        if has_walks and execution.capture and execution.micro_batches > 1:
            raise InvalidValueError(
                "perturbation must be shared for entropy-sgd with capture, got each. "
                "Pass --perturbation shared, or --no-capture."
            )

    def _check_climb(self) -> None:
        objective, number = self.objective, self.execution.micro_batches
        if isinstance(objective, AscentConfig) and objective.climb_fraction < 1 and number > 1:
            raise InvalidValueError(
                f"climb_fraction must be 1 with micro-batches, got {objective.climb_fraction} and "
                f"micro_batches={number}. Pass one of the two."
            )

    def _check_radius(self) -> None:
        objective = self.objective
        if not isinstance(objective, PerturbedConfig) or objective.rho_min is None:
            return
        if self.schedule.decay == "constant" or self.schedule.lr_min == self.optimizer.lr:
            raise InvalidValueError(
                f"rho_min must be left out if the learning rate is constant, got "
                f"{objective.rho_min}. The radius follows the learning rate: pass only rho, or a "
                "decay."
            )

    @property
    def folder(self) -> Path:
        """The run's folder: `out`, or by default runs/DATA-MODEL-OBJECTIVE-SEED."""
        if self.output.out is not None:
            return Path(self.output.out).expanduser()
        data = Path(self.data.name).stem
        words = (data, self.model.name, self.objective.name, str(self.execution.seed))
        return Path("runs") / "-".join(words)

    def override(self, **values: Any) -> Self:
        """Return the configuration with other values for some fields, named as the flags are.

        With another objective, the settings that both objectives share are kept; see `converted`.

        Raises:
            NoEffectError: The objective does not use a field.
            ValueError: A field is unknown, or a value is not valid.

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
        """Return all fields, named as the flags are.

        >>> Config().flat()["objective"]
        'gsam'
        """
        return {
            group if name == "name" else name: getattr(own, name)
            for group, own in vars(self).items()
            for name in _names(own)
        }

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Return the groups as dictionaries for JSON."""
        values = dataclasses.asdict(self)
        values["optimizer"]["betas"] = list(self.optimizer.betas)
        return values

    def to_json(self) -> str:
        """Return the content of config.json."""
        return json.dumps(self.to_dict(), indent=2) + "\n"

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Build a configuration from the return value of `to_dict`; missing fields have defaults.

        Raises:
            TypeError: A value has the wrong type.
            ValueError: A group or a field is unknown, or a value is not valid.
        """
        groups: dict[str, Any] = {}
        for group, fields in values.items():
            if group not in _GROUPS:
                raise InvalidValueError(_unknown("group", group, _GROUPS))
            if not isinstance(fields, Mapping):
                raise InvalidTypeError(
                    f"{group} must be a dictionary of fields, got {fields!r}. Pass one."
                )
            kind: Any = _objective_class(fields) if group == "objective" else _GROUPS[group]
            for name in fields.keys() - _names(kind):
                raise InvalidValueError(_unknown(f"field of {group}", name, _names(kind)))
            values_of = {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}
            groups[group] = kind(**values_of)
        return cls(**groups)


def is_run(folder: Path) -> bool:
    """Return True if a folder has the configuration of a run."""
    return (folder / CONFIG).is_file()


def check_effect(names: Iterable[str], objective: ObjectiveConfig) -> None:
    """Check that an objective uses all fields in `names`.

    Raises:
        NoEffectError: It does not use one of them.

    >>> check_effect(["rho", "alpha"], GSAMConfig())
    """
    for name in names:
        if name not in _names(objective):
            raise NoEffectError(name, objective.name)


def _objective_class(fields: Mapping[str, Any]) -> type[ObjectiveConfig]:
    kind = config_class(fields.get("name", GSAMConfig.name))
    known = {name for other in CONFIGS.values() for name in _names(other)}
    check_effect(sorted(known & fields.keys()), kind())
    return kind


def _unknown(kind: str, name: str, known: Iterable[str]) -> str:
    guess = closest(name, known)
    remedy = f"The closest is {guess!r}." if guess else f"Known are {', '.join(sorted(known))}."
    return f"{kind} must be known, got {name!r}. {remedy}"


def _names(group: Any) -> list[str]:
    return [f.name for f in dataclasses.fields(group)]


_GROUPS: dict[str, Any] = get_type_hints(Config)

# The group and the field of each flag. Flags are written with underscores.
FIELDS: dict[str, tuple[str, str]] = {
    group if f.name == "name" else f.name: (group, f.name)
    for group, kind in _GROUPS.items()
    for own in (CONFIGS.values() if group == "objective" else (kind,))
    for f in dataclasses.fields(own)
}

# The fields that may change when a run is resumed, since they change results only by rounding. All
# others are the run's identity. (With scope "replica", the number of processes changes results, but
# it is not a field.)
FREE = {
    *("out", "data_root", "download", "num_workers", "eval_batch_size", "device", "parallel"),
    *("compile", "capture", "channels_last", "max_skipped"),
    *("record_every", "eval_every", "eval_on", "checkpoint_every", "tensorboard"),
    *("sharpness_every", "sharpness_images"),
}
