"""How sharp is it: curvature, surrogate gap, landscape and a radius that fits, for any model."""

from surrogap.analysis.eigen import Eigenpairs, dominant_eigenvalue, eigenvalues
from surrogap.analysis.hessian import Hessian
from surrogap.analysis.spectrum import Density, Trace, density, trace
from surrogap.analysis.surface import Surface, cross_entropy

__all__ = [
    "Density",
    "Eigenpairs",
    "Hessian",
    "Surface",
    "Trace",
    "cross_entropy",
    "density",
    "dominant_eigenvalue",
    "eigenvalues",
    "trace",
]
