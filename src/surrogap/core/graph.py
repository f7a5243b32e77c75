"""A CUDA graph of a step, and the random numbers that it draws."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from surrogap.core.objective import Objective
from surrogap.core.report import Report
from surrogap.errors import UnsupportedError


class Graph:
    """A CUDA graph of the step with one objective, of which it uses a copy with its own memory."""

    def __init__(self, objective: Objective) -> None:
        self.objective = copy.copy(objective)
        self._graph = torch.cuda.CUDAGraph()
        self._random_state = GraphRandomState(self._graph)

    def capture(
        self, run: Callable[[Objective], Sequence[Report]], num_calls: int, pool: Any
    ) -> None:
        """Capture the step that `run` takes, with `num_calls` calls to the objective."""
        workspace, random_state = self.objective._workspace, self._random_state
        workspace.random_state = lambda *_: random_state  # one for all calls
        arithmetic = workspace.arithmetic  # None without an ascent step
        try:
            with (
                nullcontext() if arithmetic is None else arithmetic.capturing(num_calls),
                # "thread_local", so that other threads, such as data loaders, can use CUDA.
                torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"),
            ):
                report = Report.mean(run(self.objective), divisor=num_calls)
                self._values = report._row()
                # The caller's autocast must not cache casts whose values only a replay computes.
                torch.clear_autocast_cache()
        except Exception as error:
            random_state.reset()
            if isinstance(error, torch.OutOfMemoryError):
                raise
            raise UnsupportedError(
                "loss_fn must run on the GPU without synchronising with it, got "
                f"{type(error).__name__}: {error}. Train with objective.backward instead."
            ) from error
        self._aux = report.aux
        self._lacks_loss = report._lacks_loss

    def replay(self) -> Report:
        """Replay the step, and return its report."""
        self._random_state.align()
        self._graph.replay()
        loss, perturbed_loss, rho, *products = self._values.clone().unbind()
        return Report(
            *(loss, perturbed_loss, tree_map_only(Tensor, Tensor.clone, self._aux), rho),
            lambda: torch.stack(products),
            _lacks_loss=self._lacks_loss,
        )


class GraphRandomState:
    """The random numbers of a captured step, which the second pass repeats.

    A graph cannot read and set the state of a generator: a replay continues from the state that the
    generator has then. So the second pass draws from a second state, which is set to the
    generator's before each replay.
    """

    def __init__(self, graph: torch.cuda.CUDAGraph) -> None:
        self._generator = torch.cuda.default_generators[torch.cuda.current_device()]
        self._first = self._generator.graphsafe_get_state()
        self._second = self._generator.clone_state()
        self._before = self._generator.clone_state()
        graph.register_generator_state(self._second)

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """See `Replayable`."""
        self._generator.graphsafe_set_state(self._second)
        try:
            yield
        finally:
            self._generator.graphsafe_set_state(self._first)

    def align(self) -> None:
        """Set the second state to the generator's, before a replay."""
        self._second.set_state(self._generator.get_state())

    def reset(self) -> None:
        """Restore the generator after a failed capture, which leaves its state unusable."""
        self._generator.graphsafe_set_state(self._before)
