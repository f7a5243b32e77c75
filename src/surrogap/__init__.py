"""Sharpness-aware training in PyTorch: a better gradient, and every optimizer as it is."""

from surrogap.core.entropy import EntropySGD
from surrogap.core.objectives import ASAM, GSAM, SAM, GapPenalty, Vanilla
from surrogap.core.report import Report

__version__ = "0.1.0"

__all__ = ["ASAM", "GSAM", "SAM", "EntropySGD", "GapPenalty", "Report", "Vanilla"]
