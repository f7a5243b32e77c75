"""The objective that a configuration names."""

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import Optimizer

from surrogap.core.entropy import EntropySGD
from surrogap.core.objective import Objective
from surrogap.core.objectives import ASAM, GSAM, SAM, GapPenalty, Vanilla
from surrogap.core.rho import InverseSqrt, ProportionalToLR, Schedule
from surrogap.training.config import Config

_COMMON = ("scope", "memory")

# By name: the class, and which fields it takes beside the radius.
_OBJECTIVES: dict[str, tuple[Callable[..., Objective], tuple[str, ...]]] = {
    "vanilla": (Vanilla, ()),
    "sam": (SAM, _COMMON),
    "gsam": (GSAM, (*_COMMON, "alpha", "minimize")),
    "asam": (ASAM, (*_COMMON, "alpha", "eta")),
    "gap-penalty": (GapPenalty, (*_COMMON, "lam")),
    "entropy-sgd": (
        EntropySGD,
        ("gamma", "inner_steps", "inner_lr", "noise", "averaging", "scoping"),
    ),
}


def objective_of(config: Config, model: nn.Module, optimizer: Optimizer) -> Objective:
    """The objective, over a model and with a radius that may follow the optimizer.

    Raises:
        ValueError: Its scope does not fit the model's processes.

    >>> import torch
    >>> model = nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> objective_of(Config().override(objective="sam", rho=0.2), model, optimizer).rho
    0.2
    """
    kind, fields = _OBJECTIVES[config.objective.name]
    settings: dict[str, Any] = {name: getattr(config.objective, name) for name in fields}
    if config.objective.has_radius:
        settings["rho"] = _rho(config, optimizer)
    # None stands for the objective's own default.
    return kind(model, **{name: value for name, value in settings.items() if value is not None})


def _rho(config: Config, optimizer: Optimizer) -> float | Schedule | None:
    rho, rho_min = config.objective.rho, config.objective.rho_min
    if config.objective.rho_inverse_sqrt:
        return InverseSqrt(_default_rho(config) if rho is None else rho)
    if rho is None or rho_min is None:
        return rho
    return ProportionalToLR(
        optimizer,
        rho_max=rho,
        rho_min=rho_min,
        lr_max=config.optimizer.lr,
        lr_min=config.schedule.lr_min,
    )


def _default_rho(config: Config) -> float:
    return 0.5 if config.objective.name == "asam" else 0.05


def counting_state(objective: Objective) -> dict[str, int]:
    """What an objective counts: the steps of its radius or of its scoping; of most, nothing."""
    counter = _counter(objective)
    return {} if counter is None else counter.state_dict()


def load_counting_state(objective: Objective, state: dict[str, int]) -> None:
    """Lets an objective continue to count."""
    counter = _counter(objective)
    if counter is not None:
        counter.load_state_dict(state)


def _counter(objective: Objective) -> EntropySGD | InverseSqrt | None:
    if isinstance(objective, EntropySGD):
        return objective
    rho = getattr(objective, "rho", None)
    return rho if isinstance(rho, InverseSqrt) else None
