"""The geometry of the ascent step: the point `w + delta` where the second pass runs.

Both geometries have one formula, `delta = rho * T^2 v / (||T v|| + eps)` with a diagonal `T`, for a
climb along `v`. The kind of a parameter defines its part of `T`.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import final


class Kind(IntEnum):
    """The value of `T` on a parameter."""

    FIXED = 0  # T = 0: the parameter does not climb
    PLAIN = 1  # T = 1
    SCALED = 2  # T = |w| + eta


@final
@dataclass(frozen=True)
class Geometry:
    """The ball in which an objective climbs, defined by a diagonal matrix `T`.

    The ascent step along `v` is `delta = rho * T^2 v / (||T v|| + eps)`.

    Args:
        eta: None for SAM's Euclidean ball, `T = 1`. A number for ASAM's adaptive ball:
            `T = |w| + eta` on every parameter except biases, where `T = 1`.
    """

    eta: float | None = None

    def kind(self, name: str) -> Kind:
        """Return the kind of a parameter that climbs.

        Args:
            name: The name of the parameter. The names of biases end in "bias".
        """
        return Kind.PLAIN if self.eta is None or name.endswith("bias") else Kind.SCALED
