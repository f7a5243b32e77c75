"""Construction of the objective when a trainer has wrapped the model and built the optimizer."""

from collections.abc import Callable

from torch import nn
from torch.optim import Optimizer

from surrogap.core.objective import Objective
from surrogap.errors import InvalidTypeError

BuildObjective = Callable[[nn.Module, Optimizer], Objective]


def check_builder(objective: object) -> None:
    """Check that the `objective` argument of a trainer is a function.

    Raises:
        TypeError: It is not.
    """
    if isinstance(objective, Objective) or not callable(objective):
        raise InvalidTypeError(
            "objective must be a function of the model and the optimizer, got "
            f"{type(objective).__name__}. Pass one such as lambda model, optimizer: SAM(model)."
        )


def build_objective(build: BuildObjective, model: nn.Module, optimizer: Optimizer) -> Objective:
    """Call the function that the user passed to a trainer.

    Raises:
        TypeError: It did not return an objective.
    """
    objective = build(model, optimizer)
    if not isinstance(objective, Objective):
        raise InvalidTypeError(
            f"objective must return an objective, got {type(objective).__name__}. "
            "Return one such as SAM(model)."
        )
    return objective
