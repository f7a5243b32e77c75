"""The workspace of an objective: the model's tensors and processes, and memory that steps reuse."""

import copy
from collections.abc import Callable, Sequence

from torch import nn

from surrogap.core import gradients
from surrogap.core.along import States
from surrogap.core.arithmetic import Arithmetic
from surrogap.core.buffers import Buffers
from surrogap.core.random_state import RandomState, Replayable
from surrogap.core.replicas import Replicas, Scope
from surrogap.core.vectors import Gradients
from surrogap.core.weights import Weights


class Workspace:
    """The tensors and processes of the model, and the state and memory that steps reuse.

    Attributes:
        weights: The model's tensors.
        replicas: The processes that train the model.
        states: The state of the vector to climb along.
        buffers_before: A copy of the buffers before a step.
        buffers_after_first: A copy of the buffers after its first pass.
        arithmetic: The arithmetic of the last step; None if it failed, or before the first.
        random_state: The constructor of a step's random state.
    """

    def __init__(self, model: nn.Module, scope: Scope) -> None:
        self.weights = Weights(model)
        self.states = States()
        self.random_state: Callable[..., Replayable] = RandomState
        self._allocate()
        self.refresh(scope)

    def _allocate(self) -> None:
        self.buffers_before, self.buffers_after_first = Buffers(), Buffers()
        self.arithmetic: Arithmetic | None = None

    def twin(self) -> "Workspace":
        """Return a workspace with the same tensors and states, but its own memory."""
        twin = copy.copy(self)
        twin._allocate()
        return twin

    def refresh(self, scope: Scope) -> Weights:
        """Find the model's tensors and processes as they are now, and return the tensors."""
        weights = self.weights
        weights.refresh()
        self.replicas = Replicas(weights, scope)
        return weights

    def take(self, indices: Sequence[int] | None = None) -> Gradients:
        """Return the gradients of a pass, averaged over the scope, and clear `.grad`.

        Args:
            indices: The parameters whose gradients to return; None for all.
        """
        # A batch may miss all parameters that climb, but not all parameters of the model.
        g, tensors = gradients.take(self.weights, needs_any=indices is None), self.weights.tensors
        if indices is not None and len(indices) < len(g):
            g, tensors = [g[i] for i in indices], [tensors[i] for i in indices]
        return self.replicas.mean(g, tensors, in_scope=True)
