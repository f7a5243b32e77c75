"""The objectives under test, each with its reference."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from surrogap import (
    ASAM,
    GSAM,
    SAM,
    EntropySGD,
    GapPenalty,
    Intermittent,
    MomentumSAM,
    Objective,
    Vanilla,
)
from tests import reference

RHO, ALPHA, LAM, ETA = 0.1, 0.4, 0.3, 0.01
WALK = {"gamma": 0.5, "inner_lr": 0.2, "averaging": 0.6}


@dataclass(frozen=True)
class Case:
    # Takes a model; keyword arguments override those of the case.
    make: Callable[..., Objective]
    # Takes the loss, the weights, and a function that turns a selection of parameters into a mask.
    reference: Callable[[reference.Loss, Tensor, "Masks"], Tensor]


Masks = Callable[[Callable[[str, nn.Parameter], bool]], Tensor]


def is_large(name: str, parameter: nn.Parameter) -> bool:
    return parameter.ndim >= 2


def momentum_of(w: Tensor) -> Tensor:
    """A momentum that is a function of the weights, so that a reference can compute it."""
    return torch.cos(3 * w) + 0.1


def momentum_sam(model: nn.Module, **settings: object) -> MomentumSAM:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for parameter in model.parameters():
        optimizer.state[parameter]["momentum_buffer"] = momentum_of(parameter.detach())
    return MomentumSAM(model, optimizer, **{"rho": RHO, **settings})


def intermittent(model: nn.Module, **settings: object) -> Intermittent:
    return Intermittent(GSAM(model, **{"rho": RHO, "alpha": ALPHA, **settings}))


def _euclidean(f: reference.Loss, w: Tensor, _: Masks) -> Tensor:
    return reference.climb(f, w, RHO)


def _partial(f: reference.Loss, w: Tensor, masks: Masks) -> Tensor:
    return reference.climb(f, w, RHO, mask=masks(is_large))


def _adaptive(f: reference.Loss, w: Tensor, masks: Masks) -> Tensor:
    return reference.adaptive_climb(f, w, RHO, ETA, masks(reference.is_not_bias))


OBJECTIVES = {
    "Vanilla": Case(Vanilla, lambda f, w, m: reference.vanilla(f, w)),
    "SAM": Case(
        partial(SAM, rho=RHO),
        lambda f, w, m: reference.sam(f, w, _euclidean(f, w, m)),
    ),
    "GSAM": Case(
        partial(GSAM, rho=RHO, alpha=ALPHA),
        lambda f, w, m: reference.gsam(f, w, _euclidean(f, w, m), ALPHA),
    ),
    "GSAM-plain": Case(
        partial(GSAM, rho=RHO, alpha=ALPHA, minimize="plain"),
        lambda f, w, m: reference.gsam_plain(f, w, _euclidean(f, w, m), ALPHA),
    ),
    "ASAM": Case(
        partial(ASAM, rho=RHO, eta=ETA),
        lambda f, w, m: reference.sam(f, w, _adaptive(f, w, m)),
    ),
    "ASAM-ascent": Case(
        partial(ASAM, rho=RHO, eta=ETA, alpha=ALPHA),
        lambda f, w, m: reference.gsam(f, w, _adaptive(f, w, m), ALPHA),
    ),
    "GapPenalty": Case(
        partial(GapPenalty, rho=RHO, lam=LAM),
        lambda f, w, m: reference.gap_penalty(f, w, _euclidean(f, w, m), LAM),
    ),
    "SAM-partial": Case(
        partial(SAM, rho=RHO, perturb=is_large),
        lambda f, w, m: reference.sam(f, w, _partial(f, w, m)),
    ),
    "GSAM-partial": Case(
        partial(GSAM, rho=RHO, alpha=ALPHA, perturb=is_large),
        lambda f, w, m: reference.gsam(f, w, _partial(f, w, m), ALPHA),
    ),
    "Intermittent": Case(
        intermittent, lambda f, w, m: reference.gsam(f, w, _euclidean(f, w, m), ALPHA)
    ),
    "MomentumSAM": Case(
        momentum_sam, lambda f, w, m: reference.momentum_sam(f, w, momentum_of(w), RHO)
    ),
    "EntropySGD": Case(
        partial(EntropySGD, inner_steps=3, noise=0.0, **WALK),
        lambda f, w, m: reference.entropy_sgd([f] * 3, w, **WALK),
    ),
}
# The number of passes. The first runs at `w`, except in MomentumSAM.
NUM_PASSES = dict.fromkeys(OBJECTIVES, 2) | {"Vanilla": 1, "MomentumSAM": 1, "EntropySGD": 3}
TWO_PASS = [name for name in OBJECTIVES if NUM_PASSES[name] == 2]
# The objectives in which all parameters climb.
WHOLE = [name for name in TWO_PASS if "partial" not in name]

every_objective = pytest.mark.parametrize("name", OBJECTIVES)
# The objectives whose reference holds at every step: MomentumSAM's is for one momentum.
every_memoryless = pytest.mark.parametrize("name", [n for n in OBJECTIVES if n != "MomentumSAM"])
every_two_pass = pytest.mark.parametrize("name", TWO_PASS)
every_whole_climb = pytest.mark.parametrize("name", WHOLE)
