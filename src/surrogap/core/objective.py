"""The objective: run the passes, restore everything, add the direction to `.grad`.

One step at weights `w`, on one batch:

1. `g = grad f(w)`, if anything needs it (`passes.py`, `gradients.py`).
2. Climb a distance `rho` along a vector (`along.py`) in a geometry (`geometry.py`), to `w + delta`.
3. `g_p = grad f(w + delta)`, on the same batch with the same random numbers (`buffers.py`).
4. Restore `w` exactly, and add the combination of `g` and `g_p` (`combine.py`) to `.grad`.

An objective is composed of these parts, and `ascent.py` runs them. They determine the number of
passes, and the gradients that each pass computes. If no part needs `g`, there is no first pass. If
only the ascent step needs it, the first pass computes only the gradients of the parameters that
climb.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields, is_dataclass
from operator import attrgetter
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from surrogap.checks import number
from surrogap.core import gradients
from surrogap.core.along import Along
from surrogap.core.arithmetic import Memory, check_memory
from surrogap.core.ascent import AscentStep
from surrogap.core.catalog import SHARED
from surrogap.core.combine import Combine, Number, PerturbedGradient
from surrogap.core.direction import Deferred, Direction
from surrogap.core.geometry import Geometry, Perturb, check_perturb, kinds_of
from surrogap.core.passes import EXAMPLE, Closure, Passes, forget_weights
from surrogap.core.replicas import Scope
from surrogap.core.report import Report
from surrogap.core.rho import Schedule, radius
from surrogap.core.vectors import Gradients
from surrogap.core.weights import Weights
from surrogap.core.workspace import Workspace
from surrogap.errors import InvalidTypeError, InvalidValueError


class Objective:
    """A replacement for `loss.backward()` that adds the direction of a method to `.grad`.

    `g` is the gradient at the weights `w`, and `g_p` the gradient at the perturbed weights
    `w + delta`. The ascent step is the move from `w` to `w + delta`.

    To define your own objective, write a subclass that passes parts from `surrogap.parts` to this
    constructor: see docs/how-to/new-objective.md.

    Args:
        model: The model to train. It must hold every trainable parameter that the loss depends on.
            To train several modules together, put them into an `nn.ModuleList`. If the model is
            wrapped in DistributedDataParallel, pass the wrapper.
        rho: The radius: a number or a schedule from `surrogap.rho`. 0 gives the plain gradient.
        along: The vector of the ascent step; None for the plain gradient, without an ascent step.
        geometry: The ball that contains `delta`; by default SAM's, the Euclidean ball.
        combine: The combination of the two gradients; by default SAM's, `d = g_p`.
        perturb: The parameters to perturb: "norms" for the affine parameters of normalisation
            layers, a function of a parameter's name and the parameter that returns a bool, or None
            for all. The other parameters are trained without being perturbed. If the direction does
            not contain `g` (SAM, or alpha = 0), the first pass computes only the gradients of the
            perturbed parameters, from the second call on. It computes all gradients under FSDP2,
            and with reentrant checkpointing and other functions that run a backward pass of their
            own; enable these before the first call.
        scope: Under DistributedDataParallel, the gradients that the ascent step uses: "replica",
            this process's own, which is the default; "global", the mean over all processes; a
            process group, the mean over its members. Sharded models support only "global".
        memory: "exact" holds copies of the weights and of `g` during a step. On CUDA, "low"
            holds only a copy of the weights, and recovers `g` from the ascent step with a relative
            error of at most `6e-8 * ||w|| / rho`. Not for parameters in half precision.
        eps: Added to the norm before dividing by it.

    Attributes:
        report: The report of the last call to `loss` or `backward`; None before the first.

    Raises:
        TypeError: An argument has the wrong type, or the model contains a TorchScript module, or
            is wrapped in FSDP1 or by DeepSpeed or Megatron.
        ValueError: A number is negative or not finite; the model has no trainable parameter, a
            complex one, or under FSDP one that is not sharded; `perturb` selects nothing; `scope`
            does not fit the model; or DDP has a static graph or several process groups.
        RuntimeError: A parameter has a post-accumulate-grad hook.
    """

    # The attributes that must not change after a step is captured.
    _fixed: ClassVar[tuple[str, ...]] = ("model", "perturb", "scope", "memory")

    def __init__(
        self,
        model: nn.Module,
        *,
        rho: float | Schedule = 0.0,
        along: Along | None = None,
        geometry: Geometry | None = None,
        combine: Combine | None = None,
        perturb: Perturb = None,
        scope: Scope = None,
        memory: Memory = "exact",
        eps: float = 1e-12,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise InvalidTypeError(
                f"model must be a torch.nn.Module, got {type(model).__name__}. "
                "Pass the model itself, not its parameters or its optimizer."
            )
        check_perturb(perturb)
        if not isinstance(rho, Schedule):
            radius(rho)
        self.model = model
        self.rho = rho
        self.along = along
        self.geometry = geometry or Geometry()
        self.combine = combine or PerturbedGradient()
        self.combine.coefficients()  # checks its settings
        self.perturb = perturb
        self.scope = scope
        self.memory = memory
        self.eps = number("eps", eps, remedy="Leave it out for 1e-12.")
        self.report: Report | None = None
        self._workspace = Workspace(model, scope)
        weights = self._workspace.weights
        if along is not None:
            kinds_of(self.perturb, self.geometry, weights)  # checks that some parameter climbs
        check_memory(memory, weights.parameters)

    @property
    def num_passes(self) -> int:
        """The number of forward-backward passes of a step."""
        return 2 if self._climbs_from_gradient else 1

    @property
    def _climbs_from_gradient(self) -> bool:
        return self.along is not None and self.along.needs_gradient

    def backward(
        self,
        closure: Closure | Sequence[Closure],
        *,
        climb: Closure | Sequence[Closure] | None = None,
        scaler: GradScaler | None = None,
        backward: Callable[[Tensor], object] | None = None,
        sync: bool = True,
    ) -> Report:
        """Add the objective's direction to `.grad`, as `loss.backward()` adds the gradient.

        Afterwards the weights are unchanged bit for bit, and BatchNorm's statistics and the random
        generators are as after one pass. If anything raises, weights, gradients and buffers are as
        before the call. (Frozen parameters that the closure itself writes to, such as those of a
        momentum encoder, may be as after one pass.)

        Args:
            closure: Runs the forward pass and returns the loss, or `(loss, aux)`. It must call
                neither `backward` nor `zero_grad`, and must not add parameters to the model or
                unfreeze them. A list of closures is one batch split into micro-batches, which share
                one perturbation. As with `loss.backward()`, their losses add up: for a mean, divide
                each by the number of closures.
            climb: The closure of the first pass, to run it on fewer samples and save time. If the
                direction contains `g`, it is the gradient on these samples.
            scaler: The gradient scaler. Unscale, clip and step afterwards, as usual.
            backward: Called on the loss instead of `loss.backward()`, for frameworks that have
                their own. If it scales the loss, the norms in the report are scaled too. It must
                neither step the optimizer nor clip, since it would clip the gradient of each pass.
            sync: Pass False for all but the last of several calls that share one optimizer step.
                DDP averages gradients, and schedules advance, in the last call only. Inside DDP's
                `no_sync` it is always False.

        Returns:
            The measurements of the call.

        Raises:
            TypeError: An argument has the wrong type, or the closure did not return a tensor.
            ValueError: The list of closures is empty, or all closures read the same variables;
                `climb` was passed to an objective without a first pass; the model or the radius is
                no longer valid; or the closure runs a DDP model, but the objective was built from
                the model inside it.
            RuntimeError: The closure returned a loss that has no graph, is not a scalar, does not
                depend on a trainable parameter of the model, or depends on one outside it. Or it
                called `backward`, a gradient is sparse, or `backward` steps the optimizer.
        """
        first = None
        if climb is not None:
            self._check_climb("climb")
            first = Passes(climb, scaler, backward, name="climb")
        passes = Passes(closure, scaler, backward, first)
        objective, numbers = self._current, self._numbers()
        sync = objective._refresh().synchronises and sync
        self.report = objective._add_direction(passes, numbers, sync)
        if sync:
            self._advance()
        return self.report

    def loss(
        self, closure: Closure, *, scaler: GradScaler | None = None, sync: bool = True
    ) -> Tensor:
        """Return `f(w)` as a scalar whose `backward()` adds the direction to `.grad`.

        It replaces the loss in a training loop: the loop may divide it, scale it, call `backward`
        on it, clip and step as usual. Half the loss adds half the direction, for EntropySGD too.
        All passes run during this call, with the forward passes inside the caller's autocast, and
        each call has its own perturbation. If an input requires a gradient, it receives the sum
        over the passes in this call. `objective.report` is the report of the last call.

        If `backward` is not called, only buffers and random generators change, as in one pass. The
        scalar holds the direction, one copy of the parameters, until `backward`, or until it is
        deleted. Under `torch.no_grad()` the call is one forward pass.

        Use `objective.backward` for several micro-batches with one perturbation, and for a first
        pass on fewer samples (`climb=`). Use `capture` to run the step as a CUDA graph. The errors
        are those of `objective.backward`.

        Args:
            closure: Runs the forward pass and returns the loss, or `(loss, aux)`. It must call
                neither `backward` nor `zero_grad`.
            scaler: The gradient scaler that will scale the loss, for float16. The passes scale by
                the same factor, so that their gradients do not underflow.
            sync: Pass False for all but the last of several calls that share one optimizer step,
                as in `backward`. Inside DDP's `no_sync`, or after FSDP2's
                `set_requires_gradient_sync(False)`, it may be left out.

        Returns:
            A scalar in at least float32; the perturbed loss if f(w) is not computed (MomentumSAM).
            Its `backward` may be called once.

        >>> from surrogap import SAM
        >>> model = nn.Linear(3, 1)
        >>> objective = SAM(model, rho=0.1)
        >>> loss = objective.loss(lambda: model(torch.ones(2, 3)).square().mean())
        >>> (loss / 4).backward()
        >>> bool(loss == objective.report.loss), model.weight.grad is None
        (True, False)
        """
        if not callable(closure):
            raise InvalidTypeError(
                f"closure must be one function, got {type(closure).__name__}. {EXAMPLE} For a list "
                "of micro-batches with one perturbation call objective.backward."
            )
        passes = Passes(closure, scaler)
        if not torch.is_grad_enabled():
            loss, aux = passes.evaluate()
            self.report = Report._plain(loss, aux)
            return loss
        objective, numbers = self._current, self._numbers()
        is_shared = objective._refresh().synchronises and sync
        with objective._buffers_kept():
            direction = objective._find_direction(passes, numbers, is_shared)
        self.report = report = direction.report

        def on_backward(incoming: Tensor) -> None:
            if direction.add_later(incoming, sync):
                self._advance()

        anchor = torch.empty((), device=report.value.device, requires_grad=True)
        result: Tensor = Deferred.apply(anchor, report.value, on_backward)
        return result

    def state_dict(self) -> dict[str, Any]:
        """Return the state that the objective keeps from step to step; empty if it has none.

        Under scope "replica" the state of `along` differs between processes, so each saves its own.
        """
        state: dict[str, Any] = {}
        if isinstance(self.rho, Schedule) and (of_rho := self.rho.state_dict()):
            state["rho"] = of_rho
        if self._workspace.states.tensors:
            state["along"] = self._workspace.states.state_dict(self._refresh())
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state.

        Args:
            state: The state that `state_dict` returned.

        Raises:
            ValueError: `state` is not that of this schedule, or is that of another model.
        """
        if isinstance(self.rho, Schedule):
            self.rho.load_state_dict(state.get("rho", {}))
        self._workspace.states.load_state_dict(self._refresh(), state.get("along", {}))

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes to copy and pickle, without the last step's report and memory."""
        return {**vars(self), "report": None, "_workspace": self._workspace.twin()}

    def __repr__(self) -> str:
        settings: dict[str, object] = {} if self.along is None else {"rho": self.rho}
        for part in (self.along, self.geometry, self.combine):
            settings |= _settings_of(part)
        settings |= {k: getattr(self, k) for k, v in SHARED.items() if getattr(self, k) != v}
        listed = ", ".join(f"{name}={value!r}" for name, value in settings.items())
        return f"{type(self).__name__}({listed})"

    # Internal methods, which `capture` and `Intermittent` also call.

    def _refresh(self) -> Weights:
        return self._workspace.refresh(self.scope)

    @property
    def _current(self) -> "Objective":
        """The objective of the current step."""
        return self

    def _numbers(self) -> list[Number]:
        """Check and return the settings that may change from step to step."""
        return [] if self.along is None else [radius(self.rho), *self.combine.coefficients()]

    def _advance(self) -> None:
        """Count a step."""
        if isinstance(self.rho, Schedule):
            self.rho.advance()

    def _add_direction(self, passes: Passes, numbers: Sequence[Number], sync: bool) -> Report:
        with torch.no_grad(), self._buffers_kept():
            direction = self._find_direction(passes, numbers, sync)
            direction.add(sync)
        return direction.report

    def _buffers_kept(self) -> AbstractContextManager[None]:
        """Context manager that restores the buffers if the body raises."""
        workspace = self._workspace
        return workspace.buffers_before.kept(workspace.weights.written(), on_error_only=True)

    def _find_direction(self, passes: Passes, numbers: Sequence[Number], sync: bool) -> Direction:
        """Run the passes, and leave `.grad` unchanged.

        Args:
            passes: The passes.
            numbers: The result of `_numbers`, as numbers or as scalars on the device.
            sync: Whether to broadcast the first process's buffers afterwards.
        """
        weights, replicas = self._workspace.weights, self._workspace.replicas
        with (
            torch.no_grad(),
            gradients.cleared(weights.parameters),
            replicas.unsynchronised(),
            weights.fsdp.reducing(),
        ):
            try:
                tensors, report = self._direction(passes, numbers)
            finally:
                forget_weights()
            weights.is_checked = True
            if sync:
                replicas.share_buffers(weights.buffers)
        return Direction(tensors, report, self._workspace)

    def _direction(self, passes: Passes, numbers: Sequence[Number]) -> tuple[Gradients, Report]:
        """Run the passes, with `.grad` empty before and after, and restore the weights."""
        if self.along is not None:
            return AscentStep(self, passes, numbers).run()
        weights = self._workspace.weights
        loss, aux = passes.run(weights)
        g = self._workspace.take()
        squared_norm = gradients.total_squared_norm(weights, g)
        return g, Report._plain(loss, aux, squared_norm, passes.scale(loss.device))

    def _check_climb(self, argument: str) -> None:
        if not self._climbs_from_gradient:
            raise InvalidValueError(
                f"{argument} must be left out for {type(self).__name__}, got one. It has no first "
                "pass that could run on fewer samples."
            )

    def _forms(self) -> "list[Objective]":
        """Return the objectives that `_current` may return. Each is captured separately."""
        return [self]

    def _invariants(self, *, climbs_on_part: bool) -> list[tuple[str, object]]:
        """Return names and values of what must not change after a step is captured."""
        keeps_g = self.perturb is None and not climbs_on_part
        needs_whole_g = keeps_g or self.combine.coefficients().use_g
        return [
            *((f"The objective's {name}", getattr(self, name)) for name in self._fixed),
            ("Whether the direction contains g (not if alpha is 0)", needs_whole_g),
        ]


def part_setting(part: str, name: str) -> Any:
    """Return a property of an objective that reads and sets a setting of one of its parts."""

    def change(objective: Objective, value: object) -> None:
        setattr(getattr(objective, part), name, value)

    return property(attrgetter(f"{part}.{name}"), change)


def _settings_of(part: object) -> dict[str, object]:
    """Return the settings of a part that differ from their defaults or have no default."""
    if not is_dataclass(part):
        own = getattr(part, "__dict__", {})
        return {name: value for name, value in own.items() if not name.startswith("_")}
    shown = (f for f in fields(part) if f.repr and getattr(part, f.name) != f.default)
    return {f.name: getattr(part, f.name) for f in shown}
