"""The surrogate gap of a model over a set of batches.

The paper's gap is `h = f(w + delta) - f(w)` with one step of ascent, `delta = rho * g / ||g||`. It
approximates the worst case in the ball, `max f(w + delta) - f(w)` over `||delta|| <= rho`, which
more ascent steps approximate better. At a minimum the worst case is `rho^2 / 2` times the dominant
eigenvalue of the Hessian, for small `rho` (Lemma 3.3), so `2 h / rho^2` estimates that eigenvalue.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from surrogap.analysis.surface import Progress, Surface
from surrogap.checks import integer, number
from surrogap.errors import InvalidValueError

# The cost of a forward pass, in gradients: a backward pass has twice as many multiplications.
FORWARD = 1 / 3
# The properties of a `Gap` that follow from its losses.
DERIVED = ("gap", "sharpness", "worst_gap", "worst_sharpness")


@dataclass(frozen=True)
class Gap:
    """The surrogate gap at one radius.

    Attributes:
        rho: The radius.
        loss: `f(w)`.
        perturbed_loss: `f(w + rho * g / ||g||)`.
        worst_loss: The largest loss found in the ball; NaN without a search.

    >>> gap = Gap(rho=0.1, loss=1.0, perturbed_loss=1.02, worst_loss=1.04)
    >>> round(gap.gap, 6), round(gap.worst_sharpness, 6)
    (0.02, 8.0)
    """

    rho: float
    loss: float
    perturbed_loss: float
    worst_loss: float

    @property
    def gap(self) -> float:
        """The paper's `h`, after one step of ascent."""
        return self.perturbed_loss - self.loss

    @property
    def worst_gap(self) -> float:
        """The largest `h` found, a lower bound of the worst case in the ball."""
        return self.worst_loss - self.loss

    @property
    def sharpness(self) -> float:
        """`2 h / rho^2`. Away from a minimum the gradient's term, `2 ||g|| / rho`, dominates."""
        return 2 * self.gap / self.rho**2

    @property
    def worst_sharpness(self) -> float:
        """`2 h / rho^2` of the worst case found."""
        return 2 * self.worst_gap / self.rho**2


@dataclass(frozen=True)
class Gaps:
    """Surrogate gaps at several radii, in increasing order.

    Attributes:
        gaps: One for each radius.
        grad_norm: `||g||` at the weights: close to 0 at a minimum.
    """

    gaps: tuple[Gap, ...]
    grad_norm: float


def cost_of_gaps(num_rhos: int, *, num_ascent_steps: int = 0, has_start: bool = False) -> float:
    """The cost of `surrogate_gaps`, in gradients over the set; a forward pass is a third of one.

    >>> cost_of_gaps(3)
    2.0
    """
    if not num_ascent_steps:
        return 1 + num_rhos * FORWARD
    num_candidates = num_rhos * (1 + 2 * has_start) + (num_rhos - 1)
    return 1 + num_rhos * num_ascent_steps + (num_rhos + num_candidates) * FORWARD


def surrogate_gaps(
    surface: Surface,
    rhos: Sequence[float],
    *,
    num_ascent_steps: int = 0,
    start: Tensor | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> Gaps:
    """The surrogate gap of the whole set, with one perturbation for all batches.

    For the gap of training steps, with a perturbation for each batch, see `find_rho`.

    Args:
        surface: The loss.
        rhos: The radii; the result has them in increasing order.
        num_ascent_steps: The number of gradients for the worst case at each radius; 0 for no
            search. Projected ascent starts where the loss is highest: at the one-step perturbation,
            the worst one of the previous radius, or `start`. It doubles its step while the loss
            rises, which turns it into a power iteration, and halves it when the loss falls.
        start: A direction to try with both signs, such as the dominant eigenvector: at a minimum it
            is the worst direction, while the gradient is zero.
        seed: The seed of a random direction, used if the gradient is zero.
        progress: Called with the number of radii so far and the total.

    Raises:
        TypeError: An argument is not a number, or a count is not an integer.
        ValueError: There is no radius, or an argument is out of bounds.

    >>> import torch
    >>> from torch import nn
    >>> model = nn.Linear(2, 1, bias=False)
    >>> _ = nn.init.zeros_(model.weight)
    >>> surface = Surface(model, [torch.tensor([3.0, 5.0])], lambda w, c: (c * w.weight**2).sum())
    >>> (gap,) = surrogate_gaps(surface, [0.1], num_ascent_steps=20).gaps
    >>> round(gap.worst_sharpness, 4)
    10.0
    """
    radii = sorted_radii(rhos)
    remedy = "Pass a count, such as 20, or 0 for none."
    integer("num_ascent_steps", num_ascent_steps, at_least=0, remedy=remedy)
    loss, gradient = surface.gradient()
    grad_norm = float(surface.space.norm(gradient))
    is_slope = grad_norm != 0.0
    uphill = _unit(surface, gradient if is_slope else surface.space.random(seed))
    starts = [] if start is None else [_unit(surface, start), -_unit(surface, start)]
    gaps, before = [], None
    for index, rho in enumerate(radii):
        # A gradient of zero gives no ascent step.
        one_step = _loss_at(surface, rho * uphill) if is_slope else float(loss)
        worst_loss = math.nan
        if num_ascent_steps:
            candidates = [uphill, *starts, *([] if before is None else [before])]
            before = max(candidates, key=lambda u: _loss_at(surface, rho * u))
            worst_loss, before = _ascended(surface, rho, before, num_ascent_steps)
        gaps.append(Gap(rho, float(loss), one_step, worst_loss))
        if progress is not None:
            progress(index + 1, len(radii))
    return Gaps(tuple(gaps), grad_norm)


def sorted_radii(rhos: Sequence[float]) -> list[float]:
    """Return radii in increasing order.

    Raises:
        TypeError: One is not a number.
        ValueError: There is no radius, or one is not positive and finite.
    """
    remedy = "Pass positive radii, such as [0.05, 0.1]."
    radii = sorted(number("rhos", rho, above=0.0, remedy=remedy) for rho in rhos)
    if not radii:
        raise InvalidValueError(
            "rhos must hold at least one radius, got none. Pass some, such as [0.05]."
        )
    return radii


def _ascended(surface: Surface, rho: float, u: Tensor, num_steps: int) -> tuple[float, Tensor]:
    """Ascent from `u` in the unit ball: the largest loss found at `w + rho * u`, and its `u`."""
    loss, gradient = _gradient_at(surface, rho * u)
    length = 4.0
    for _ in range(num_steps - 1):
        norm = surface.space.norm(gradient)
        if not norm > 0:
            break
        candidate = u + (length / norm) * gradient
        candidate /= surface.space.norm(candidate).clamp(min=1.0)
        there, slope = _gradient_at(surface, rho * candidate)
        if there > loss:
            loss, u, gradient = there, candidate, slope
            length *= 2.0
        else:
            length /= 2.0
    return loss, u


def _unit(surface: Surface, vector: Tensor) -> Tensor:
    return vector / surface.space.norm(vector)


def _loss_at(surface: Surface, delta: Tensor) -> float:
    with surface.moved(delta):
        return float(surface.loss())


def _gradient_at(surface: Surface, delta: Tensor) -> tuple[float, Tensor]:
    with surface.moved(delta):
        loss, gradient = surface.gradient()
    return float(loss), gradient
