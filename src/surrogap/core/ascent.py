"""Where to look: the point `w + delta` at which the second pass runs.

Both geometries are one formula, `delta = rho * T^2 g / (||T g|| + eps)` with a diagonal `T`. A
parameter's kind says what its part of `T` is.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from torch import Tensor


class Kind(IntEnum):
    """What `T` is on a parameter."""

    STILL = 0  # 0: it does not climb
    PLAIN = 1  # 1
    SCALED = 2  # |w| + eta


@dataclass(frozen=True)
class Ascent:
    """The geometry of the climb.

    Args:
        eta: None for SAM's Euclidean ball: `T = 1`. A number for ASAM's: `T = |w| + eta` on
            tensors of two or more dimensions, and 1 on biases and the weights of norms.
        eps: Added to the norm. A gradient of zero climbs nowhere in any case.
    """

    eta: float | None = None
    eps: float = 1e-12

    def kinds(self, parameters: Sequence[Tensor]) -> list[Kind]:
        """What `T` is on each of the parameters if it climbs."""
        if self.eta is None:
            return [Kind.PLAIN] * len(parameters)
        return [Kind.SCALED if parameter.ndim >= 2 else Kind.PLAIN for parameter in parameters]
