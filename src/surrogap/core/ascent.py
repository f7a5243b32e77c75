"""The ascent step: a pass at `w`, the climb to `w + delta`, a pass there, and the return to `w`."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn

from surrogap.core import gradients
from surrogap.core.along import Gradient
from surrogap.core.arithmetic import Arithmetic, Task, check_memory
from surrogap.core.combine import Coefficients, Number
from surrogap.core.fused import choose
from surrogap.core.geometry import Kind, kinds_of
from surrogap.core.passes import Passes
from surrogap.core.report import Report
from surrogap.core.shards import is_sharded, shard_of
from surrogap.core.vectors import Gradients, wide, widened

if TYPE_CHECKING:
    from surrogap.core.objective import Objective


@final
class AscentStep:
    """One step of an objective that climbs. `numbers` are the radius and the coefficients."""

    def __init__(self, objective: "Objective", passes: Passes, numbers: Sequence[Number]) -> None:
        assert objective.along is not None
        self._objective = objective
        self._along = objective.along
        self._workspace = objective._workspace
        self._weights = objective._workspace.weights
        check_memory(objective.memory, self._weights.parameters)  # again: the model may be cast
        self._passes = passes
        self._rho = numbers[0]
        self._coefficients = Coefficients(*numbers[1:])
        # Not from `numbers`: in a captured step they are on the device, and are not read.
        self._uses_g = objective.combine.coefficients().use_g
        self._kinds = kinds_of(objective.perturb, objective.geometry, self._weights)
        is_g_whole = passes.first is None and Kind.FIXED not in self._kinds
        self._keeps_g = self._along.needs_gradient and (self._uses_g or is_g_whole)
        # The parameters that climb, or whose `g` is kept.
        self._indices = [
            i for i, kind in enumerate(self._kinds) if self._keeps_g or kind != Kind.FIXED
        ]

    def run(self) -> tuple[Gradients, Report]:
        """Run the passes, with `.grad` empty before and after, and restore the weights."""
        passes, weights = self._passes, self._weights
        first = None
        if self._along.needs_gradient:
            random_state = self._workspace.random_state(weights.devices, weights.generators)
            first = self._first_pass()
        task = self._task()
        arithmetic = choose(task, last=self._workspace.arithmetic)
        self._workspace.arithmetic = None  # frees the copies if the step raises
        with ExitStack() as stack:
            if first is not None:  # repeat its random numbers and buffers, and keep what it wrote
                written = weights.written()
                stack.enter_context(self._workspace.buffers_after_first.kept(written))
                self._workspace.buffers_before.restore(written, caches=weights.caches)
                stack.enter_context(random_state.replayed())
            try:
                scale = None if first is None else passes.scale(first[0].device)
                self._climb(arithmetic, task.parameters, scale)
                perturbed_loss, aux = passes.run(weights)
                direction, products = self._combine(arithmetic)
            finally:
                # Ctrl-C may interrupt the restore too, hence the second attempt.
                try:
                    arithmetic.restore()
                except BaseException:
                    arithmetic.restore()
                    raise
        self._workspace.arithmetic = arithmetic
        scale = passes.scale(perturbed_loss.device)
        if first is not None and passes.first is None:
            loss, aux = first
            return direction, Report(loss, perturbed_loss, aux, self._rho, products, scale)
        nan = torch.full_like(perturbed_loss, torch.nan)
        return direction, Report(
            nan, perturbed_loss, aux, self._rho, lambda: _of_g_p(products()[2]), scale, True
        )

    def _first_pass(self) -> tuple[Tensor, Any]:
        """Run the pass at `w`, and return its loss and aux. Its gradients stay in `.grad`."""
        objective, weights = self._objective, self._weights
        idle: list[nn.Parameter] = []
        # FSDP ignores changes to `requires_grad`, and computes all gradients. A reentrant
        # checkpoint or reversible block whose inputs do not require gradients computes none. So all
        # are computed if the model has one, and in the first call, which looks for one.
        needs_all = self._uses_g or objective.perturb is None or weights.are_sharded
        if not needs_all and weights.is_checked and not weights.are_reentrant:
            pairs = zip(weights.parameters, self._kinds, strict=True)
            idle = [parameter for parameter, kind in pairs if kind == Kind.FIXED]
        with gradients.disabled(weights, idle) if idle else nullcontext():
            # With `idle`, a batch may reach no parameter that requires a gradient.
            return (self._passes.first or self._passes).run(weights, needs_graph=not idle)

    def _task(self) -> Task:
        objective, indices = self._objective, self._indices
        # Without `g` to keep, only the weights are copied anyway. "low" recovers `g` from the
        # ascent step, so not along other vectors.
        is_low = objective.memory == "low" and isinstance(self._along, Gradient)
        tensors, shardings = self._weights.tensors, self._weights.shardings
        return Task(
            [tensors[index] for index in indices],
            [self._kinds[index] for index in indices],
            [shardings[index] for index in indices],
            eta=objective.geometry.eta or 0.0,
            eps=objective.eps,
            memory="low" if is_low or not self._keeps_g else "exact",
        )

    def _climb(
        self, arithmetic: Arithmetic, tensors: Sequence[Tensor], scale: Tensor | None
    ) -> None:
        """Move `tensors`, the weights that climb, to `w + delta`."""
        along, workspace = self._along, self._workspace
        if isinstance(along, Gradient):  # no local variable for `g`, so that `climb` can free it
            arithmetic.climb(workspace.take(self._indices), self._rho, scale)
            return
        parameters = [self._weights.parameters[index] for index in self._indices]
        g = workspace.take(self._indices) if along.needs_gradient else []
        plain = [_unscaled(piece, p, scale) for piece, p in zip(g, tensors, strict=bool(g))]
        states = workspace.states
        m = states.of(parameters) if along.has_state else []
        vector = along.vector(parameters, plain, m)
        v = [_like(*row) for row in zip(vector, parameters, tensors, strict=True)]
        if along.has_state:
            states.proposed = list(zip(m, along.update(plain, m), strict=True))
        # Without any momentum, the weights are neither moved nor restored: the first pass may
        # initialise them.
        if along.needs_gradient or any(piece is not None for piece in v):
            arithmetic.climb(v, along.sign * self._rho, None, g if self._keeps_g else None)

    def _combine(self, arithmetic: Arithmetic) -> tuple[Gradients, Callable[[], Tensor]]:
        """Return the direction and the inner products, from the gradients of the last pass."""
        g_p = self._workspace.take()
        if self._keeps_g:
            return arithmetic.combination(g_p, self._coefficients)
        if self._along.needs_gradient:
            _pass_on_overflow(arithmetic.squared_norm(), g_p)
        return g_p, partial(_of_g_p, gradients.total_squared_norm(self._weights, g_p))


def _pass_on_overflow(squared_norm: Tensor, direction: Gradients) -> None:
    """Make one tensor of the direction NaN if `g`, which it does not contain, is not finite."""
    smallest = min((d for d in direction if d is not None and d.numel()), key=Tensor.numel)
    smallest.add_((0.0 * squared_norm).to(smallest))  # in float16, the norm may overflow


def _of_g_p(pp: Tensor) -> Tensor:
    """Return the inner products if only `<g_p, g_p>` is known."""
    nan = torch.full_like(pp, torch.nan)
    return torch.stack([nan, nan, pp])


def _unscaled(g: Tensor | None, like: Tensor, scale: Tensor | None) -> Tensor:
    """Return the unscaled gradient in at least float32; zeros if it is None."""
    if g is None:
        return torch.zeros_like(like, dtype=wide(like.dtype))
    return widened(g) if scale is None else widened(g) / scale.to(g.device)


def _like(v: Any, parameter: nn.Parameter, tensor: Tensor) -> Tensor | None:
    """Return this process's shard of `v`, in the dtype of the parameter."""
    if v is None:
        return None
    piece: Tensor = shard_of(v, parameter) if is_sharded(v) else v
    return piece.to(tensor.dtype)
