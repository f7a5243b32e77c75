"""The loss landscape around the weights: the loss along one and two directions.

In evaluation mode BatchNorm uses its running statistics everywhere. They fit only the weights at
the center, so the loss rises faster than it would with recomputed statistics. In training mode each
batch has its own statistics, as in training; then the loss does not depend on the scale of a layer
before a BatchNorm. Put the model into the mode whose loss you want. On the line between two models
the statistics are interpolated too, so both ends are the models themselves.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from surrogap.analysis.surface import Progress, Surface, unwrapped
from surrogap.core.buffers import Buffers
from surrogap.errors import InvalidValueError


@dataclass(frozen=True)
class Line:
    """The loss at `w + step * direction`.

    Attributes:
        steps: The factors of the direction.
        losses: The loss at each step.
        label: The name of the direction.
    """

    steps: tuple[float, ...]
    losses: tuple[float, ...]
    label: str = ""


@dataclass(frozen=True)
class Plane:
    """The loss at `w + x * first + y * second`.

    Attributes:
        x_steps: The factors of the first direction.
        y_steps: The factors of the second direction.
        losses: The losses: a row for each `y`, with an entry for each `x`.
        labels: The names of the directions.
    """

    x_steps: tuple[float, ...]
    y_steps: tuple[float, ...]
    losses: tuple[tuple[float, ...], ...]
    labels: tuple[str, str] = ("", "")


def random_direction(surface: Surface, seed: int = 0) -> Tensor:
    """A filter-normalized random direction (Li et al. 2018).

    Each filter has the norm of the corresponding filter of the weights. A filter is a row of a
    parameter with two or more dimensions: the weights of one output channel or neuron. So a step of
    1 changes every filter by its own norm, whatever its scale. Biases and the weights of norm
    layers, which have fewer than two dimensions, do not change. If weights are sharded along a
    dimension other than the first, the shards of a filter count as filters.

    Args:
        surface: The loss; its weights give the norms of the filters.
        seed: The seed of the random numbers.

    >>> model = nn.Linear(4, 2)
    >>> surface = Surface(model, [torch.ones(1, 4)], lambda m, x: m(x).sum())
    >>> weight, bias = surface.space.pieces(random_direction(surface))
    >>> torch.allclose(weight.norm(dim=1), model.weight.norm(dim=1)), bool(bias.any())
    (True, False)
    """
    direction, position = surface.space.random(seed), surface.position()
    pieces = zip(surface.space.pieces(direction), surface.space.pieces(position), strict=True)
    for piece, weight in pieces:
        if piece.ndim < 2:
            piece.zero_()
        elif len(piece):
            rows, filters = piece.view(len(piece), -1), weight.view(len(piece), -1)
            rows *= filters.norm(dim=1, keepdim=True) / rows.norm(dim=1, keepdim=True)
    return direction


def gradient_direction(surface: Surface) -> Tensor:
    """The gradient of the loss, normalized to norm 1.

    Args:
        surface: The loss.

    Raises:
        ValueError: The gradient is zero.
    """
    _, gradient = surface.gradient()
    norm = surface.space.norm(gradient)
    if not 0 < norm < math.inf:
        raise InvalidValueError(
            f"gradient must be finite and not zero, got norm {float(norm)}. At a stationary point, "
            "use an eigenvector or a random direction."
        )
    return gradient / norm


def line(
    surface: Surface,
    direction: Tensor,
    steps: Sequence[float],
    *,
    label: str = "",
    progress: Progress | None = None,
) -> Line:
    """The loss at `w + step * direction`, at the cost of one forward pass over the set per step.

    Args:
        surface: The loss.
        direction: The direction: `random_direction`, `gradient_direction` or an eigenvector.
        steps: The factors of the direction.
        label: The name of the direction, for figures.
        progress: Called after each loss with the number of losses so far and the total.

    >>> model = nn.Linear(1, 1, bias=False)
    >>> _ = nn.init.zeros_(model.weight)
    >>> surface = Surface(model, [torch.ones(1, 1)], lambda m, x: m(x).square().sum())
    >>> line(surface, torch.tensor([2.0]), [-1.0, 0.0, 0.5]).losses
    (4.0, 0.0, 1.0)
    """
    losses = _losses(surface, (step * direction for step in steps), len(steps), progress)
    return Line(tuple(steps), tuple(losses), label)


def plane(
    surface: Surface,
    first: Tensor,
    second: Tensor,
    x_steps: Sequence[float],
    y_steps: Sequence[float],
    *,
    labels: tuple[str, str] = ("", ""),
    progress: Progress | None = None,
) -> Plane:
    """The loss at `w + x * first + y * second`: one forward pass over the set per point.

    Args:
        surface: The loss.
        first: The direction of x.
        second: The direction of y. It need not be orthogonal to the first.
        x_steps: The factors of the first direction.
        y_steps: The factors of the second direction.
        labels: The names of the directions, for figures.
        progress: Called after each loss with the number of losses so far and the total.
    """
    num_x, num_points = len(x_steps), len(x_steps) * len(y_steps)
    deltas = (x * first + y * second for y in y_steps for x in x_steps)
    losses = _losses(surface, deltas, num_points, progress)
    rows = tuple(tuple(losses[start : start + num_x]) for start in range(0, num_points, num_x))
    return Plane(tuple(x_steps), tuple(y_steps), rows, labels)


def _losses(
    surface: Surface, deltas: Iterable[Tensor], number: int, progress: Progress | None
) -> list[float]:
    """The losses at some displacements from the weights."""
    losses: list[float] = []
    for delta in deltas:
        with surface.moved(delta):
            losses.append(float(surface.loss()))
        if progress is not None:
            progress(len(losses), number)
    return losses


def between(
    surface: Surface,
    other: nn.Module,
    steps: Sequence[float],
    *,
    label: str = "",
    progress: Progress | None = None,
) -> Line:
    """The loss on the straight line between the weights of two models.

    Floating-point buffers, such as BatchNorm's statistics, are interpolated too.

    Args:
        surface: The loss, at the first model.
        other: The second model, of the same architecture.
        steps: The positions on the line: 0 is the first model, 1 the second. They may lie outside
            [0, 1].
        label: The name of the line, for figures.
        progress: Called after each loss with the number of losses so far and the total.

    Raises:
        ValueError: The shapes of the other model's parameters or buffers differ, or the values of
            frozen parameters do.
    """
    other = unwrapped(other)
    _check_same_architecture(surface.model, other)
    theirs = dict(other.named_parameters())
    for name, parameter in surface.model.named_parameters():
        if not parameter.requires_grad and not torch.equal(parameter, theirs[name].to(parameter)):
            raise InvalidValueError(
                f"other must have the same frozen parameters, got different values of {name}. "
                "Unfreeze them in the first model before you build its surface."
            )
    names = {id(parameter): name for name, parameter in surface.model.named_parameters()}
    there = surface.space.vector(theirs[names[id(p)]] for p in surface.weights.parameters)
    direction = there - surface.position()
    losses: list[float] = []
    for step in steps:
        with _buffers_between(surface, other, step):
            losses.extend(line(surface, direction, [step]).losses)
        if progress is not None:
            progress(len(losses), len(steps))
    return Line(tuple(steps), tuple(losses), label)


def _check_same_architecture(one: nn.Module, other: nn.Module) -> None:
    tensors = [dict((*m.named_parameters(), *m.named_buffers())) for m in (one, other)]
    for name in tensors[0] | tensors[1]:
        shapes = [tuple(some[name].shape) if name in some else "none" for some in tensors]
        if shapes[0] != shapes[1]:
            raise InvalidValueError(
                f"other must have the same parameters and buffers, got {shapes[1]} for {name} "
                f"instead of {shapes[0]}. Pass two models of the same architecture."
            )


@contextmanager
def _buffers_between(surface: Surface, other: nn.Module, step: float) -> Iterator[None]:
    theirs = dict(other.named_buffers())
    with Buffers().kept(surface.weights.buffers), torch.no_grad():
        for name, buffer in surface.model.named_buffers():
            if buffer.is_floating_point():
                buffer.lerp_(theirs[name].to(buffer), step)
        yield
