"""A range of radii for a model, from a sweep on a few batches.

The sweep measures the quantities of a training step at each radius: the gap `h`, the perturbed loss
`f_p` and the cosine of the angle between `g` and `g_p`. The range consists of the radii whose gap
is 0.05 to 0.5, for a loss such as cross-entropy with ten classes. Smaller radii usually change
training little; radii far above the range cost accuracy. `docs/results.md` and
`docs/how-to/sharpness.md` compare this range with the best radii of full runs.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass

from torch import Tensor

from surrogap.analysis.gap import sorted_radii
from surrogap.analysis.surface import Progress, Surface
from surrogap.checks import integer, number
from surrogap.errors import InvalidValueError, UnsupportedError

# Maps the surface of one batch to its ascent step at radius 1.
Climb = Callable[[Surface], Tensor]

# Three radii per factor of ten.
USUAL_RHOS = tuple(round(10 ** (exponent / 3), 6) for exponent in range(-9, 4))

# The gaps at the ends of the suggested range. They are not relative to the loss: the range would
# then depend on how long the model has trained.
GAP_FROM = 0.05
GAP_TO = 0.5


@dataclass(frozen=True)
class Radius:
    """The quantities of a step at one radius, as means over the batches.

    Attributes:
        rho: The radius.
        loss: `f`.
        perturbed_loss: `f_p`.
        cosine: The cosine of the angle between `g` and `g_p`.
    """

    rho: float
    loss: float
    perturbed_loss: float
    cosine: float

    @property
    def gap(self) -> float:
        """`h = f_p - f`."""
        return self.perturbed_loss - self.loss


@dataclass(frozen=True)
class Sweep:
    """The measurements at all radii, and the suggested range.

    Attributes:
        radii: The measurements at each radius, in increasing order.
        num_batches: The number of batches that were averaged.
        unit: The unit of the gap; see `find_rho`.
    """

    radii: tuple[Radius, ...]
    num_batches: int
    unit: float = 1.0

    @property
    def low(self) -> float | None:
        """The lower end of the suggested range; None if every radius of the sweep is too small."""
        return _crossing(self.radii, GAP_FROM * self.unit)

    @property
    def high(self) -> float:
        """The upper end; infinite if no radius of the sweep is too large."""
        found = _crossing(self.radii, GAP_TO * self.unit)
        return math.inf if found is None else found

    def contains(self, rho: float) -> bool:
        """True if a radius is within the suggested range.

        Args:
            rho: The radius.
        """
        return self.low is not None and self.low <= rho <= self.high

    @property
    def center(self) -> float | None:
        """A radius to start with, the geometric mean of `low` and `high`.

        It is `low` if `high` is infinite, and None if `low` is None.
        """
        if self.low is None or math.isinf(self.high):
            return self.low
        return math.sqrt(self.low * self.high)

    def explain(self, rho: float | None = None) -> str:
        """The suggestion in words.

        Args:
            rho: A radius to judge as well: within the range, too small or too large.
        """
        words = [self._suggestion()]
        if rho is not None:
            words.append(self._verdict(rho))
        return " ".join(words)

    def _suggestion(self) -> str:
        first, last = self.radii[0], self.radii[-1]
        if self.low is None:
            return (
                f"Up to rho = {last.rho:g} the ascent step raises the loss by less than "
                f"{GAP_FROM * self.unit:g}: sweep larger radii."
            )
        if self.high <= self.low == first.rho:
            return (
                f"Already at rho = {first.rho:g} the ascent step raises the loss from "
                f"{first.loss:.4g} to {first.perturbed_loss:.4g}: sweep smaller radii."
            )
        if self.high <= self.low:  # the loss jumps to infinity or NaN
            before = max(radius.rho for radius in self.radii if radius.rho < self.low)
            return (
                f"The loss is not finite from rho = {self.low:g} on, and rises by less than "
                f"{GAP_FROM * self.unit:g} at {before:g}: sweep radii between them."
            )
        below = f" Radii below {first.rho:g} were not swept." if self.low == first.rho else ""
        if math.isinf(self.high):
            return f"Try rho from {self.low:.2g}. Radii above {last.rho:g} were not swept.{below}"
        return (
            f"Try rho from {self.low:.2g} to {self.high:.2g}, starting with {self.center:.2g}."
            f"{below}"
        )

    def _verdict(self, rho: float) -> str:
        rho = float(f"{rho:g}")  # as shown: a schedule may round to slightly below a swept radius
        first, last = self.radii[0].rho, self.radii[-1].rho
        if (self.low == first and rho < first) or (math.isinf(self.high) and rho > last):
            return f"{rho:g} was not swept."
        if self.contains(rho):
            return f"{rho:g} is within this range."
        if self.low is None or rho < self.low:
            return (
                f"{rho:g} is too small: it raises the loss by less than {GAP_FROM * self.unit:g}."
            )
        return f"{rho:g} is too large: it raises the loss by more than {GAP_TO * self.unit:g}."


def cost_of_find_rho(num_rhos: int = len(USUAL_RHOS), num_batches: int = 4) -> int:
    """The cost of `find_rho`, in gradients of single batches.

    >>> cost_of_find_rho()
    56
    """
    return num_batches * (1 + num_rhos)


def find_rho(
    surface: Surface,
    rhos: Sequence[float] = USUAL_RHOS,
    *,
    num_batches: int = 4,
    unit: float = 1.0,
    climb: Climb | None = None,
    progress: Progress | None = None,
) -> Sweep:
    """Sweep radii for a model on its batches, and suggest a range.

    The range consists of the radii whose ascent step raises the mean loss by 0.05 to 0.5. It is a
    range to search, not the best radius, which depends on the whole run. Measure in training mode,
    on a model that has been trained for a while: at initialization, the loss surface is different.
    Use the batch size over which one perturbation is computed. To measure with dropout, build the
    surface with `is_checked=False`; both passes use the same masks, as in training.

    Args:
        surface: The loss, on the batches of training.
        rhos: The radii to sweep.
        num_batches: The number of batches to use, from the start.
        unit: The unit of the gap: the range is 0.05 to 0.5 times this. 1 suits cross-entropy with
            about ten classes. For another loss, pass about half the loss of a model that has
            learned nothing.
        climb: A function from the surface of one batch to the ascent step at radius 1, which is
            multiplied by rho. By default SAM's, `g / ||g||`.
        progress: Called with the number of gradients so far and the total.

    Raises:
        TypeError: An argument is not a number, or a count is not an integer.
        ValueError: There is no radius or no batch, or an argument is out of bounds.
        RuntimeError: The gradient or the ascent step of a batch is zero.

    >>> import torch
    >>> from torch import nn
    >>> model = nn.Linear(2, 1, bias=False)
    >>> _ = nn.init.ones_(model.weight)
    >>> curvatures = torch.tensor([1.0, 9.0])
    >>> surface = Surface(model, [curvatures], lambda w, c: (c * w.weight**2).sum())
    >>> sweep = find_rho(surface)
    >>> sweep.contains(0.001)
    False
    """
    radii = sorted_radii(rhos)
    integer("num_batches", num_batches, at_least=1, remedy="Pass a count, such as 4.")
    number("unit", unit, above=0, remedy="Leave it out for cross-entropy.")
    surfaces = surface.batch_surfaces(num_batches)
    if not surfaces:
        raise InvalidValueError("batches must not be empty, got none. Pass the training loader.")
    num_gradients = cost_of_find_rho(len(radii), len(surfaces))
    rows: list[list[Radius]] = []
    for index, one in enumerate(surfaces):
        rows.append([])
        for radius in _of_batch(one, radii, climb):
            rows[-1].append(radius)
            if progress is not None:
                progress(index * (1 + len(radii)) + 1 + len(rows[-1]), num_gradients)
    means = tuple(_mean(column) for column in zip(*rows, strict=True))
    return Sweep(means, len(surfaces), unit)


def _of_batch(surface: Surface, rhos: Sequence[float], climb: Climb | None) -> Iterator[Radius]:
    """Measure one batch at each radius."""
    space = surface.space
    loss, g = surface.gradient()
    norm = space.norm(g)
    delta = g / norm if climb is None or not norm > 0 else climb(surface)
    if not (0 < norm < math.inf and space.norm(delta) > 0):
        raise UnsupportedError(
            "gradient must be finite, and neither it nor the ascent step may be zero, got a "
            f"gradient of norm {float(norm)} on a batch. Measure a model that is still learning, "
            "after some training steps."
        )
    for rho in rhos:
        with surface.moved(rho * delta):
            perturbed_loss, g_p = surface.gradient()
        cosine = space.dot(g, g_p) / (norm * space.norm(g_p))
        yield Radius(rho, float(loss), float(perturbed_loss), float(cosine))


def _mean(radii: Sequence[Radius]) -> Radius:
    _, *measured = zip(*map(astuple, radii), strict=True)
    return Radius(radii[0].rho, *(sum(values) / len(radii) for values in measured))


def _crossing(radii: Sequence[Radius], gap: float) -> float | None:
    """The first radius with at least this gap, interpolated on a logarithmic scale."""
    for index, radius in enumerate(radii):
        if radius.gap >= gap or math.isnan(radius.gap):  # NaN counts as larger
            if index == 0 or not math.isfinite(radius.gap):
                return radius.rho
            before = radii[index - 1]
            t = (gap - before.gap) / (radius.gap - before.gap)
            return math.exp((1 - t) * math.log(before.rho) + t * math.log(radius.rho))
    return None
