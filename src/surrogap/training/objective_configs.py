"""The configurations of the objectives: one dataclass for each, without torch.

Names, arguments and their defaults are those of `surrogap.core.catalog`. Each class has only the
fields that its objective uses, so that a setting without effect is an error.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal

from tyro.conf import arg

from surrogap.checks import one_of
from surrogap.core.catalog import DEFAULT_RHO, OBJECTIVES
from surrogap.errors import InvalidValueError
from surrogap.training.flags import OptionalFloat, optional
from surrogap.training.groups import Group

# Those of these fields that an objective has must not be negative.
_NON_NEGATIVE = ("rho", "rho_min", "alpha", "eta", "lam", "noise", "scoping")
_Name = Annotated[str, arg(name="objective", metavar=f"{{{','.join(OBJECTIVES)}}}")]


def _default(objective: str, argument: str) -> Any:
    return field(default=OBJECTIVES[objective].arguments[argument])


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig(Group):
    """Abstract configuration of an objective, with the fields that all objectives have."""

    _group = "objective"

    name: _Name = ""
    """The objective. The other settings of this group depend on it."""

    loss: Literal["cross-entropy", "sigmoid"] = "cross-entropy"
    """The loss f: softmax cross-entropy, or sigmoid cross-entropy summed over classes, which the
    authors use."""

    label_smoothing: float = 0.0
    """The fraction of a target that is spread over all classes; for cross-entropy."""

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of the objective's class."""
        known = OBJECTIVES[self.name].arguments
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name in known}

    @property
    def gap_rho(self) -> float:
        """The radius at which the surrogate gap over all weights is measured."""
        return DEFAULT_RHO

    def _check(self) -> None:
        own = CONFIGS.get(one_of("objective", self.name, OBJECTIVES))
        if own is not type(self):
            raise InvalidValueError(
                f"name must be the objective of {type(self).__name__}, got {self.name!r}. "
                "Leave it out, or use Config.override(objective=...)."
            )
        for name in _NON_NEGATIVE:
            if name in vars(self):
                self._number(name, remedy="Pass a non-negative number, such as 0.1.")
        self._number("label_smoothing", below=1.0, remedy="Pass a number such as 0.1.")
        if self.label_smoothing and self.loss == "sigmoid":
            raise InvalidValueError(
                f"label_smoothing must be 0 for the sigmoid loss, got {self.label_smoothing}. "
                "Pass it with loss cross-entropy."
            )


@dataclass(frozen=True, kw_only=True)
class VanillaConfig(ObjectiveConfig):
    """The plain gradient."""

    name: _Name = "vanilla"


@dataclass(frozen=True, kw_only=True)
class PerturbedConfig(ObjectiveConfig):
    """Abstract configuration of an objective that perturbs the weights, with radius rho."""

    rho: float
    """The radius. With --rho-min, the radius at lr."""

    rho_min: OptionalFloat = None
    """The radius at lr_min: the radius follows the learning rate. By default it is constant."""

    rho_inverse_sqrt: bool = False
    """Use the radius rho / sqrt(t) at step t, as in the paper's theorem 5.1."""

    perturb: Annotated[Literal["norms"] | None, optional("{norms}")] = _default("sam", "perturb")
    """Perturb only the affine parameters of normalisation layers (norms). By default all
    parameters."""

    every: int = 1
    """The number of steps from one use of the objective to the next. The other steps use the plain
    gradient."""

    start_epoch: int = 0
    """The number of epochs at the start that use the plain gradient."""

    def _check(self) -> None:
        super()._check()
        self._integer("every", at_least=1, remedy="Pass 1 to use the objective in every step.")
        self._integer("start_epoch", at_least=0, remedy="Pass 0 to use it from the start.")
        if self.rho_min is None:
            return
        if self.rho_inverse_sqrt:
            raise InvalidValueError(
                f"rho_min must be left out if the radius is rho / sqrt(t), got {self.rho_min}. "
                "Pass one of rho_min and rho_inverse_sqrt."
            )
        if self.rho_min > self.rho:
            raise InvalidValueError(
                f"rho_min must not exceed rho, got rho_min={self.rho_min} and rho={self.rho}. "
                "Pass the radius at the peak learning rate as rho."
            )


@dataclass(frozen=True, kw_only=True)
class AscentConfig(PerturbedConfig):
    """Abstract configuration of an objective that perturbs along the gradient of a first pass."""

    climb_fraction: float = 1.0
    """The fraction of the batch that the first pass uses."""

    scope: Annotated[Literal["replica", "global"] | None, optional("{replica,global}")] = _default(
        "sam", "scope"
    )
    """With several processes: perturb along each process's own gradient (replica), or along the
    mean (global). By default replica for ddp and global for fsdp2."""

    memory: Literal["exact", "low"] = _default("sam", "memory")
    """The extra copies of a step on a GPU: of the weights and the first gradient (exact), or of the
    weights only (low). With low, the gradient is recovered up to rounding."""

    @property
    def gap_rho(self) -> float:
        """See `ObjectiveConfig`. It is rho if all weights are perturbed."""
        return (self.rho or DEFAULT_RHO) if self.perturb is None else DEFAULT_RHO

    def _check(self) -> None:
        super()._check()
        remedy = "Pass a fraction such as 0.25, or 1 for the whole batch."
        self._number("climb_fraction", above=0.0, at_most=1.0, remedy=remedy)


