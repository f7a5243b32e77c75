"""The direction of a step: added to `.grad` at once, or later by `backward` on a loss."""

import copy
from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from surrogap.core import gradients
from surrogap.core.report import Report
from surrogap.core.vectors import Gradients, apart, scale_
from surrogap.core.workspace import Workspace
from surrogap.errors import UnsupportedError


@final
class Direction:
    """The direction of one step, to be added to `.grad` once."""

    def __init__(self, tensors: Gradients, report: Report, workspace: Workspace) -> None:
        self._tensors = tensors
        self.report = report
        # A snapshot: the caller may freeze parameters before adding the direction.
        self._weights, self._replicas = copy.copy(workspace.weights), workspace.replicas
        self._states = workspace.states
        self._proposed, workspace.states.proposed = workspace.states.proposed, []

    def add(self, sync: bool) -> None:
        """Add the direction to `.grad`, and update the states.

        Args:
            sync: Whether the call ends a step. If so, average the sum over processes.
        """
        mean = self._replicas.mean if sync and self._replicas.shares_direction else None
        gradients.add(self._weights, self._tensors, mean)
        self._states.commit(self._weights, self._proposed, ends_step=sync)

    @torch.no_grad()
    def add_later(self, incoming: Tensor, sync: bool) -> bool:
        """Add the direction times `incoming`, the gradient that `backward` passes to the loss.

        Returns:
            Whether the call ends a step: `sync` is True, and DDP is not inside `no_sync`.
        """
        weights, replicas = self._weights, self._replicas
        scale = self.report._scale
        factor = incoming if scale is None else incoming / scale.to(incoming)
        if not replicas.shares_direction:
            # All processes have the same direction, and must multiply it by the same number.
            factor = weights.mean_over_shards(replicas.mean_number(factor))
        self._tensors = apart(self._tensors)
        scale_(self._tensors, factor)
        sync = sync and weights.synchronises
        self.add(sync)
        return sync


@final
class Deferred(torch.autograd.Function):
    """The loss of a step as a scalar. Its backward pass calls a function once, at the end.

    The input of the graph is an anchor instead of the parameters: the hooks of the parameters have
    already run, in the passes.
    """

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, value: Tensor, on_backward: Callable[[Tensor], None]
    ) -> Tensor:
        """Return a copy of `value`."""
        ctx.on_backward = on_backward
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, incoming: Tensor) -> tuple[None, None, None]:
        """Queue a call to the function with the incoming gradient, for the end of the pass."""
        on_backward, ctx.on_backward = ctx.on_backward, None
        if on_backward is None:
            raise UnsupportedError(
                "loss.backward() must be called once, got a second call. The direction is in .grad "
                "already: call objective.loss again."
            )
        # At the end, after the gradients of other terms of the loss. DDP writes its mean of those
        # to `.grad` in such a callback too.
        engine = torch.autograd.Variable._execution_engine
        engine.queue_callback(lambda: on_backward(incoming))
        return None, None, None
