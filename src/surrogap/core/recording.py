"""What a recording must leave as it was, and what it must find elsewhere than usual."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.optim import Optimizer

from surrogap.core.buffers import Buffers
from surrogap.core.weights import Weights, contents


class Twins:
    """The random numbers of a recorded step, which the second pass draws again.

    In a graph, a generator's state is no number that could be read and set: it counts on from where
    the generator is when the graph is replayed. So the second pass draws from a twin of the state,
    which is kept where the generator is before each replay.
    """

    def __init__(self, graph: torch.cuda.CUDAGraph) -> None:
        self._generator = torch.cuda.default_generators[torch.cuda.current_device()]
        self._first = self._generator.graphsafe_get_state()
        self._second = self._generator.clone_state()
        self._before = self._generator.clone_state()
        graph.register_generator_state(self._second)

    def __call__(self, devices: Iterable[torch.device]) -> "Twins":
        """As `RandomState` is made for each step; a recording has but one."""
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
        """Has the second pass of the next replay draw what the first draws."""
        self._second.set_state(self._generator.get_state())

    def reset(self) -> None:
        """After a recording that failed, which leaves the state unusable."""
        self._generator.graphsafe_set_state(self._before)


@contextmanager
def undone(weights: Weights, optimizer: Optimizer) -> Iterator[None]:
    """Whatever the body trains is undone after it; state that the optimizer lacked is zero then."""
    parameters = _parameters(weights, optimizer)
    copies = [parameter.detach().clone() for parameter in parameters]
    states = {
        parameter: {k: v.clone() for k, v in state.items() if isinstance(v, Tensor)}
        for parameter, state in optimizer.state.items()
    }
    with (
        torch.random.fork_rng([torch.cuda.current_device()]),
        Buffers().kept(weights.buffers),
        gradients_kept(weights, optimizer),
    ):
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(parameters, copies)
                for parameter, state in optimizer.state.items():
                    before = states.get(parameter, {})
                    for name, value in state.items():
                        if isinstance(value, Tensor):
                            value.copy_(before[name]) if name in before else value.zero_()


@contextmanager
def places_kept(weights: Weights) -> Iterator[None]:
    """Weights and buffers are where they were after the body: a graph works on that memory alone.

    Raises:
        RuntimeError: They were not.
    """
    tensors = [*weights.parameters, *weights.frozen, *contents(weights.buffers)]
    places = [(t, t.detach()) for t in tensors if t is not None and t.layout is torch.strided]
    try:
        yield
    finally:
        moved = [pair for pair in places if pair[0].data_ptr() != pair[1].data_ptr()]
        for tensor, place in moved:
            tensor.data = place
        if moved:
            raise RuntimeError(
                "model must write to its weights and buffers in place, got one that assigns to "
                "their .data in its forward pass. Train with objective.backward instead."
            )


@contextmanager
def gradients_kept(weights: Weights, optimizer: Optimizer) -> Iterator[None]:
    """Whatever the body does to `.grad`, it is what it was after it."""
    before = [(parameter, parameter.grad) for parameter in _parameters(weights, optimizer)]
    try:
        yield
    finally:
        for parameter, gradient in before:
            parameter.grad = gradient


@contextmanager
def settings_replaced(optimizer: Optimizer, lrs: Sequence[Tensor]) -> Iterator[None]:
    """The optimizer reads its learning rates on the device, as a graph must."""
    before = [dict(group) for group in optimizer.param_groups]
    for group, lr in zip(optimizer.param_groups, lrs, strict=True):
        group["lr"] = lr
        if "capturable" in group:
            group["capturable"] = True
    try:
        yield
    finally:
        for group, settings in zip(optimizer.param_groups, before, strict=True):
            group.update(settings)


def _parameters(weights: Weights, optimizer: Optimizer) -> list[Tensor]:
    mine = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    every = (*weights.parameters, *weights.frozen, *mine)
    return list({id(parameter): parameter for parameter in every}.values())
