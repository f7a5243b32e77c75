"""Sharpness-aware training in PyTorch: a better gradient, and every optimizer as it is."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from surrogap.core.capture import CapturedStep, capture
    from surrogap.core.entropy import EntropySGD
    from surrogap.core.objectives import ASAM, GSAM, SAM, GapPenalty, Vanilla
    from surrogap.core.report import Report

__version__ = "0.1.0"

__all__ = [
    "ASAM",
    "GSAM",
    "SAM",
    "CapturedStep",
    "EntropySGD",
    "GapPenalty",
    "Report",
    "Vanilla",
    "capture",
]

_HOMES = {
    "ASAM": "surrogap.core.objectives",
    "CapturedStep": "surrogap.core.capture",
    "EntropySGD": "surrogap.core.entropy",
    "GSAM": "surrogap.core.objectives",
    "GapPenalty": "surrogap.core.objectives",
    "Report": "surrogap.core.report",
    "SAM": "surrogap.core.objectives",
    "Vanilla": "surrogap.core.objectives",
    "capture": "surrogap.core.capture",
}


def __getattr__(name: str) -> object:
    """Loads a public name, and torch with it, when it is first asked for.

    So `surrogap --help` need not wait for torch, which takes seconds.
    """
    if name not in _HOMES:
        raise AttributeError(f"module 'surrogap' has no attribute {name!r}")
    value: object = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
