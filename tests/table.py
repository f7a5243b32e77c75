"""One table of objectives, each with its reference, that drives the contracts."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest
from torch import Tensor

from surrogap import ASAM, GSAM, SAM, EntropySGD, GapPenalty, Vanilla
from surrogap.core.objective import Objective
from tests import reference

RHO, ALPHA, LAM, ETA = 0.1, 0.4, 0.3, 0.01
WALK = {"gamma": 0.5, "inner_lr": 0.2, "averaging": 0.6}


@dataclass(frozen=True)
class Entry:
    # From a model; keyword arguments override the entry's own.
    make: Callable[..., Objective]
    # From the loss, the weights, and which of them belong to matrices.
    reference: Callable[[reference.Loss, Tensor, Tensor], Tensor]


def _euclidean(f: reference.Loss, w: Tensor, _: Tensor) -> Tensor:
    return reference.climb(f, w, RHO)


def _adaptive(f: reference.Loss, w: Tensor, matrix: Tensor) -> Tensor:
    return reference.adaptive_climb(f, w, RHO, ETA, matrix)


OBJECTIVES = {
    "Vanilla": Entry(Vanilla, lambda f, w, m: reference.vanilla(f, w)),
    "SAM": Entry(
        partial(SAM, rho=RHO),
        lambda f, w, m: reference.sam(f, w, _euclidean(f, w, m)),
    ),
    "GSAM": Entry(
        partial(GSAM, rho=RHO, alpha=ALPHA),
        lambda f, w, m: reference.gsam(f, w, _euclidean(f, w, m), ALPHA),
    ),
    "GSAM-plain": Entry(
        partial(GSAM, rho=RHO, alpha=ALPHA, minimize="plain"),
        lambda f, w, m: reference.gsam_plain(f, w, _euclidean(f, w, m), ALPHA),
    ),
    "ASAM": Entry(
        partial(ASAM, rho=RHO, eta=ETA),
        lambda f, w, m: reference.sam(f, w, _adaptive(f, w, m)),
    ),
    "ASAM-ascent": Entry(
        partial(ASAM, rho=RHO, eta=ETA, alpha=ALPHA),
        lambda f, w, m: reference.gsam(f, w, _adaptive(f, w, m), ALPHA),
    ),
    "GapPenalty": Entry(
        partial(GapPenalty, rho=RHO, lam=LAM),
        lambda f, w, m: reference.gap_penalty(f, w, _euclidean(f, w, m), LAM),
    ),
    "EntropySGD": Entry(
        partial(EntropySGD, inner_steps=3, noise=0.0, **WALK),
        lambda f, w, m: reference.entropy_sgd([f] * 3, w, **WALK),
    ),
}
TWO_PASS = [name for name in OBJECTIVES if name not in ("Vanilla", "EntropySGD")]

every_objective = pytest.mark.parametrize("name", OBJECTIVES)
every_two_pass = pytest.mark.parametrize("name", TWO_PASS)
