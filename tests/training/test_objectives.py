"""The objective of a configuration has the configuration's numbers, or its own defaults."""

from typing import Any

import pytest
import torch
from torch import nn

from surrogap import ASAM, GSAM, SAM, EntropySGD, GapPenalty, Vanilla
from surrogap.core.objective import Objective
from surrogap.rho import InverseSqrt, ProportionalToLR
from surrogap.training.config import Config
from surrogap.training.objectives import counting_state, load_counting_state, objective_of


def make(**changes: Any) -> Objective:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return objective_of(Config().override(**changes), model, optimizer)


@pytest.mark.parametrize(
    ("name", "kind", "defaults"),
    [
        ("vanilla", Vanilla, {}),
        ("sam", SAM, {"rho": 0.05}),
        ("gsam", GSAM, {"rho": 0.05, "alpha": 0.4, "minimize": "perturbed"}),
        ("asam", ASAM, {"rho": 0.5, "alpha": 0.0}),
        ("gap-penalty", GapPenalty, {"rho": 0.05, "lam": 0.1}),
        ("entropy-sgd", EntropySGD, {"gamma": 0.03, "inner_steps": 5, "averaging": 0.75}),
    ],
)
def test_defaults_are_the_objectives_own(name: str, kind: type, defaults: dict[str, Any]) -> None:
    """Of the command line too: what the documentation of each class says."""
    found, own = make(objective=name), kind(nn.Linear(2, 1))
    assert type(found) is kind
    assert {key: getattr(found, key) for key in defaults} == defaults
    assert {key: getattr(own, key) for key in defaults} == defaults


def test_numbers_are_the_configurations() -> None:
    settings = {"rho": 0.3, "alpha": 0.2, "minimize": "plain", "scope": "global", "memory": "low"}
    objective = make(objective="gsam", **settings)
    assert {name: getattr(objective, name) for name in settings} == settings
    walk = make(objective="entropy-sgd", gamma=0.5, inner_lr=0.2, noise=0.1, scoping=0.01)
    assert vars(walk).items() >= {("gamma", 0.5), ("inner_lr", 0.2), ("scoping", 0.01)}


def test_radii() -> None:
    rho = getattr(make(objective="sam", rho=0.3, rho_min=0.1, lr=0.1, lr_min=0.02), "rho")  # noqa: B009
    assert isinstance(rho, ProportionalToLR)
    assert (rho.rho_max, rho.rho_min, rho.lr_max, rho.lr_min) == (0.3, 0.1, 0.1, 0.02)
    for name, default in (("sam", 0.05), ("asam", 0.5)):
        rho = getattr(make(objective=name, rho_inverse_sqrt=True), "rho")  # noqa: B009
        assert isinstance(rho, InverseSqrt)
        assert rho.rho_0 == default


@pytest.mark.parametrize(
    ("changes", "counts"),
    [
        ({"objective": "sam", "rho_inverse_sqrt": True}, True),
        ({"objective": "entropy-sgd"}, True),
        ({"objective": "gsam"}, False),
        ({"objective": "vanilla"}, False),
    ],
)
def test_what_counts_goes_on(changes: dict[str, Any], counts: bool) -> None:
    state = {"num_steps": 7} if counts else {}
    objective = make(**changes)
    load_counting_state(objective, state)
    assert counting_state(objective) == state
