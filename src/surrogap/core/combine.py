"""The combination of the two gradients: from `g` and `g_p` to the direction `d = a * g + b * g_p`.

`a` and `b` are functions of three numbers, `<g, g>`, `<g, g_p>` and `<g_p, g_p>`. The classes here
define the functions; `arithmetic.py` evaluates them on the device.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias, final

from torch import Tensor

from surrogap.checks import number
from surrogap.errors import InvalidValueError

# A setting of a step: a Python number, or for a captured step a scalar on the device.
Number: TypeAlias = float | Tensor


class Coefficients(NamedTuple):
    """The coefficients of a direction `d = a * g + b * g_p`.

    `a = a_0 + a_1 * <g, g_p> / <g, g>` and `b = b_0 + b_1 * <g, g_p> / <g_p, g_p>`. The ratios
    project one gradient onto the other; for a gradient of zero they are 0.

    Args:
        a_0: The constant term of `a`.
        b_0: The constant term of `b`.
        a_1: The factor of the projection of `g_p` onto `g`.
        b_1: The factor of the projection of `g` onto `g_p`.
    """

    a_0: Number
    b_0: Number
    a_1: Number = 0.0
    b_1: Number = 0.0

    @property
    def use_g(self) -> bool:
        """True if the direction depends on `g` other than through the ascent step."""
        return not (self.a_0 == self.a_1 == self.b_1 == 0.0)


class Combine(ABC):
    """A way to combine `g` and `g_p`. Subclass it to define your own.

    A subclass may keep settings as attributes and change them between steps.
    """

    @abstractmethod
    def coefficients(self) -> Coefficients:
        """Return the coefficients of the current step as Python numbers.

        Called when the objective is built and at every step, so raise ValueError here for an
        invalid setting.
        """


@final
@dataclass
class PerturbedGradient(Combine):
    """SAM's direction, `d = g_p`."""

    def coefficients(self) -> Coefficients:
        """See `Combine`."""
        return Coefficients(a_0=0.0, b_0=1.0)


@final
@dataclass
class SurrogateGap(Combine):
    """GSAM's direction, which also lowers the surrogate gap `h = f_p - f`.

    Args:
        alpha: The weight of the gap.
        minimize: "perturbed" for min(f_p, h), or "plain" for min(f, h); `GSAM` has the formulas.
    """

    alpha: float
    minimize: Literal["perturbed", "plain"] = "perturbed"

    def coefficients(self) -> Coefficients:
        """See `Combine`."""
        remedy = "Pass a non-negative number, such as 0.1."
        alpha = number("alpha", self.alpha, remedy=remedy)
        if self.minimize == "perturbed":
            # Not -alpha: for alpha = 0 that is -0.0, and the result would not be SAM's bit for bit.
            return Coefficients(a_0=0.0 - alpha, b_0=1.0, b_1=alpha)
        if self.minimize == "plain":
            return Coefficients(a_0=1.0, b_0=alpha, a_1=-alpha)
        raise InvalidValueError(
            f'minimize must be "perturbed" or "plain", got {self.minimize!r}. '
            'Pass "perturbed" for min(f_p, h), the paper\'s method, "plain" for min(f, h).'
        )


@final
@dataclass
class Penalty(Combine):
    """The direction of the paper's baseline `f_p + lam * h`: `d = g_p + lam * (g_p - g)`.

    Args:
        lam: The weight of the gap.
    """

    lam: float

    def coefficients(self) -> Coefficients:
        """See `Combine`."""
        remedy = "Pass a non-negative number, such as 0.1; 0 is SAM."
        lam = number("lam", self.lam, remedy=remedy)
        return Coefficients(a_0=0.0 - lam, b_0=1.0 + lam)
