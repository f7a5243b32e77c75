"""Sharpness of any model: curvature, surrogate gap, loss landscape, and a range for rho.

Everything is measured on a `Surface`: a model's loss over a set of batches.
"""

from surrogap.analysis.batches import cross_entropy
from surrogap.analysis.bounds import RiskBound, Solution, gaussian_divergence, risk_bound
from surrogap.analysis.eigen import Eigenpairs, dominant_eigenvalue, eigenvalues
from surrogap.analysis.find_rho import Sweep, find_rho
from surrogap.analysis.gap import Gap, Gaps, surrogate_gaps
from surrogap.analysis.hessian import Hessian
from surrogap.analysis.landscape import (
    Line,
    Plane,
    between,
    gradient_direction,
    line,
    plane,
    random_direction,
)
from surrogap.analysis.sharpness import Plan, Sharpness, sharpness
from surrogap.analysis.spectrum import Density, Trace, density, trace
from surrogap.analysis.surface import Surface

__all__ = [
    "Density",
    "Eigenpairs",
    "Gap",
    "Gaps",
    "Hessian",
    "Line",
    "Plan",
    "Plane",
    "RiskBound",
    "Sharpness",
    "Solution",
    "Surface",
    "Sweep",
    "Trace",
    "between",
    "cross_entropy",
    "density",
    "dominant_eigenvalue",
    "eigenvalues",
    "find_rho",
    "gaussian_divergence",
    "gradient_direction",
    "line",
    "plane",
    "random_direction",
    "risk_bound",
    "sharpness",
    "surrogate_gaps",
    "trace",
]
