"""Optimizers by name, and the learning rate of each step."""

import inspect
import math
from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from surrogap.checks import one_of
from surrogap.errors import InvalidValueError, MissingPackageError
from surrogap.training.groups import OptimizerConfig, ScheduleConfig

# The base class, and optimizers that need a closure or sparse gradients.
_OTHERS = {"Optimizer", "LBFGS", "SparseAdam"}
_BY_NAME: dict[str, type[Optimizer]] = {
    name.lower(): kind
    for name, kind in vars(torch.optim).items()
    if inspect.isclass(kind) and issubclass(kind, Optimizer) and name not in _OTHERS
}
# Each of these packages has AdaBelief.
_ADABELIEF_PACKAGES = ("adabelief_pytorch", "pytorch_optimizer")


def optimizer_of(config: OptimizerConfig, model: nn.Module, *, fused: bool = False) -> Optimizer:
    """Build the optimizer of a configuration, over all trainable parameters.

    Args:
        config: The name and settings.
        model: The model.
        fused: Use the fused implementation, which a captured step needs. It is not the default:
            fused SGD leaves its momentum uninitialised if a gradient scaler skips the first step.

    Raises:
        ImportError: Its package is not installed.
        ValueError: The name is unknown, or the optimizer rejects a setting.

    >>> optimizer_of(OptimizerConfig(name="adamw"), nn.Linear(2, 1)).defaults["betas"]
    (0.9, 0.999)
    """
    name = one_of("optimizer", config.name.lower(), [*_BY_NAME, "adabelief"])
    kind = _adabelief() if name == "adabelief" else _BY_NAME[name]
    known = inspect.signature(kind).parameters
    if config.weight_decay and "weight_decay" not in known:
        raise InvalidValueError(
            f"weight_decay must be 0 for {config.name}, which does not support it, got "
            f"{config.weight_decay}. Pass --weight-decay 0, or another optimizer."
        )
    settings: dict[str, Any] = {
        "lr": config.lr,
        "momentum": config.momentum,
        "nesterov": config.nesterov,
        "betas": config.betas,
        "fused": fused or None,
        "print_change_log": False,  # adabelief_pytorch prints a table otherwise
    }
    settings = {key: value for key, value in settings.items() if key in known}
    try:
        return kind(_groups(config, model, "weight_decay" in known), **settings)
    except (TypeError, ValueError) as error:
        raise InvalidValueError(
            f"optimizer must suit the model and the settings, got {config.name}: {error}. Pass "
            "other settings, or another optimizer."
        ) from error


def _groups(config: OptimizerConfig, model: nn.Module, can_decay: bool) -> list[dict[str, Any]]:
    weights = [p for p in model.parameters() if p.requires_grad]
    if not can_decay:
        return [{"params": weights}]
    if config.decay_on == "all":
        return [{"params": weights, "weight_decay": config.weight_decay}]
    groups = (
        {"params": [p for p in weights if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in weights if p.ndim < 2], "weight_decay": 0.0},
    )
    return [group for group in groups if group["params"]]


def _adabelief() -> type[Optimizer]:
    for package in _ADABELIEF_PACKAGES:
        try:
            kind: type[Optimizer] = import_module(package).AdaBelief
        except ModuleNotFoundError:
            continue
        return kind
    raise MissingPackageError(
        f"{' or '.join(_ADABELIEF_PACKAGES)} must be installed for adabelief, got neither. "
        f"Run pip install {_ADABELIEF_PACKAGES[0]}."
    )


class LearningRate:
    """The learning rate of each step: a linear warm-up, then a decay that ends at `lr_min`.

    It is a function of the step and has no state to save.

    Args:
        schedule: The settings.
        lr: The peak learning rate.
        num_steps: The number of steps of the run.
        steps_per_epoch: The number of steps of an epoch.

    Raises:
        ValueError: The warm-up is not shorter than the run.

    >>> rate = LearningRate(ScheduleConfig(warmup_steps=2, decay="linear", lr_min=0.1), 0.5, 7, 7)
    >>> [round(rate(step), 6) for step in range(7)]
    [0.25, 0.5, 0.5, 0.4, 0.3, 0.2, 0.1]
    """

    def __init__(
        self, schedule: ScheduleConfig, lr: float, num_steps: int, steps_per_epoch: int
    ) -> None:
        self.warmup = schedule.warmup_steps or round(schedule.warmup_epochs * steps_per_epoch)
        if self.warmup >= num_steps:
            raise InvalidValueError(
                f"warmup_steps must be fewer than the steps of the run, got {self.warmup} of "
                f"{num_steps}. Pass a shorter warm-up, or train for longer."
            )
        self.schedule = schedule
        self.lr = lr
        self.num_steps = num_steps

    def __call__(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        progress = (step - self.warmup) / max(self.num_steps - 1 - self.warmup, 1)
        fraction = {
            "constant": 1.0,
            "linear": 1.0 - progress,
            "cosine": (1.0 + math.cos(math.pi * progress)) / 2.0,
        }[self.schedule.decay]
        return self.schedule.lr_min + (self.lr - self.schedule.lr_min) * fraction

    def set_(self, optimizer: Optimizer, step: int) -> None:
        """Set the learning rate of an optimizer to that of a step."""
        for group in optimizer.param_groups:
            group["lr"] = self(step)
