"""The objective: run the passes, restore everything, add the direction to `.grad`.

One step at weights `w`, on one batch:

1. `g = grad f(w)`, if anything needs it (`passes.py`, `gradients.py`).
2. Climb a distance `rho` along a vector (`along.py`) in a geometry (`geometry.py`), to `w + delta`.
3. `g_p = grad f(w + delta)`, on the same batch with the same random numbers (`buffers.py`).
4. Restore `w` exactly, and add the combination of `g` and `g_p` (`combine.py`) to `.grad`.

An objective is put together from such parts. How many passes a step makes, and which gradients each
must compute, follows from them: without a part that needs `g` there is no first pass, and if only
the ascent step needs it, the first pass computes the gradients of the parameters that climb.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple, TypedDict, get_args

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.parameter import is_lazy

from surrogap.core import gradients
from surrogap.core.along import Along, Gradient, States
from surrogap.core.arguments import number
from surrogap.core.arithmetic import Arithmetic, Memory, Task
from surrogap.core.buffers import Buffers, unmoved
from surrogap.core.combine import Coefficients, Combine, Number, PerturbedGradient
from surrogap.core.fused import choose
from surrogap.core.geometry import Geometry, Kind
from surrogap.core.passes import Closure, Passes, Replayable, forget_weights
from surrogap.core.replicas import Replicas, Scope
from surrogap.core.report import Report
from surrogap.core.rho import Schedule, radius
from surrogap.core.selection import Perturb, check_perturb, kinds
from surrogap.core.shards import is_sharded, piece_of
from surrogap.core.vectors import Gradients, wide, widened
from surrogap.core.weights import Weights, without_gradients


class Shared(TypedDict, total=False):
    """The keyword arguments that two-pass objectives share; `Objective` documents them."""

    perturb: Perturb
    scope: Scope
    memory: Memory
    eps: float


class _First(NamedTuple):
    """The results of the first pass beside its gradients."""

    loss: Tensor
    aux: Any


class Objective:
    """A loss to minimise, through the direction that it adds to `.grad`.

    Subclass it, and pass parts of `surrogap.parts` to this constructor, for an objective of your
    own: see docs/how-to/new-objective.md. Without `along`, the direction is the plain gradient.

    Args:
        model: The model to train. Every parameter that the optimizer moves must be in it: on any
            other, the gradients of both passes add up. To train several modules together, put them
            into an `nn.ModuleList`. If it is wrapped in DistributedDataParallel, pass the wrapper.
        rho: The radius: a number or a schedule of `surrogap.rho`. 0 gives the plain gradient.
        along: The vector to climb along.
        geometry: The ball to climb in.
        combine: The combination of both gradients; by default SAM's, `d = g_p`.
        perturb: The parameters that climb: "norms" for the affine parameters of normalisation
            layers, a function of a parameter's name and the parameter, or None for all. The others
            stay in place in the second pass, and get their direction like all. If the direction
            does not contain `g` (SAM, or alpha = 0), the first pass computes only the gradients of
            the parameters that climb.
        scope: Under DistributedDataParallel, the gradients that the ascent step follows: "replica",
            this process's own, which is the default; "global", the mean of all processes; a process
            group, the mean of its members. Sharded models support only "global".
        memory: "exact" holds copies of the weights and of `g` during a step. "low", on CUDA, holds
            one of the weights alone, and recomputes `g` from the ascent step, with a rounding error
            of at most 6e-8 ||w|| / rho of its length.
        eps: Added to the norm before dividing by it.

    Raises:
        TypeError: An argument has the wrong type, or the model holds a TorchScript module.
        ValueError: A number is negative or not finite, the model has no trainable parameter or a
            complex one, `perturb` selects nothing, or `scope` does not fit the model.
        RuntimeError: A parameter has a post-accumulate-grad hook.
    """

    # The attributes that a captured step cannot follow when they change.
    _fixed: ClassVar[tuple[str, ...]] = ("model", "perturb", "scope", "memory")

    _arithmetic: Arithmetic | None

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
            raise TypeError(
                f"model must be a torch.nn.Module, got {type(model).__name__}. "
                "Pass the model itself, not its parameters or its optimizer."
            )
        check_perturb(perturb)
        if memory not in get_args(Memory):
            raise ValueError(
                f'memory must be "exact" or "low", got {memory!r}. Leave it out for "exact".'
            )
        if not isinstance(rho, Schedule):
            radius(rho)
        self.model = model
        self.rho = rho
        self.along = along
        self.geometry = geometry or Geometry()
        self.combine = combine or PerturbedGradient()
        self.perturb = perturb
        self.scope = scope
        self.memory = memory
        self.eps = number("eps", eps, remedy="Leave it out for 1e-12.")
        self._is_running = False
        self._states = States()
        self._allocate()
        self._weights = Weights(model)
        self._replicas_of: tuple[object, object] = (None, None)
        self._refresh()
        if along is not None and not self._is_lazy:
            kinds(self.perturb, self.geometry, self._weights)
        self._check_memory(self._weights)

    @property
    def num_passes(self) -> int:
        """The number of forward-backward passes of a step."""
        return 2 if self._climbs_from_gradient else 1

    @property
    def _climbs_from_gradient(self) -> bool:
        return self.along is not None and self.along.needs_gradient

    @property
    def _is_lazy(self) -> bool:
        return any(map(is_lazy, self._weights.parameters))

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

        Afterwards the weights are bit for bit what they were, BatchNorm's statistics have moved
        once, and the random generators are where one pass leaves them. If anything raises, weights,
        gradients and buffers are what they were before the call. (Frozen parameters that the
        closure itself writes to, such as a momentum encoder's, are what one pass makes of them.)

        Args:
            closure: Runs the forward pass and returns the loss, or `(loss, aux)`. It must call
                neither `backward` nor `zero_grad`. A list of closures is one batch in
                micro-batches, with one perturbation for all of them; as with `loss.backward()`,
                their losses add up, so divide each by their number for a mean.
            climb: The closure of the first pass, on a part of the batch, so that it costs less.
                Where the direction contains `g`, that is the gradient of this part.
            scaler: The scaler of the loss. Unscale, clip and step afterwards, as always.
            backward: Called on the loss in place of `loss.backward()`, for frameworks that bring
                their own. If it scales the loss, the report's norms are scaled too.
            sync: False for all but the last of several calls that share one optimizer step;
                schedules count the last as a step, and processes under DDP average their gradients
                in it.

        Raises:
            TypeError: An argument has the wrong type, or the closure did not return a tensor.
            ValueError: The list of closures is empty, `climb` was given to an objective without a
                first pass, or the model or the radius is not valid any more.
            RuntimeError: The closure returned a loss without graph or one that is not a scalar,
                called `backward` itself, added or thawed parameters, or reached none; or a gradient
                is sparse.
        """
        self._check_climb(climb is not None)
        passes = Passes(closure, scaler, backward, climb)
        if self._is_running:
            raise RuntimeError(
                "closure must not call backward, got one that called this objective's. "
                "Return the loss; the objective calls backward itself, once per pass."
            )
        self._is_running = True
        try:
            report = self._add_direction(passes, self._numbers(), sync)
        finally:
            self._is_running = False
        if sync:
            self._advance()
        return report

    def state_dict(self) -> dict[str, Any]:
        """Return what the objective keeps from step to step; empty if there is nothing.

        Like the gradients that they follow, states of `along` belong to this process.
        """
        state: dict[str, Any] = {}
        if isinstance(self.rho, Schedule) and (of_rho := self.rho.state_dict()):
            state["rho"] = of_rho
        if of_along := self._states.state_dict(self._refresh()):
            state["along"] = of_along
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`, a `state_dict` saved before.

        Raises:
            ValueError: It is the state of another schedule or model.
        """
        if isinstance(self.rho, Schedule):
            self.rho.load_state_dict(state.get("rho", {}))
        self._states.load_state_dict(self._refresh(), state.get("along", {}))

    def __repr__(self) -> str:
        settings: dict[str, object] = {} if self.along is None else {"rho": self.rho}
        for part in (self.along, self.geometry, self.combine):
            settings |= _settings(part)
        usual: dict[str, object] = {"perturb": None, "scope": None, "memory": "exact", "eps": 1e-12}
        settings |= {k: getattr(self, k) for k, v in usual.items() if getattr(self, k) != v}
        listed = ", ".join(f"{name}={value!r}" for name, value in settings.items())
        return f"{type(self).__name__}({listed})"

    # The rest is for the core: `capture` and `Intermittent` call it too.

    def _refresh(self) -> Weights:
        """Return the weights, and find the processes, as they are now."""
        weights = self._weights
        weights.refresh()
        if not (weights.wrappers is self._replicas_of[0] and self.scope is self._replicas_of[1]):
            self._replicas = Replicas(
                weights.wrappers, self.scope, are_weights_sharded=weights.are_sharded
            )
            self._replicas_of = weights.wrappers, self.scope
        return weights

    def _add_direction(self, passes: Passes, numbers: Sequence[Number], sync: bool) -> Report:
        weights, replicas = self._refresh(), self._replicas
        with (
            torch.no_grad(),
            self._buffers_before.kept(weights.buffers, on_error_only=True),
            gradients.added(weights) as add,
            replicas.unsynchronised(),
        ):
            try:
                direction, report = self._direction(weights, passes, numbers)
            finally:
                forget_weights()
            if sync:
                replicas.share_buffers(weights.buffers)
            add(direction, replicas.mean if sync and replicas.shares_direction else None)
            self._states.commit(weights)
        return report

    def _numbers(self) -> list[Number]:
        """Return the settings that may differ from step to step, checked."""
        return [] if self.along is None else [radius(self.rho), *self.combine.coefficients()]

    def _advance(self) -> None:
        """Count a step."""
        if isinstance(self.rho, Schedule):
            self.rho.advance()

    def _direction(
        self, weights: Weights, passes: Passes, numbers: Sequence[Number]
    ) -> tuple[Gradients, Report]:
        """Run the passes, with `.grad` empty before and after, and restore the weights.

        Args:
            weights: The model's tensors.
            passes: The passes.
            numbers: What `_numbers` returned, or scalars on the device that hold it.
        """
        if self.along is None:
            return self._plain(weights, passes)
        rho, coefficients = numbers[0], Coefficients(*numbers[1:])
        # Of a captured step the numbers are on the device, where they cannot be asked.
        uses_g = self.combine.coefficients().use_g
        random_state = passes.random_state(weights.devices)
        first = self._first_pass(weights, passes, uses_g) if self.along.needs_gradient else None
        is_same_batch = passes.first is passes
        roles = kinds(self.perturb, self.geometry, weights)
        keeps_g = first is not None and (uses_g or (is_same_batch and Kind.STILL not in roles))
        indices = [i for i, kind in enumerate(roles) if keeps_g or kind != Kind.STILL]
        scale = None if first is None else passes.scale(first.loss.device)
        arithmetic = self._choose(weights, roles, indices, keeps_g)
        self._arithmetic = None  # until the step has succeeded, since it holds the step's copies
        with nullcontext() if first is None else self._second_pass(weights, random_state):
            try:
                self._climb(arithmetic, weights, indices, rho, scale, keeps_g)
                perturbed_loss, aux = passes.run(weights)
                if first is None:
                    weights.check_after_first_pass()
                direction = self._take(weights)
                if keeps_g:
                    direction, products = arithmetic.combination(direction, coefficients)
                else:
                    if first is not None:
                        _pass_on_overflow(arithmetic.squared_norm(), direction)
                    products = _of_g_p(gradients.total_squared_norm(weights, direction))
            finally:
                # Ctrl-C may strike here too, so plain statements, and twice if need be.
                try:
                    arithmetic.restore()
                except BaseException:
                    arithmetic.restore()
                    raise
        self._arithmetic = arithmetic
        scale = passes.scale(perturbed_loss.device)
        if first is not None and is_same_batch:
            return direction, Report(first.loss, perturbed_loss, first.aux, rho, products, scale)
        nan = torch.full_like(perturbed_loss, torch.nan)
        products = partial(_without_g, products)
        return direction, Report(nan, perturbed_loss, aux, rho, products, scale, _lacks_loss=True)

    def _plain(self, weights: Weights, passes: Passes) -> tuple[Gradients, Report]:
        loss, aux = passes.run(weights)
        g = self._take(weights)
        return g, plain_report(loss, aux, weights, g, passes.scale(loss.device))

    def _first_pass(self, weights: Weights, passes: Passes, uses_g: bool) -> _First:
        """Run the pass at `w`. Its gradients stay in `.grad`."""
        idle: list[nn.Parameter] = []
        # FSDP does not follow `requires_grad`, and computes all gradients in any case.
        if not (uses_g or self.perturb is None or weights.are_sharded or self._is_lazy):
            roles = kinds(self.perturb, self.geometry, weights)
            pairs = zip(weights.parameters, roles, strict=True)
            idle = [parameter for parameter, kind in pairs if kind == Kind.STILL]
        with without_gradients(idle):
            loss, aux = passes.first.run(weights)
        weights.check_after_first_pass()
        self._check_memory(weights)  # not before, since lazy modules have no dtype then
        return _First(loss, aux)

    @contextmanager
    def _second_pass(self, weights: Weights, random_state: Replayable) -> Iterator[None]:
        """Context in which a pass draws the first one's random numbers, and moves no buffer."""
        with unmoved(weights, self._buffers_after_first), random_state.replayed():
            yield

    def _climb(
        self,
        arithmetic: Arithmetic,
        weights: Weights,
        indices: Sequence[int],
        rho: Number,
        scale: Tensor | None,
        keeps_g: bool,
    ) -> None:
        """Move the weights to `w + delta`."""
        assert self.along is not None
        if isinstance(self.along, Gradient):  # in one expression, so that `g` is freed in time
            arithmetic.climb(self._take(weights, indices), rho, scale)
            return
        parameters = [weights.parameters[index] for index in indices]
        tensors = [weights.tensors[index] for index in indices]
        g: Gradients = self._take(weights, indices) if self.along.needs_gradient else []
        plain = [_unscaled(piece, p, scale) for piece, p in zip(g, tensors, strict=bool(g))]
        m = self._states.of(parameters) if self.along.has_state else []
        vector = self.along.vector(parameters, plain, m)
        v = [_like(*row) for row in zip(vector, parameters, tensors, strict=True)]
        if self.along.has_state:
            self._states.propose(m, self.along.update(plain, m))
        arithmetic.climb(v, self.along.sign * rho, None, g if keeps_g else None)

    def _choose(
        self, weights: Weights, roles: Sequence[Kind], indices: Sequence[int], keeps_g: bool
    ) -> Arithmetic:
        # Without `g` to keep there is one copy in any case; beside another vector, `g` has its own.
        is_low = not keeps_g or (self.memory == "low" and isinstance(self.along, Gradient))
        tensors, shardings = weights.tensors, weights.shardings
        task = Task(
            [tensors[index] for index in indices],
            [roles[index] for index in indices],
            [shardings[index] for index in indices],
            eta=self.geometry.eta or 0.0,
            eps=self.eps,
            memory="low" if is_low else "exact",
        )
        return choose(task, last=self._arithmetic)

    def _take(self, weights: Weights, indices: Sequence[int] | None = None) -> Gradients:
        """Return the gradients of a pass: this process's, or their mean over the scope."""
        g, tensors = gradients.take(weights), weights.tensors
        if indices is not None and len(indices) < len(g):
            g, tensors = [g[i] for i in indices], [tensors[i] for i in indices]
        return self._replicas.mean_in_scope(g, tensors)

    def _check_climb(self, is_given: bool) -> None:
        if is_given and not self._climbs_from_gradient:
            raise ValueError(
                f"climb must be left out for {type(self).__name__}, got one. It has no first pass "
                "that could run on a part of the batch."
            )

    def _check_memory(self, weights: Weights) -> None:
        """Refuse half precision: it rounds away most of the ascent step, and `g` with it."""
        if self.memory == "low" and any(p.itemsize < 4 for p in weights.parameters):
            raise ValueError(
                'memory must be "exact" for parameters in half precision, got "low". Keep them in '
                "float32 and use autocast, or leave memory out."
            )

    def _allocate(self) -> None:
        """Create what holds memory between steps: copies of buffers, and the arithmetic."""
        # Buffers as they are before a step, and as its first pass leaves them.
        self._buffers_before, self._buffers_after_first = Buffers(), Buffers()
        self._arithmetic = None

    def _variants(self) -> "list[Objective]":
        """Return an objective for each form that a step may take, to be captured on its own.

        They share the states of this one, and have memory of their own.
        """
        twin = copy.copy(self)
        twin._allocate()
        return [twin]

    @property
    def _variant(self) -> int:
        """The index of the current step's form among `_variants`."""
        return 0

    @property
    def _state_tensors(self) -> list[Tensor]:
        return self._states.tensors

    def _circumstances(self) -> list[tuple[str, object]]:
        """Return what a captured step relies on, by name."""
        needs_whole_g = self.perturb is None or self.combine.coefficients().use_g
        return [
            *((f"The objective's {name}", getattr(self, name)) for name in self._fixed),
            # Alpha has left 0, or reached it.
            ("The objective's need for the gradient of all weights", needs_whole_g),
        ]

    def _recording(self, num_calls: int) -> AbstractContextManager[None]:
        """Context for recording `num_calls` calls into a CUDA graph."""
        return nullcontext() if self._arithmetic is None else self._arithmetic.recording(num_calls)


class PartSetting:
    """A setting of one of an objective's parts, as an attribute of the objective."""

    def __init__(self, part: str) -> None:
        self._part = part

    def __set_name__(self, owner: type[Objective], name: str) -> None:
        self._name = name

    def __get__(self, objective: Objective | None, owner: type[Objective]) -> Any:
        return self if objective is None else getattr(getattr(objective, self._part), self._name)

    def __set__(self, objective: Objective, value: object) -> None:
        setattr(getattr(objective, self._part), self._name, value)


def plain_report(
    loss: Tensor, aux: object, weights: Weights, g: Gradients, scale: Tensor | None
) -> Report:
    """Return the report of a step without an ascent step."""
    nan = torch.full_like(loss, torch.nan)
    products = torch.stack([gradients.total_squared_norm(weights, g).to(loss), nan, nan])
    return Report(loss, nan, aux, torch.nan, lambda: products, scale)


def _pass_on_overflow(squared_norm: Tensor, direction: Gradients) -> None:
    """Make the direction NaN somewhere if `g`, which it does not contain, is not finite."""
    smallest = min((d for d in direction if d is not None and d.numel()), key=Tensor.numel)
    smallest.add_(0.0 * squared_norm.to(smallest))


def _of_g_p(pp: Tensor) -> Callable[[], Tensor]:
    """Return inner products of which only `<g_p, g_p>` is known."""
    nan = torch.full_like(pp, torch.nan)
    return lambda: torch.stack([nan, nan, pp])


def _without_g(products: Callable[[], Tensor]) -> Tensor:
    return _of_g_p(products()[2])()


def _unscaled(g: Tensor | None, like: Tensor, scale: Tensor | None) -> Tensor:
    """Return a gradient in at least float32, zeros if there is none."""
    if g is None:
        return torch.zeros_like(like, dtype=wide(like.dtype))
    return widened(g) if scale is None else widened(g) / scale.to(g.device)


def _like(v: Any, parameter: nn.Parameter, tensor: Tensor) -> Tensor | None:
    """Return this process's shard of `v`, in the dtype of the parameter."""
    if v is None:
        return None
    piece: Tensor = piece_of(v, parameter) if is_sharded(v) else v
    return piece.to(tensor.dtype)


def _settings(part: object) -> dict[str, object]:
    """Return the settings of a part that differ from their defaults, or have none."""
    if not is_dataclass(part):
        own = getattr(part, "__dict__", {})
        return {name: value for name, value in own.items() if not name.startswith("_")}
    shown = (f for f in fields(part) if f.repr and getattr(part, f.name) != f.default)
    return {f.name: getattr(part, f.name) for f in shown}
