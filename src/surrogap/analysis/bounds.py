"""The bound on the risk by the surrogate gap: Corollary 5.2.1 and its discussion."""

import math
from dataclasses import dataclass

from surrogap.checks import integer, number
from surrogap.errors import InvalidValueError


@dataclass(frozen=True)
class RiskBound:
    """A bound on the expected loss on new data: `loss + gap + complexity`.

    Attributes:
        loss: `C`, the training loss.
        gap: `h`, the surrogate gap of the training set.
        complexity: `4 * sqrt((KL + log(2 m / a)) / m)`.
        probability: A lower bound on the probability that the bound holds.
    """

    loss: float
    gap: float
    complexity: float
    probability: float

    @property
    def value(self) -> float:
        """The bound."""
        return self.loss + self.gap + self.complexity


def risk_bound(
    loss: float,
    gap: float,
    *,
    rho: float,
    num_weights: int,
    num_samples: int,
    divergence: float,
    noise: float,
    a: float = 0.05,
) -> RiskBound:
    """The bound of Corollary 5.2.1 (PAC-Bayes, with the worst case in a ball).

    With probability `(1 - a) * (1 - exp(-(rho / (sqrt(2) * noise) - sqrt(num_weights))^2))`, the
    expected loss on new data is at most `loss + gap + 4 * sqrt((KL + log(2 m / a)) / m)`. The bound
    relies on the paper's assumption that noise in the weights does not lower the expected loss. For
    real models it is far above any loss: it ranks solutions, but does not predict their loss.

    Args:
        loss: The training loss.
        gap: The worst-case surrogate gap at `rho`.
        rho: The radius.
        num_weights: `k`, the number of weights.
        num_samples: `m`, the size of the training set.
        divergence: `KL(Q || P)` of the posterior from the prior; see `gaussian_divergence`.
        noise: `b`, the standard deviation of the noise in the weights.
        a: The probability that the PAC-Bayes bound fails.

    Raises:
        TypeError: An argument is not a number, or a count is not an integer.
        ValueError: An argument is out of bounds, or `rho` is below `noise * sqrt(2 * num_weights)`,
            which the corollary's proof requires.

    >>> bound = risk_bound(0.1, 0.02, rho=1.0, num_weights=50, num_samples=10**6,
    ...     divergence=100.0, noise=0.05)
    >>> round(bound.value, 4), round(bound.probability, 4)
    (0.1634, 0.95)
    """
    number("rho", rho, above=0.0, remedy="Pass the radius of the gap.")
    integer("num_weights", num_weights, at_least=1, remedy="Pass the model's number of weights.")
    integer("num_samples", num_samples, at_least=1, remedy="Pass the size of the training set.")
    number("divergence", divergence, remedy="Pass gaussian_divergence(...), for example.")
    number("noise", noise, above=0.0, remedy="Pass a standard deviation, such as 1e-3.")
    number("a", a, above=0.0, below=1.0, remedy="Pass a small probability, such as 0.05.")
    excess = rho / (math.sqrt(2.0) * noise) - math.sqrt(num_weights)
    if excess < 0.0:
        raise InvalidValueError(
            f"rho must be at least noise * sqrt(2 * num_weights), got rho={rho} below "
            f"{noise * math.sqrt(2.0 * num_weights):.6g}. The ball must contain the noise: pass a "
            "larger rho with its gap, or less noise."
        )
    complexity = 4.0 * math.sqrt((divergence + math.log(2.0 * num_samples / a)) / num_samples)
    return RiskBound(loss, gap, complexity, (1.0 - a) * -math.expm1(-(excess**2)))


def gaussian_divergence(distance: float, noise: float) -> float:
    """`KL(N(w, b^2 I) || N(w_0, b^2 I)) = ||w - w_0||^2 / (2 b^2)`.

    Args:
        distance: `||w - w_0||`, where `w_0` is the mean of the prior, such as the initial weights.
        noise: `b`, the standard deviation of both.

    Raises:
        TypeError: An argument is not a number, or a count is not an integer.
        ValueError: `distance` is negative, or `noise` not positive.

    >>> round(gaussian_divergence(0.3, noise=0.1), 6)
    4.5
    """
    number("distance", distance, remedy="Pass a norm.")
    number("noise", noise, above=0.0, remedy="Pass a standard deviation, such as 1e-3.")
    return distance**2 / (2.0 * noise**2)


@dataclass(frozen=True)
class Solution:
    """The loss and the sharpness of a trained model, for the discussion of Corollary 5.2.1.

    After training, the loss `C` and the dominant eigenvalue `sigma` are fixed, and the bound
    `C + sigma * rho_true^2 / 2 + R` depends on a radius that the data determine, not training. Of
    two solutions with equal perturbed loss at `rho_train`, the flatter one therefore has the lower
    bound if `rho_true > rho_train`, and the sharper one if `rho_true < rho_train`.

    Attributes:
        loss: `C`.
        sharpness: `sigma`.

    >>> sam, gsam = Solution(loss=0.1, sharpness=40.0), Solution(loss=0.2, sharpness=20.0)
    >>> rho_train = sam.radius_of_equal_loss(gsam)
    >>> rho_train
    0.1
    >>> gsam.perturbed_loss(0.15) < sam.perturbed_loss(0.15)
    True
    """

    loss: float
    sharpness: float

    def perturbed_loss(self, rho: float) -> float:
        """`C + sigma * rho^2 / 2`: the bound without its regularization term `R`.

        Args:
            rho: The radius.
        """
        return self.loss + self.sharpness * rho**2 / 2

    def radius_of_equal_loss(self, other: "Solution") -> float | None:
        """The radius at which both have the same perturbed loss; None if one is always better.

        Args:
            other: The solution to compare with.
        """
        if self.sharpness == other.sharpness:
            return None
        squared = 2 * (other.loss - self.loss) / (self.sharpness - other.sharpness)
        return math.sqrt(squared) if squared >= 0 else None
