"""Sharpness-aware training in PyTorch: SAM, GSAM and related objectives, with any optimizer."""

# Not from typing, whose import takes 20 ms: an interrupt in that time would print a traceback.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from surrogap.core.capture import capture
    from surrogap.core.captured_step import CapturedStep
    from surrogap.core.entropy import EntropySGD
    from surrogap.core.intermittent import Intermittent
    from surrogap.core.objective import Objective
    from surrogap.core.objectives import ASAM, GSAM, SAM, GapPenalty, MomentumSAM, Vanilla
    from surrogap.core.report import Report

__version__ = "0.1.0"

__all__ = [
    "ASAM",
    "GSAM",
    "SAM",
    "CapturedStep",
    "EntropySGD",
    "GapPenalty",
    "Intermittent",
    "MomentumSAM",
    "Objective",
    "Report",
    "Vanilla",
    "capture",
]

_MODULES = {
    "ASAM": "surrogap.core.objectives",
    "CapturedStep": "surrogap.core.captured_step",
    "EntropySGD": "surrogap.core.entropy",
    "GSAM": "surrogap.core.objectives",
    "GapPenalty": "surrogap.core.objectives",
    "Intermittent": "surrogap.core.intermittent",
    "MomentumSAM": "surrogap.core.objectives",
    "Objective": "surrogap.core.objective",
    "Report": "surrogap.core.report",
    "SAM": "surrogap.core.objectives",
    "Vanilla": "surrogap.core.objectives",
    "capture": "surrogap.core.capture",
}


def __getattr__(name: str) -> object:
    """Import a public name, and torch with it, on first use.

    Otherwise `surrogap --help` would wait seconds for torch.
    """
    if name not in _MODULES:
        raise AttributeError(f"module 'surrogap' has no attribute {name!r}")
    from importlib import import_module

    value: object = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULES])
