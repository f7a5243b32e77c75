"""A CUDA graph of a step, and the random numbers that it draws."""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from surrogap.core.objective import Objective
from surrogap.core.random_state import RandomStates
from surrogap.core.report import Report
from surrogap.errors import UnsupportedError


class Graph:
    """One captured form of the step.

    Attributes:
        objective: The objective that it was captured with.
        values: Losses, radius and products of the last replay.
        aux: What the loss function returned beside the loss in the last replay.
    """

    values: Tensor
    aux: Any
    lacks_loss: bool

    def __init__(self, objective: Objective) -> None:
        self.objective = copy.copy(objective)
        self.objective._workspace = objective._workspace.twin()
        self._graph = torch.cuda.CUDAGraph()
        self._random_state = GraphRandomState(self._graph)

    def capture(
        self,
        run: Callable[[Objective, RandomStates], Sequence[Report]],
        num_calls: int,
        pool: Any,
    ) -> None:
        """Capture what `run` does.

        Args:
            run: Takes a step.
            num_calls: The number of the objective's calls in it.
            pool: The memory that graphs share.

        Raises:
            RuntimeError: It cannot be captured.
        """
        try:
            with (
                self.objective._workspace.capturing(num_calls),
                # "thread_local", so that other threads, which may load data, can go on.
                torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"),
            ):
                report = Report.mean(run(self.objective, self._random_state), divisor=num_calls)
                self.values = report._row()
                # An autocast around all this must not keep casts that only the graph makes.
                torch.clear_autocast_cache()
        except Exception as error:
            self._random_state.reset()
            raise UnsupportedError(
                "loss_fn must do all its work on the GPU without waiting for it, got "
                f"{type(error).__name__}: {error}. Train with objective.backward instead."
            ) from error
        self.aux = report.aux
        self.lacks_loss = report._lacks_loss

    def replay(self) -> Report:
        """Take a step."""
        self._random_state.align()
        self._graph.replay()
        loss, perturbed_loss, rho, *products = self.values.clone().unbind()
        return Report(
            *(loss, perturbed_loss, tree_map_only(Tensor, Tensor.clone, self.aux), rho),
            lambda: torch.stack(products),
            _lacks_loss=self.lacks_loss,
        )


class GraphRandomState:
    """The random numbers of a captured step, which the second pass draws again.

    In a graph, the state of a generator cannot be read and set: it counts on from where the
    generator is when the graph is replayed. So the second pass draws from a twin of the state,
    which is set to the generator's before each replay.
    """

    def __init__(self, graph: torch.cuda.CUDAGraph) -> None:
        self._generator = torch.cuda.default_generators[torch.cuda.current_device()]
        self._first = self._generator.graphsafe_get_state()
        self._second = self._generator.clone_state()
        self._before = self._generator.clone_state()
        graph.register_generator_state(self._second)

    def __call__(self, devices: Iterable[torch.device]) -> "GraphRandomState":
        """Stand in for the constructor of `RandomState`; a graph has one state for all calls."""
        return self

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """See `Replayable`."""
        self._generator.graphsafe_set_state(self._second)
        try:
            yield
        finally:
            self._generator.graphsafe_set_state(self._first)

    def align(self) -> None:
        """Have the second pass of the next replay draw what the first draws."""
        self._second.set_state(self._generator.get_state())

    def reset(self) -> None:
        """Restore the generator after a failed capture, which leaves its state unusable."""
        self._generator.graphsafe_set_state(self._before)
