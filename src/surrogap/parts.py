"""Building blocks for your own objectives; see docs/how-to/new-objective.md."""

from surrogap.core.along import Along, Gradient, Momentum
from surrogap.core.combine import (
    Coefficients,
    Combine,
    Penalty,
    PerturbedGradient,
    SurrogateGap,
)
from surrogap.core.geometry import Geometry

__all__ = [
    "Along",
    "Coefficients",
    "Combine",
    "Geometry",
    "Gradient",
    "Momentum",
    "Penalty",
    "PerturbedGradient",
    "SurrogateGap",
]
