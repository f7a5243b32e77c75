"""The objective of a configuration."""

from torch import nn
from torch.optim import Optimizer

from surrogap.core.catalog import create_objective
from surrogap.core.intermittent import Intermittent
from surrogap.core.objective import Objective
from surrogap.core.rho import InverseSqrt, ProportionalToLR, Schedule
from surrogap.errors import InvalidValueError
from surrogap.training.config import Config
from surrogap.training.objective_configs import PerturbedConfig


def objective_of(
    config: Config, model: nn.Module, optimizer: Optimizer, steps_per_epoch: int
) -> Objective:
    """Build the objective of a configuration.

    Args:
        config: The configuration of the run.
        model: The model to train.
        optimizer: Its optimizer, whose learning rate the radius may follow.
        steps_per_epoch: The number of steps of an epoch, for `start_epoch`.

    Raises:
        ValueError: Its scope does not fit the processes of the model, or the run ends before
            `start_epoch`.

    >>> import torch
    >>> model = nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> config = Config().override(objective="sam", rho=0.2)
    >>> objective_of(config, model, optimizer, steps_per_epoch=10).rho
    0.2
    """
    settings, arguments = config.objective, config.objective.arguments()
    if not isinstance(settings, PerturbedConfig):
        return create_objective(settings.name, model, optimizer, **arguments)
    arguments["rho"] = rho_of(config, settings, optimizer)
    objective = create_objective(settings.name, model, optimizer, **arguments)
    if settings.every == 1 and settings.start_epoch == 0:
        return objective
    start, num_steps = settings.start_epoch * steps_per_epoch, config.schedule.steps
    if start >= (num_steps or config.schedule.epochs * steps_per_epoch):
        raise InvalidValueError(
            f"start_epoch must be before the end of the run, got {settings.start_epoch} with "
            f"{steps_per_epoch} steps in an epoch. Pass a smaller one, or train for longer."
        )
    return Intermittent(objective, every=settings.every, start=start)


def rho_of(config: Config, settings: PerturbedConfig, optimizer: Optimizer) -> float | Schedule:
    """Return the radius of a configuration's objective: a number or a schedule."""
    if settings.rho_inverse_sqrt:
        return InverseSqrt(settings.rho)
    if settings.rho_min is None:
        return settings.rho
    return ProportionalToLR(
        optimizer,
        rho_max=settings.rho,
        rho_min=settings.rho_min,
        lr_max=config.optimizer.lr,
        lr_min=config.schedule.lr_min,
    )
