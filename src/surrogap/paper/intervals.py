"""Means over seeds with confidence intervals, and differences paired by seed.

The interval of a mean of n values with standard deviation s is `mean ± t * s / sqrt(n)`, with t the
quantile of Student's distribution with n - 1 degrees of freedom. For two values, t would be 12.7,
too large for a useful interval, so there is none.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

CONFIDENCE = 0.95
MIN_SEEDS = 3


@final
@dataclass(frozen=True)
class Interval:
    """A mean and its confidence interval.

    Attributes:
        mean: The mean.
        half_width: Half the width of the interval; None for fewer than `MIN_SEEDS` values.
        num_seeds: The number of values, one for each seed.
    """

    mean: float
    half_width: float | None
    num_seeds: int

    @property
    def excludes_zero(self) -> bool:
        """True if there is an interval and zero lies outside of it."""
        return self.half_width is not None and abs(self.mean) > self.half_width

    def text(self, decimals: int = 2, sign: str = "") -> str:
        """The mean, and half the width of the interval if there is one.

        Has one more decimal if both would look equal, which would hide whether zero is excluded.

        >>> Interval(mean=1.25, half_width=0.5, num_seeds=3).text(sign="+")
        '+1.25 ± 0.50'
        >>> Interval(mean=0.501, half_width=0.502, num_seeds=3).text()
        '0.501 ± 0.502'
        """
        if self.half_width is None:
            return f"{self.mean:{sign}.{decimals}f}"
        if f"{abs(self.mean):.{decimals}f}" == f"{self.half_width:.{decimals}f}":
            decimals += 1
        return f"{self.mean:{sign}.{decimals}f} ± {self.half_width:.{decimals}f}"


def interval(values: Sequence[float]) -> Interval:
    """The mean of values and its 95 % confidence interval.

    >>> interval([1.0, 2.0, 3.0]).text()
    '2.00 ± 2.48'
    """
    mean, number = statistics.fmean(values), len(values)
    if number < MIN_SEEDS:
        return Interval(mean, None, number)
    error = statistics.stdev(values) / math.sqrt(number)
    return Interval(mean, t_quantile(number - 1) * error, number)


def paired_difference(values: Mapping[int, float], others: Mapping[int, float]) -> Interval | None:
    """The mean of `values - others` over the seeds that both have; None without a common seed.

    >>> paired_difference({0: 1.0, 1: 2.0, 2: 9.0}, {0: 0.5, 1: 1.5}).text()
    '0.50'
    """
    differences = [value - others[seed] for seed, value in values.items() if seed in others]
    return interval(differences) if differences else None


def t_quantile(degrees: int, confidence: float = CONFIDENCE) -> float:
    """The t for which Student's distribution has probability `confidence` between -t and t.

    >>> round(t_quantile(4), 3)
    2.776
    """
    low, high = 0.0, 1.0
    while _within(high, degrees) < confidence:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, degrees) < confidence else (low, middle)
    return high


def _within(t: float, degrees: int) -> float:
    """The probability of Student's distribution between -t and t, as a finite sum.

    Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.3 and 26.7.4.
    """
    angle = math.atan(t / math.sqrt(degrees))
    sine, cosine = math.sin(angle), math.cos(angle)
    is_odd = degrees % 2 == 1
    term, total = (cosine, 0.0) if is_odd else (1.0, 0.0)
    for k in range(1 if is_odd else 0, degrees - 1, 2):
        total += term
        term *= cosine**2 * (k + 1) / (k + 2)
    return 2 / math.pi * (angle + sine * total) if is_odd else sine * total
