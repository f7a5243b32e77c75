"""The vector of the ascent step: the gradient, the momentum, or a function of them."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from surrogap.core import gradients
from surrogap.core.shards import is_sharded, shard_of
from surrogap.core.vectors import wide
from surrogap.core.weights import Weights
from surrogap.errors import InvalidTypeError, InvalidValueError

# The names that optimizers give their momentum: SGD and RMSprop; the Adam family.
_MOMENTA = ("momentum_buffer", "exp_avg")


class Along(ABC):
    """The vector of an ascent step. Subclass it to define your own.

    Attributes:
        needs_gradient: Whether the vector depends on `g`. If not, there is no first pass.
        has_state: Whether it keeps a tensor `m` for each parameter from step to step, initially
            zero. `m` belongs to the objective, whose `state_dict` contains it. A call that raises,
            or a step that overflows, does not change `m`. Under scope "replica" each process has
            its own. In a step of several calls (`sync=False`) each call updates `m`; if any of them
            overflows, the last restores the `m` from before the step.
        sign: -1 for an ascent step against the vector.
    """

    needs_gradient: ClassVar[bool] = True
    has_state: ClassVar[bool] = False
    sign: ClassVar[int] = 1

    @abstractmethod
    def vector(
        self, parameters: Sequence[nn.Parameter], g: Sequence[Tensor], m: Sequence[Tensor]
    ) -> Sequence[Tensor | None]:
        """Return one tensor for each parameter; None for a parameter that is not perturbed.

        Args:
            parameters: The perturbed parameters.
            g: Their unscaled gradients; zeros if there is none. Empty without `needs_gradient`.
            m: Their state. Empty without `has_state`.
        """

    def update(self, g: Sequence[Tensor], m: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the state after this step as new tensors. Called only with `has_state`.

        By default the state does not change.

        Args:
            g: The unscaled gradients of the perturbed parameters; zeros if there is none.
            m: Their state before this step, which must not be modified.
        """
        return m


@final
@dataclass(frozen=True)
class Gradient(Along):
    """The batch's gradient `g`, as in SAM."""

    def vector(
        self, parameters: Sequence[nn.Parameter], g: Sequence[Tensor], m: Sequence[Tensor]
    ) -> Sequence[Tensor | None]:
        """See `Along`."""
        return g


@final
@dataclass(frozen=True)
class Momentum(Along):
    """The optimizer's momentum `v`. The ascent step is along `-v`, towards the next update.

    Args:
        optimizer: The optimizer, with SGD's `momentum_buffer` or the Adam family's `exp_avg`.
            `MomentumSAM` documents the errors.
    """

    optimizer: Optimizer = field(repr=False)

    needs_gradient: ClassVar[bool] = False
    sign: ClassVar[int] = -1

    def __post_init__(self) -> None:
        name, groups = type(self.optimizer).__name__, getattr(self.optimizer, "param_groups", None)
        if not isinstance(groups, list):
            raise InvalidTypeError(
                f"optimizer must be a torch optimizer, got {name}. Pass the one that trains the "
                "model."
            )
        if any(kind.__name__ == "ZeroRedundancyOptimizer" for kind in type(self.optimizer).mro()):
            raise InvalidTypeError(
                "optimizer must hold the momentum of all parameters, got ZeroRedundancyOptimizer, "
                "which shards it over processes. Use fully_shard to save memory instead."
            )
        if any(group.get("maximize") for group in groups):
            raise InvalidValueError(
                "optimizer must minimize, got maximize=True. Negate the loss instead."
            )
        if not any(group.get("momentum") or "betas" in group for group in groups):
            raise InvalidValueError(
                f"optimizer must have momentum, got {name} without it. Pass SGD with momentum=0.9, "
                "for example, or an optimizer of the Adam family."
            )

    def vector(
        self, parameters: Sequence[nn.Parameter], g: Sequence[Tensor], m: Sequence[Tensor]
    ) -> Sequence[Tensor | None]:
        """See `Along`. A parameter without momentum is not perturbed."""
        # timm's Lookahead has an empty state: it wraps the optimizer that steps.
        stepped = getattr(self.optimizer, "_base_optimizer", self.optimizer)
        states = [stepped.state.get(parameter, {}) for parameter in parameters]
        momenta = [
            next((state[name] for name in _MOMENTA if state.get(name) is not None), None)
            for state in states
        ]
        for momentum, parameter, state in zip(momenta, parameters, states, strict=True):
            if momentum is not None and not _is_plain(momentum, parameter):
                self._check_state(parameters, state)
        if stepped.state and all(momentum is None for momentum in momenta):
            self._check_state(parameters, next(filter(None, states), None))
        return momenta

    def _check_state(
        self, parameters: Sequence[nn.Parameter], state: Mapping[str, object] | None
    ) -> None:
        name = type(self.optimizer).__name__
        if state is not None:
            raise InvalidValueError(
                f"optimizer must keep its momentum as {' or '.join(_MOMENTA)}, in a plain tensor "
                f"of the parameter's shape, got {name} with {', '.join(state)}. Pass SGD with "
                "momentum, or an optimizer of the Adam family."
            )
        trained = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        if trained.isdisjoint(map(id, parameters)):
            raise InvalidValueError(
                f"optimizer must train the perturbed parameters, got {name}, which trains "
                "none of them. Pass the optimizer that was built from this model's parameters."
            )


