"""How sharp is it: curvature, surrogate gap, landscape and a radius that fits, for any model."""

from surrogap.analysis.hessian import Hessian
from surrogap.analysis.surface import Surface, cross_entropy

__all__ = ["Hessian", "Surface", "cross_entropy"]