@dataclass(frozen=True, kw_only=True)
class SAMConfig(AscentConfig):
    """SAM."""

    name: _Name = "sam"
    rho: float = _default("sam", "rho")


@dataclass(frozen=True, kw_only=True)
class GSAMConfig(AscentConfig):
    """GSAM."""

    name: _Name = "gsam"
    rho: float = _default("gsam", "rho")

    alpha: float = _default("gsam", "alpha")
    """The weight of the gap. 0 gives SAM, or the plain gradient with --minimize plain."""

    minimize: Literal["perturbed", "plain"] = _default("gsam", "minimize")
    """perturbed for min(f_p, h), the paper's method; plain for min(f, h)."""


@dataclass(frozen=True, kw_only=True)
class ASAMConfig(AscentConfig):
    """ASAM."""

    name: _Name = "asam"
    rho: float = _default("asam", "rho")

    eta: float = _default("asam", "eta")
    """The constant that is added to the magnitudes of the weights."""

    alpha: float = _default("asam", "alpha")
    """The weight of the gap, as in gsam."""

    @property
    def gap_rho(self) -> float:
        """See `ObjectiveConfig`."""
        return DEFAULT_RHO


@dataclass(frozen=True, kw_only=True)
class GapPenaltyConfig(AscentConfig):
    """The gap as a penalty."""

    name: _Name = "gap-penalty"
    rho: float = _default("gap-penalty", "rho")

    lam: float = _default("gap-penalty", "lam")
    """The weight of the gap in f_p + lam * h."""


@dataclass(frozen=True, kw_only=True)
class MomentumSAMConfig(PerturbedConfig):
    """Momentum-SAM: one pass, perturbed along the optimizer's momentum."""

    name: _Name = "momentum-sam"
    rho: float = _default("momentum-sam", "rho")


@dataclass(frozen=True, kw_only=True)
class EntropySGDConfig(ObjectiveConfig):
    """Entropy-SGD."""

    name: _Name = "entropy-sgd"

    gamma: float = _default("entropy-sgd", "gamma")
    """The strength of the pull of the inner steps towards the weights. The direction is
    gamma * (w - mu), so divide the lr of sgd by gamma. The lr of a recipe, and any lr in compare,
    is divided automatically."""

    inner_steps: int = _default("entropy-sgd", "inner_steps")
    """The number of inner steps, one pass each."""

    inner_lr: float = _default("entropy-sgd", "inner_lr")
    """The learning rate of the inner steps."""

    noise: float = _default("entropy-sgd", "noise")
    """The scale of the noise in the inner steps."""

    averaging: float = _default("entropy-sgd", "averaging")
    """The decay of the running average of the inner steps."""

    scoping: float = _default("entropy-sgd", "scoping")
    """The growth of gamma per step, as a fraction."""

    def _check(self) -> None:
        super()._check()
        self._number("gamma", above=0.0, remedy="Pass a positive number, such as 0.03.")
        self._number("inner_lr", above=0.0, remedy="Pass a positive number, such as 0.1.")
        self._number("averaging", below=1.0, remedy="Pass a number such as 0.75.")
        self._integer("inner_steps", at_least=1, remedy="Pass a number such as 5.")


CONFIGS: Mapping[str, type[ObjectiveConfig]] = {
    "vanilla": VanillaConfig,
    "sam": SAMConfig,
    "gsam": GSAMConfig,
    "asam": ASAMConfig,
    "gap-penalty": GapPenaltyConfig,
    "momentum-sam": MomentumSAMConfig,
    "entropy-sgd": EntropySGDConfig,
}


def config_class(name: str) -> type[ObjectiveConfig]:
    """Return the configuration class of an objective.

    Raises:
        ValueError: The name is unknown.

    >>> config_class("sam")().rho
    0.1
    """
    return CONFIGS[one_of("objective", name, OBJECTIVES)]


def converted(config: ObjectiveConfig, name: str) -> ObjectiveConfig:
    """Return the configuration of another objective, with the settings that both share.

    A setting is shared if both have it with the same default. If the defaults differ, as for `rho`
    of SAM and ASAM, its scale differs, and the default of the new objective is used.

    Raises:
        ValueError: The name is unknown.

    >>> asam = converted(GSAMConfig(rho=0.3, rho_min=0.1, alpha=0.1, perturb="norms"), "asam")
    >>> asam.rho, asam.rho_min, asam.alpha, asam.perturb
    (0.5, None, 0.0, 'norms')
    """
    old, new = ({f.name: f.default for f in fields(c)} for c in (type(config), config_class(name)))
    shared = {f for f in new if f in old and (old[f] == new[f] or name == config.name)}
    if "rho" not in shared:
        shared -= {"rho_min"}
    return config_class(name)(**{f: getattr(config, f) for f in shared})


class NoEffectError(InvalidValueError):
    """Raised for a setting that the chosen objective does not use."""

    def __init__(self, setting: str, objective: str) -> None:
        users = [n for n, kind in CONFIGS.items() if setting in {f.name for f in fields(kind)}]
        super().__init__(
            f"{setting} has no effect on {objective}. Leave it out, or choose an objective that "
            f"uses it: {', '.join(users)}."
        )
