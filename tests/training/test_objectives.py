"""The objective of a configuration has the configuration's numbers, or its own defaults."""

from typing import Any

import pytest
import torch
from torch import nn

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
from surrogap.core.catalog import OBJECTIVES
from surrogap.rho import InverseSqrt, ProportionalToLR
from surrogap.training.config import Config
from surrogap.training.objective_configs import CONFIGS
from surrogap.training.objectives import objective_of

STEPS_PER_EPOCH = 10


def make(**changes: Any) -> Objective:
    model = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return objective_of(Config().override(**changes), model, optimizer, STEPS_PER_EPOCH)


KINDS = {
    "vanilla": Vanilla,
    "sam": SAM,
    "gsam": GSAM,
    "asam": ASAM,
    "gap-penalty": GapPenalty,
    "momentum-sam": MomentumSAM,
    "entropy-sgd": EntropySGD,
}


@pytest.mark.parametrize("name", CONFIGS)
def test_defaults_are_the_objectives_own(name: str) -> None:
    """The defaults of the command line are those of the classes."""
    found = make(objective=name)
    expected = {
        k: v for k, v in OBJECTIVES[name].arguments.items() if k != "eta"
    }  # of its geometry
    assert type(found) is KINDS[name]
    assert {key: getattr(found, key) for key in expected} == expected


def test_numbers_are_the_configurations() -> None:
    settings = {"rho": 0.3, "alpha": 0.2, "minimize": "plain", "memory": "exact"}
    objective = make(objective="gsam", perturb="norms", **settings)
    assert {name: getattr(objective, name) for name in settings} == settings
    assert objective.perturb == "norms"
    walk = make(objective="entropy-sgd", gamma=0.5, inner_lr=0.2, noise=0.1, scoping=0.01)
    assert vars(walk).items() >= {("gamma", 0.5), ("inner_lr", 0.2), ("scoping", 0.01)}


def test_radii() -> None:
    rho = make(objective="sam", rho=0.3, rho_min=0.1, lr=0.1, lr_min=0.02).rho
    assert isinstance(rho, ProportionalToLR)
    assert (rho.rho_max, rho.rho_min, rho.lr_max, rho.lr_min) == (0.3, 0.1, 0.1, 0.02)
    for name in ("sam", "asam", "momentum-sam"):
        rho = make(objective=name, rho_inverse_sqrt=True).rho
        assert isinstance(rho, InverseSqrt)
        assert rho.rho_0 == OBJECTIVES[name].arguments["rho"]


@pytest.mark.parametrize(
    ("changes", "every", "start"),
    [({"every": 5}, 5, 0), ({"start_epoch": 2}, 1, 20), ({"every": 3, "start_epoch": 1}, 3, 10)],
)
def test_some_steps_are_plain(changes: dict[str, Any], every: int, start: int) -> None:
    objective = make(objective="sam", rho=0.3, **changes)
    assert isinstance(objective, Intermittent)
    assert isinstance(objective.objective, SAM)
    assert (objective.every, objective.start, objective.rho) == (every, start, 0.3)


def test_an_objective_must_be_used_before_the_end() -> None:
    assert isinstance(make(objective="sam", epochs=3, start_epoch=2), Intermittent)
    with pytest.raises(
        ValueError, match="start_epoch must be before the end of the run, got 3 with 10"
    ):
        make(objective="sam", epochs=3, start_epoch=3)
    with pytest.raises(
        ValueError, match="start_epoch must be before the end of the run, got 2 with 10"
    ):
        make(objective="sam", steps=20, start_epoch=2)
