"""What every objective does: run the passes, leave everything as it was, add to `.grad`.

One two-pass step at weights `w`, on one batch:

1. `g = grad f(w)` (`passes.py`, `weights.py`).
2. Climb to `w + delta`, at distance `rho` (`ascent.py`, `arithmetic.py`).
3. `g_p = grad f(w + delta)`, on the same batch with the same random numbers (`buffers.py`).
4. Put `w` back exactly, and add `d = a * g + b * g_p` to `.grad`.

`a` and `b` are functions of three numbers, `<g, g>`, `<g, g_p>` and `<g_p, g_p>`. They are all that
one two-pass objective has and another has not (`objectives.py`).
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import ClassVar, Self, get_args

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.parameter import is_lazy

from surrogap.core.arithmetic import Arithmetic, Coefficients, Memory, Number, choose
from surrogap.core.ascent import Ascent, Kind
from surrogap.core.buffers import Buffers, traceless
from surrogap.core.passes import Closure, Passes, forget_weights
from surrogap.core.replicas import Replicas, Scope
from surrogap.core.report import Report
from surrogap.core.rho import Schedule, radius
from surrogap.core.shards import totals
from surrogap.core.vectors import Gradients, groups_of, squared_norm
from surrogap.core.weights import Weights

Predicate = Callable[[str, nn.Parameter], bool]


class Objective(ABC):
    """Something to minimise, by way of the direction that it adds to `.grad`.

    Args:
        model: Every parameter that the optimizer moves must be in it: on any other, the gradients
            of both passes add up. To train several modules together, put them into an
            `nn.ModuleList`. If it is wrapped in DistributedDataParallel, pass the wrapped one.
        scope: Whose gradients a climb follows, where there are many processes; see `Replicas`.

    Raises:
        TypeError: `model` is no module or holds one of TorchScript, or `scope` is no scope.
        ValueError: `model` has no trainable parameter, or a complex one; or `scope` does not fit.
        RuntimeError: A parameter has a post-accumulate-grad hook.
    """

    # The attributes that a recorded step cannot follow when they change.
    _fixed: ClassVar[tuple[str, ...]] = ("model", "scope")

    def __init__(self, model: nn.Module, scope: Scope = None) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(
                f"model must be a torch.nn.Module, got {type(model).__name__}. "
                "Pass the model itself, not its parameters or its optimizer."
            )
        self.model = model
        self.scope = scope
        self._make_rooms()
        self._is_running = False
        self._weights = Weights(model)
        self._seen: tuple[object, object] = (None, None)
        self._look()

    def _look(self) -> Weights:
        """The weights, and with them the processes, as they are now."""
        weights = self._weights
        weights.look()
        if not (weights.wrappers is self._seen[0] and self.scope is self._seen[1]):
            self._replicas = Replicas(
                weights.wrappers, self.scope, are_weights_sharded=weights.are_sharded
            )
            self._seen = weights.wrappers, self.scope
        return weights

    def backward(
        self,
        closure: Closure | Sequence[Closure],
        *,
        scaler: GradScaler | None = None,
        backward: Callable[[Tensor], object] | None = None,
        sync: bool = True,
    ) -> Report:
        """Adds the objective's direction to `.grad`, as `loss.backward()` adds the gradient.

        Afterwards the weights are bit for bit what they were, BatchNorm's statistics have moved
        once, and the random generators are where one pass leaves them. If anything raises, weights,
        gradients and buffers are what they were before the call. (Frozen parameters that the
        closure itself writes to, such as a momentum encoder's, are what one pass makes of them.)

        Args:
            closure: Runs the forward pass and returns the loss, or `(loss, aux)`; it does not call
                `backward`, and `zero_grad` neither: what `.grad` held is put aside while it runs,
                so that would clear nothing. A list of closures is one batch in micro-batches, with
                one perturbation for all of them; as with `loss.backward()`, their losses add up, so
                divide each by their number for a mean.
            scaler: What scales the loss. Unscale, clip and step afterwards, as always.
            backward: What to call on the loss in place of `loss.backward()`, for frameworks that
                bring their own. Where it scales the loss, the report's norms are scaled too.
            sync: False for all but the last of several calls that share one optimizer step;
                schedules that count steps count the last, and processes under DDP average their
                gradients in it.

        Raises:
            TypeError: An argument has the wrong type, or the closure returned no tensor.
            ValueError: The list of closures is empty, or the model or the radius is not valid now.
            RuntimeError: The closure returned a loss without graph or no scalar, called `backward`
                itself, added or thawed parameters, or reached none; or a gradient is sparse.
        """
        passes = Passes(closure, scaler, backward)
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

    def _add_direction(self, passes: Passes, numbers: Sequence[Number], sync: bool) -> Report:
        weights, replicas = self._look(), self._replicas
        with (
            torch.no_grad(),
            self._buffers_before.kept(weights.buffers, on_error_only=True),
            weights.gradients_added() as add,
            replicas.unsynchronised(),
        ):
            try:
                direction, report = self._direction(weights, passes, numbers)
            finally:
                forget_weights()
            if sync:
                replicas.share_buffers(weights.buffers)
            add(direction, replicas.mean if sync and replicas.shares_direction else None)
        return report

    def _numbers(self) -> list[Number]:
        """The settings of the current step that may differ from those of the last, checked."""
        return []

    @abstractmethod
    def _direction(
        self, weights: Weights, passes: Passes, numbers: Sequence[Number]
    ) -> tuple[Gradients, Report]:
        """Runs the passes, with `.grad` empty before and after, and puts the weights back.

        Args:
            weights: What to take gradients of.
            passes: The passes.
            numbers: What `_numbers` gave, or scalars on the device that hold it.
        """

    def _gradients(self, weights: Weights) -> Gradients:
        """Those of a pass that has just run: this process's, or the mean of those in scope."""
        return self._replicas.mean_in_scope(weights.take_gradients(), weights.tensors)

    def _advance(self) -> None:
        """Counts a step, where there is something to count."""

    def _make_rooms(self) -> None:
        """For buffers as they are before a step, and as its first pass leaves them."""
        self._buffers_before, self._buffers_after_first = Buffers(), Buffers()

    def _twin(self) -> Self:
        """Another that runs the same steps beside this one, in memory of its own."""
        twin = copy.copy(self)
        twin._make_rooms()
        return twin

    def _recording(self, num_calls: int) -> AbstractContextManager[None]:
        """So many directions, such as it has added before, are added in a graph in the body."""
        return nullcontext()


def single_pass_report(
    loss: Tensor, aux: object, g: Gradients, weights: Weights, scale: Tensor | None
) -> Report:
    """A report of what a first pass alone shows."""
    nan = torch.full_like(loss, torch.nan)
    tensors, shardings = weights.tensors, weights.shardings
    groups = groups_of(tensors, shardings)
    parts = [squared_norm([g[i] for i in group], tensors[group[0]]) for group in groups]
    (gg,) = totals([parts], [shardings[group[0]] for group in groups])
    products = torch.stack([gg.to(loss), nan, nan])
    return Report(loss, nan, aux, torch.nan, lambda: products, scale)


class TwoPass(Objective):
    """An objective whose direction is `a * g + b * g_p`.

    Args:
        model: The model to train.
        rho: The radius: a number or a schedule of `surrogap.rho`.
        ascent: Where the second pass runs.
        perturb: Which parameters climb, from a parameter's name and itself; None for all. The
            others stay where they are in the second pass, and get their direction like all.
        scope: Whose gradients the climb follows; see `Replicas`.
        memory: What a step holds beside weights and gradients; see `Memory`.
    """

    _fixed = (*Objective._fixed, "perturb", "memory")

    def __init__(
        self,
        model: nn.Module,
        rho: float | Schedule,
        ascent: Ascent,
        perturb: Predicate | None,
        scope: Scope,
        memory: Memory,
    ) -> None:
        if perturb is not None and not callable(perturb):
            raise TypeError(
                "perturb must be a function of a parameter's name and the parameter, got "
                f'{type(perturb).__name__}. Pass one such as lambda name, p: "norm" in name.'
            )
        if memory not in get_args(Memory):
            raise ValueError(
                f'memory must be "exact" or "low", got {memory!r}. Leave it out for "exact".'
            )
        self.rho = rho
        self.perturb = perturb
        self.memory = memory
        self._ascent = ascent
        self._arithmetic: Arithmetic | None = None
        if not isinstance(rho, Schedule):
            radius(rho)
        super().__init__(model, scope)
        if not any(map(is_lazy, self._weights.parameters)):
            self._kinds(self._weights)
        self._check_memory(self._weights)

    def _check_memory(self, weights: Weights) -> None:
        """In half precision, most of a climb is rounded away, and `g` is not to be found again."""
        if self.memory == "low" and any(p.itemsize < 4 for p in weights.parameters):
            raise ValueError(
                'memory must be "exact" for parameters in half precision, got "low". Keep them in '
                "float32 and use autocast, or leave memory out."
            )

    def _numbers(self) -> list[Number]:
        return [radius(self.rho), *self._coefficients()]

    @abstractmethod
    def _coefficients(self) -> Coefficients:
        """`a` and `b` of `d = a * g + b * g_p`."""

    def _kinds(self, weights: Weights) -> list[Kind]:
        if self.perturb is None:
            return self._ascent.kinds(weights.parameters)
        names = weights.names
        kinds = [
            kind if self.perturb(name, parameter) else Kind.STILL
            for name, parameter, kind in zip(
                names, weights.parameters, self._ascent.kinds(weights.parameters), strict=True
            )
        ]
        if all(kind == Kind.STILL for kind in kinds):
            raise ValueError(
                "perturb must select a trainable parameter, got False for all of them. Names are "
                f"such as {names[0]!r}; leave perturb out to perturb all."
            )
        return kinds

    def _direction(
        self, weights: Weights, passes: Passes, numbers: Sequence[Number]
    ) -> tuple[Gradients, Report]:
        rho, coefficients = numbers[0], Coefficients(*numbers[1:])
        random_state = passes.random_state(weights.devices)
        loss, aux = passes.run(weights)
        scale = passes.scale(loss.device)
        weights.look_again()
        # Lazy modules have no shape before the first pass, so this comes after it.
        self._check_memory(weights)
        arithmetic = choose(
            *(weights.tensors, self._kinds(weights), self._ascent, weights.shardings, self.memory),
            last=self._arithmetic,
        )
        self._arithmetic = None  # until the step has ended well, since it holds the step's copies
        with traceless(weights, self._buffers_after_first), random_state.replayed():
            try:
                arithmetic.climb(self._gradients(weights), rho, scale)
                perturbed_loss, _ = passes.run(weights)
                g_p = self._gradients(weights)
                direction, products = arithmetic.combination(g_p, coefficients)
            finally:
                # If all went well, there is nothing left to put back. Ctrl-C may strike here too,
                # so plain statements, and twice if need be.
                try:
                    arithmetic.restore()
                except BaseException:
                    arithmetic.restore()
                    raise
        self._arithmetic = arithmetic
        return direction, Report(loss, perturbed_loss, aux, rho, products, scale)

    def _advance(self) -> None:
        if isinstance(self.rho, Schedule):
            self.rho.advance()

    def _twin(self) -> Self:
        twin = super()._twin()
        twin._arithmetic = None
        return twin

    def _recording(self, num_calls: int) -> AbstractContextManager[None]:
        return nullcontext() if self._arithmetic is None else self._arithmetic.recording(num_calls)
