"""Gradients in `.grad`: cleared before the passes, taken after each, and the direction added."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from surrogap.core.shards import reduced_like, shard_of, totals, whole_of
from surrogap.core.vectors import Gradients, groups_of, squared_norm
from surrogap.core.weights import Weights
from surrogap.errors import UnsupportedError

Mean = Callable[[Gradients, Sequence[Tensor]], Gradients]


def current(weights: Weights) -> Gradients:
    """Return `.grad` of each parameter."""
    return [parameter.grad for parameter in weights.parameters]


def versions(weights: Weights) -> list[int | None]:
    """Return the version of each gradient, which any write to it changes."""
    return [None if gradient is None else gradient._version for gradient in current(weights)]


@contextmanager
def cleared(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Context manager that clears `.grad`, and restores it on exit."""
    before = [parameter.grad for parameter in parameters]
    try:
        _clear(parameters)
        yield
    finally:
        for parameter, gradient in zip(parameters, before, strict=True):
            parameter.grad = gradient


@contextmanager
def disabled(weights: Weights, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Context in which passes compute no gradient of `parameters`.

    With `backward(inputs=...)` a compiled model would still compute them, and the caller's own
    `backward` may not accept `inputs`.
    """
    try:
        _require(weights, parameters, False)
        yield
    finally:
        _require(weights, parameters, True)


def _require(weights: Weights, parameters: Sequence[nn.Parameter], value: bool) -> None:
    for parameter in parameters:
        parameter.requires_grad_(value)
    # In torch 2.11, a compiled model does not notice a change to `requires_grad`, only a write to
    # the dictionaries of its modules. Without this write it would run the wrong graph.
    changed = set(map(id, parameters))
    for module in weights.modules:
        if any(id(parameter) in changed for parameter in module._parameters.values()):
            module._parameters["requires_grad"] = None
            del module._parameters["requires_grad"]


def take(weights: Weights, *, needs_any: bool = True) -> Gradients:
    """Check the gradients, return this process's shards of them, and clear `.grad`."""
    weights.fsdp.reshard()
    gradients = shards(weights, current(weights))
    if needs_any and all(gradient is None for gradient in gradients):
        raise UnsupportedError(
            "loss must depend on the model's trainable parameters, got no gradient for any of "
            "them. Build the objective from the model that the closure runs."
        )
    _check(weights, gradients)
    _clear(weights.parameters)
    return gradients


def shards(weights: Weights, gradients: Gradients) -> Gradients:
    """Return this process's shards of gradients."""
    if not weights.are_sharded:
        return gradients
    return list(map(shard_of, gradients, weights.parameters))


def total_squared_norm(weights: Weights, gradients: Gradients) -> Tensor:
    """Return `||g||^2` over all parameters and processes."""
    tensors, shardings = weights.tensors, weights.shardings
    groups = groups_of(tensors, shardings)
    terms = [squared_norm([gradients[i] for i in group], tensors[group[0]]) for group in groups]
    (result,) = totals([terms], [shardings[group[0]] for group in groups])
    return result


def _clear(parameters: Sequence[Tensor]) -> None:
    for parameter in parameters:
        parameter.grad = None


def add(weights: Weights, direction: Gradients, mean: Mean | None) -> None:
    """Add a direction to `.grad` in place, as `Tensor.backward` does; `mean` averages the sum."""
    before = current(weights)
    if weights.are_sharded:
        before = list(map(reduced_like, before, weights.parameters))
    own = shards(weights, before)
    if mean is not None:
        direction = mean(_sum(own, direction), weights.tensors)
    if weights.are_sharded:
        wholes = list(map(whole_of, direction, weights.parameters))
    else:  # `grad.detach_()`, which many copies of `zero_grad` call, rejects views
        wholes = [d.data if d is not None and d._is_view() else d for d in direction]
    for parameter, gradient, whole in zip(weights.parameters, before, wholes, strict=True):
        parameter.grad = whole if gradient is None else gradient
    pairs = zip(own, direction, strict=True)
    both = [(sum_, term) for sum_, term in pairs if sum_ is not None and term is not None]
    if both:
        update_ = torch._foreach_add_ if mean is None else torch._foreach_copy_
        update_([sum_ for sum_, _ in both], [term for _, term in both])


def _check(weights: Weights, gradients: Gradients) -> None:
    for index, (parameter, gradient) in enumerate(zip(weights.parameters, gradients, strict=True)):
        if gradient is None:
            continue
        if gradient.layout is not torch.strided:
            raise UnsupportedError(
                f"{weights.names[index]} must have a dense gradient, got layout {gradient.layout}. "
                "Build its layer with sparse=False."
            )
        if gradient.dtype is not parameter.dtype:
            raise UnsupportedError(
                f"{weights.names[index]} must have a gradient of its own dtype, got "
                f"{gradient.dtype}. Do not set its grad_dtype."
            )


def _sum(some: Gradients, others: Gradients) -> Gradients:
    return [
        b if a is None else a if b is None else a + b for a, b in zip(some, others, strict=True)
    ]