def _is_plain(momentum: Any, parameter: nn.Parameter) -> bool:
    """Return whether a momentum has one number per weight: neither quantised nor of low rank."""
    is_tensor = type(momentum) is Tensor or is_sharded(momentum)
    return is_tensor and momentum.shape == parameter.shape


class States:
    """The state `m` of an `Along`: one tensor for each parameter, in at least float32.

    Attributes:
        proposed: Pairs of a state and the value that replaces it once the step has succeeded.
    """

    def __init__(self) -> None:
        self._tensors: dict[nn.Parameter, Tensor] = {}
        self.proposed: list[tuple[Tensor, Tensor]] = []
        # The states from before a step that consists of several calls.
        self._before: dict[Tensor, Tensor] = {}

    def of(self, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
        """Return the states of `parameters`, initially zero."""
        for parameter in parameters:
            if parameter not in self._tensors:
                piece = shard_of(parameter, parameter)
                self._tensors[parameter] = torch.zeros_like(piece, dtype=wide(piece.dtype))
        return [self._tensors[parameter] for parameter in parameters]

    @property
    def tensors(self) -> list[Tensor]:
        """All states."""
        return list(self._tensors.values())

    def commit(
        self, weights: Weights, proposed: Sequence[tuple[Tensor, Tensor]], *, ends_step: bool
    ) -> None:
        """Replace the states by the proposed ones if the direction in `.grad` is finite.

        If it is not, the call that ends a step restores the states from before the step. Non-finite
        values stay in `.grad`, so this call also detects the overflow of an earlier one.
        """
        if not proposed:
            return
        if not (ends_step or self._before):
            self._before = {m: m.clone() for m, _ in proposed}
        before = self._before if ends_step else {}
        direction = gradients.shards(weights, gradients.current(weights))
        is_finite = gradients.total_squared_norm(weights, direction).isfinite()
        for m, after in proposed:
            m.copy_(torch.where(is_finite.to(m.device), after, before.get(m, m)))
        if ends_step:
            self._before = {}

    def state_dict(self, weights: Weights) -> dict[str, Tensor]:
        """Return the states by parameter name; within a step, those from before the step."""
        names = dict(zip(weights.parameters, weights.names, strict=True))
        states = {p: self._before.get(m, m) for p, m in self._tensors.items() if p in names}
        return {names[p]: m.clone() for p, m in states.items()}

    def load_state_dict(self, weights: Weights, state: Mapping[str, Tensor]) -> None:
        """Load what `state_dict` returned. States that it lacks become zero."""
        parameters = dict(zip(weights.names, weights.parameters, strict=True))
        for name, saved in state.items():
            if name not in parameters or saved.shape != self.of([parameters[name]])[0].shape:
                raise InvalidValueError(
                    f"state must belong to this model, got one with a parameter {name!r} of shape "
                    f"{tuple(saved.shape)}. Pass what state_dict() returned."
                )
        self._before = {}
        for m in self.tensors:
            m.zero_()
        for name, saved in state.items():
            self._tensors[parameters[name]].copy_(saved)
