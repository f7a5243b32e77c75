"""The radius rho of the perturbation, as a number or a schedule."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, final

from torch.optim import Optimizer

from surrogap.checks import integer, number
from surrogap.errors import InvalidTypeError, InvalidValueError

_REMEDY = "Pass a non-negative number, such as 0.1."


class Schedule(ABC):
    """A radius that changes from step to step. Subclass it to define your own."""

    @abstractmethod
    def value(self) -> float:
        """Return the radius of the current step. May be called any number of times."""

    def advance(self) -> None:
        """Advance by one step. Called after each successful step, but not for `sync=False`."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state that the schedule keeps from step to step; by default empty."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state.

        Args:
            state: The state that `state_dict` returned.
        """

    def __repr__(self) -> str:
        numbers = [f"{k}={v:g}" for k, v in vars(self).items() if isinstance(v, int | float)]
        return f"{type(self).__name__}({', '.join(numbers)})"


def radius(rho: float | Schedule) -> float:
    """Check and return the radius of the current step."""
    return number("rho", rho.value() if isinstance(rho, Schedule) else rho, remedy=_REMEDY)


@final
class ProportionalToLR(Schedule):
    """A radius that follows the learning rate, as in the paper (section 5).

    `rho_t = rho_min + (rho_max - rho_min) * (lr_t - lr_min) / (lr_max - lr_min)`, clamped to
    `[0, rho_max]`, since during warm-up `lr_t` may be below `lr_min`. It reads the optimizer's
    learning rate at each step, so it has no state and works with any learning-rate scheduler.

    Args:
        optimizer: The optimizer whose learning rate to follow.
        rho_max: The radius at `lr_max`.
        rho_min: The radius at `lr_min`.
        lr_max: The largest learning rate of the run.
        lr_min: The smallest learning rate after warm-up.
        group: The index of the optimizer's parameter group to read.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: A bound is negative or not a number, `lr_min` is not below `lr_max`, `rho_min`
            is above `rho_max`, or there is no such group. At a step: the learning rate is above
            `lr_max`.

    >>> import torch
    >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.3)
    >>> rho = ProportionalToLR(optimizer, rho_max=0.6, rho_min=0.1, lr_max=0.5, lr_min=0.1)
    >>> round(rho.value(), 6)
    0.35
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        rho_max: float,
        rho_min: float,
        lr_max: float,
        lr_min: float,
        group: int = 0,
    ) -> None:
        if not isinstance(getattr(optimizer, "param_groups", None), list):
            raise InvalidTypeError(
                f"optimizer must be a torch optimizer, got {type(optimizer).__name__}. "
                "Pass the optimizer whose learning rate rho follows."
            )
        self.optimizer = optimizer
        self.rho_max = number("rho_max", rho_max, remedy=_REMEDY)
        self.rho_min = number("rho_min", rho_min, remedy=_REMEDY)
        self.lr_max = number("lr_max", lr_max, remedy="Pass the schedule's peak learning rate.")
        self.lr_min = number("lr_min", lr_min, remedy="Pass the schedule's last learning rate.")
        largest = len(optimizer.param_groups) - 1
        self.group = integer("group", group, at_least=0, at_most=largest, remedy="Pass 0.")
        if self.lr_min >= self.lr_max:
            raise InvalidValueError(
                f"lr_min must be below lr_max, got lr_min={lr_min} and lr_max={lr_max}. "
                f"For a constant radius pass rho={rho_max}."
            )
        if self.rho_min > self.rho_max:
            raise InvalidValueError(
                f"rho_min must not exceed rho_max, got rho_min={rho_min} and rho_max={rho_max}. "
                "The radius shrinks with the learning rate: swap the two."
            )

    def value(self) -> float:
        """Return the radius for the optimizer's current learning rate."""
        lr = float(self.optimizer.param_groups[self.group]["lr"])
        # Rounding may put a scheduler's peak slightly above `lr_max`, hence the tolerance.
        if not lr <= self.lr_max * (1 + 1e-6):
            raise InvalidValueError(
                f"lr_max must bound the learning rate, got lr={lr} and lr_max={self.lr_max}. "
                "Pass lr_max and lr_min as absolute learning rates of the optimizer."
            )
        slope = (self.rho_max - self.rho_min) / (self.lr_max - self.lr_min)
        rho = self.rho_min + slope * (lr - self.lr_min)
        return min(max(rho, 0.0), self.rho_max)


@final
class InverseSqrt(Schedule):
    """The radius of the paper's convergence theorem (5.1): `rho_t = rho_0 / sqrt(t)`, t from 1.

    It counts steps, so save the objective's `state_dict` with the optimizer's.

    Args:
        rho_0: The radius of the first step.

    Raises:
        TypeError: `rho_0` is not a number.
        ValueError: `rho_0` is negative, NaN or infinite.

    >>> rho = InverseSqrt(0.2)
    >>> for _ in range(3):
    ...     rho.advance()
    >>> rho.value()
    0.1
    """

    def __init__(self, rho_0: float) -> None:
        self.rho_0 = number("rho_0", rho_0, remedy=_REMEDY)
        self.num_steps = 0

    def value(self) -> float:
        """Return the radius of the current step."""
        return self.rho_0 / math.sqrt(self.num_steps + 1)

    def advance(self) -> None:
        """Count a step."""
        self.num_steps += 1

    def state_dict(self) -> dict[str, int]:
        """Return the number of steps taken."""
        return {"num_steps": self.num_steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Schedule`."""
        self.num_steps = num_steps(state)


def num_steps(state: Mapping[str, Any]) -> int:
    """Check and return the number of steps in a `state_dict`."""
    count = state.get("num_steps")
    if not isinstance(count, int) or count < 0:
        raise InvalidValueError(
            f"state must hold num_steps, a count of steps, got {dict(state)}. "
            "Pass what state_dict() returned."
        )
    return count
