"""The objectives by name, without loading torch: their classes, arguments and cost.

The command line needs names, arguments and the number of passes before torch is loaded. They are
listed here once; a test checks the list against the classes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, final

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from surrogap.core.objective import Objective

# The arguments that two-pass objectives share, and their defaults.
SHARED = {"perturb": None, "scope": None, "memory": "exact", "eps": 1e-12}
# The default radius of SAM, GSAM and the gap penalty, and GSAM's alpha. docs/how-to/choose.md has
# the measurements.
DEFAULT_RHO = 0.1
DEFAULT_ALPHA = 0.1


@final
@dataclass(frozen=True)
class Entry:
    """One objective.

    Attributes:
        class_name: The name of its class in `surrogap`.
        arguments: Its keyword arguments and their defaults.
        passes: The number of forward-backward passes of a step, or the argument that sets it.
        takes_optimizer: Whether its constructor takes the optimizer as well as the model.
    """

    class_name: str
    arguments: Mapping[str, Any]
    passes: int | str = 2
    takes_optimizer: bool = False

    def num_passes(self, **arguments: Any) -> int:
        """Return the number of passes of a step with these arguments."""
        if isinstance(self.passes, int):
            return self.passes
        value: int = {**self.arguments, **arguments}[self.passes]
        return value


OBJECTIVES: Mapping[str, Entry] = {
    "vanilla": Entry("Vanilla", {}, passes=1),
    "sam": Entry("SAM", {"rho": DEFAULT_RHO, **SHARED}),
    "gsam": Entry(
        "GSAM", {"rho": DEFAULT_RHO, "alpha": DEFAULT_ALPHA, "minimize": "perturbed", **SHARED}
    ),
    "asam": Entry("ASAM", {"rho": 0.5, "eta": 0.01, "alpha": 0.0, **SHARED}),
    "gap-penalty": Entry("GapPenalty", {"rho": DEFAULT_RHO, "lam": 0.1, **SHARED}),
    "momentum-sam": Entry(
        "MomentumSAM",
        {"rho": 1.0, "perturb": None, "eps": 1e-12},
        passes=1,
        takes_optimizer=True,
    ),
    "entropy-sgd": Entry(
        "EntropySGD",
        {
            "gamma": 0.03,
            "inner_steps": 5,
            "inner_lr": 0.1,
            "noise": 1e-4,
            "averaging": 0.75,
            "scoping": 0.0,
        },
        passes="inner_steps",
    ),
}


def create_objective(
    name: str, model: "nn.Module", optimizer: "Optimizer", **arguments: Any
) -> "Objective":
    """Build the objective called `name`.

    Args:
        name: A key of `OBJECTIVES`.
        model: The model to train.
        optimizer: Its optimizer; used only by objectives that read the momentum.
        arguments: The objective's own keyword arguments.
    """
    entry = OBJECTIVES[name]
    of = (model, optimizer) if entry.takes_optimizer else (model,)
    objective: Objective = getattr(import_module("surrogap"), entry.class_name)(*of, **arguments)
    return objective
