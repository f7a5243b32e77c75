"""Rollback of changes made by warm-up and capture: to weights, states, buffers and settings."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.optim import Optimizer

from surrogap.core.buffers import Buffers, moved, places_of
from surrogap.core.objective import Objective
from surrogap.core.weights import Weights, are_same, contents
from surrogap.errors import UnsupportedError


@contextmanager
def undone(objective: Objective, weights: Weights, optimizer: Optimizer) -> Iterator[None]:
    """Context manager that undoes the training steps in its body.

    State that the optimizer and the objective did not have before is set to zero.
    """
    parameters = parameters_of(weights, optimizer)
    copies = [parameter.detach().clone() for parameter in parameters]
    before = {key: state.clone() for key, state in _states(objective, optimizer).items()}
    with torch.random.fork_rng([torch.cuda.current_device()]), Buffers().kept(weights.buffers):
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(parameters, copies)
                for key, state in _states(objective, optimizer).items():
                    state.copy_(before[key]) if key in before else state.zero_()


@contextmanager
def memory_kept(weights: Weights) -> Iterator[None]:
    """Context in which weights and buffers must stay in their memory, as a graph requires.

    Tensors whose `.data` was assigned are restored; buffers replaced by other tensors are not.
    """
    before = _tensors(weights)
    places = places_of(t for t in before if t is not None and t.layout is torch.strided)
    try:
        yield
    finally:
        assigned = moved(places)
        for tensor, place in assigned:
            tensor.data = place
        if assigned or not are_same(_tensors(weights), before):
            raise UnsupportedError(
                "model must write to its weights and buffers in place, got one that assigns new "
                "ones in its forward pass. Train with objective.backward instead."
            )


@contextmanager
def settings_replaced(optimizer: Optimizer, lrs: Sequence[Tensor]) -> Iterator[None]:
    """Context in which the optimizer reads its learning rates from the device, as a graph must."""
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


def _states(objective: Objective, optimizer: Optimizer) -> dict[object, Tensor]:
    """Return the state of the objective, and of the optimizer by parameter and name."""
    states: dict[object, Tensor] = {m: m for m in objective._workspace.states.tensors}
    for parameter, state in optimizer.state.items():
        states |= {(parameter, k): v for k, v in state.items() if isinstance(v, Tensor)}
    return states


def _tensors(weights: Weights) -> list[Tensor | None]:
    return [*weights.parameters, *weights.frozen, *contents(weights.buffers)]


def parameters_of(weights: Weights, optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters of the model and of the optimizer, each once."""
    mine = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    every = (*weights.parameters, *weights.frozen, *mine)
    return list({id(parameter): parameter for parameter in every}.values())
