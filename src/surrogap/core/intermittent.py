"""An objective that is used only at some steps: every k-th, or from a given step on."""

from collections.abc import Mapping
from typing import Any, final

from surrogap.checks import integer
from surrogap.core.combine import Number
from surrogap.core.objective import Objective, part_setting
from surrogap.core.rho import num_steps
from surrogap.errors import InvalidTypeError


@final
class Intermittent(Objective):
    """The wrapped objective at some steps, and the plain gradient at the others.

    Step `t`, counted from 0, uses the objective if `t >= start and (t - start) % every == 0`. Plain
    steps report `rho` as NaN, ignore `climb=`, and do not change the state of the objective's
    `along`. Radius schedules advance at every step. Save the `state_dict` in checkpoints: it holds
    the number of steps and the state of the wrapped objective.

    Args:
        objective: The objective to wrap.
        every: The number of steps from one use of the objective to the next.
        start: The first step that uses the objective.

    Raises:
        TypeError: `objective` is not an objective, or `every` or `start` is not an integer.
        ValueError: `every` is below 1, or `start` below 0.

    >>> import torch
    >>> from torch import nn
    >>> from surrogap import SAM
    >>> model = nn.Linear(3, 1)
    >>> objective = Intermittent(SAM(model), every=2)
    >>> reports = [objective.backward(lambda: model(torch.ones(2, 3)).mean()) for _ in range(4)]
    >>> [bool(report.rho.isnan()) for report in reports]
    [False, True, False, True]
    """

    _fixed = ("objective", "every", "start")

    rho = part_setting("objective", "rho")

    def __init__(self, objective: Objective, *, every: int = 1, start: int = 0) -> None:
        if not isinstance(objective, Objective):
            raise InvalidTypeError(
                f"objective must be an objective, got {type(objective).__name__}. "
                "Pass one such as SAM(model)."
            )
        self.objective = objective
        self.every = integer("every", every, at_least=1, remedy="Pass 1.")
        self.start = integer("start", start, at_least=0, remedy="Pass 0.")
        self.num_steps = 0
        super().__init__(objective.model, rho=objective.rho, scope=objective.scope)

    @property
    def is_active(self) -> bool:
        """True if the current step uses the objective."""
        return self.num_steps >= self.start and (self.num_steps - self.start) % self.every == 0

    @property
    def num_passes(self) -> int:
        """The number of forward-backward passes of a step that uses the objective."""
        return self.objective.num_passes

    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps taken, and the state of the wrapped objective."""
        return {"num_steps": self.num_steps, "objective": self.objective.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Objective`."""
        self.num_steps = num_steps(state)
        self.objective.load_state_dict(state.get("objective", {}))

    def __repr__(self) -> str:
        return f"Intermittent({self.objective!r}, every={self.every}, start={self.start})"

    def _numbers(self) -> list[Number]:
        return self.objective._numbers()

    def _advance(self) -> None:
        self.num_steps += 1
        self.objective._advance()

    def _check_climb(self, argument: str) -> None:
        self.objective._check_climb(argument)

    @property
    def _current(self) -> Objective:
        return self.objective._current if self.is_active else self

    def _forms(self) -> list[Objective]:
        forms = self.objective._forms()
        return forms if self.every == 1 and self.start == 0 else [*forms, self]

    def _invariants(self, *, climbs_on_part: bool) -> list[tuple[str, object]]:
        wrapped = self.objective._invariants(climbs_on_part=climbs_on_part)
        return [*super()._invariants(climbs_on_part=climbs_on_part), *wrapped]
