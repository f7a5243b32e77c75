"""Radius schedules, to pass as `rho=`."""

from surrogap.core.rho import InverseSqrt, ProportionalToLR, Schedule

__all__ = ["InverseSqrt", "ProportionalToLR", "Schedule"]
