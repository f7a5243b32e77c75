"""The radius schedules."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from surrogap import SAM, EntropySGD
from surrogap.rho import InverseSqrt, ProportionalToLR, Schedule
from tests import equality, toy_models

BOUNDS: dict[str, Any] = {"rho_max": 0.6, "rho_min": 0.1, "lr_max": 0.5, "lr_min": 0.1}


def optimizer(lr: float = 0.5) -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=lr)


@pytest.mark.parametrize(
    ("lr", "rho"),
    [
        (0.5, 0.6),
        (0.3, 0.35),
        (0.1, 0.1),
        (0.05, 0.0375),  # warm-up: below lr_min, still on the line
        (0.02, 0.0),  # the line is below zero
        (0.0, 0.0),
        (0.5 * (1 + 1e-9), 0.6),  # a scheduler's rounding
    ],
)
def test_proportional_to_lr(lr: float, rho: float) -> None:
    schedule = ProportionalToLR(optimizer(lr), **BOUNDS)
    assert schedule.value() == pytest.approx(rho, abs=1e-15)
    assert 0 <= schedule.value() <= 0.6


def test_proportional_to_lr_reads_tensors_and_the_given_group() -> None:
    groups = [{"params": [nn.Parameter(torch.zeros(1))], "lr": lr} for lr in (0.1, 0.3)]
    both = torch.optim.SGD(groups)
    both.param_groups[1]["lr"] = torch.tensor(0.3, dtype=torch.float64)
    assert ProportionalToLR(both, **BOUNDS).value() == pytest.approx(0.1)
    assert ProportionalToLR(both, **BOUNDS, group=1).value() == pytest.approx(0.35)


@pytest.mark.parametrize("lr", [0.51, 0.5 * (1 + 1e-4), float("nan"), float("inf")])
def test_lr_above_lr_max_is_a_mistake_in_units(lr: float) -> None:
    model = toy_models.mlp()
    base = optimizer()
    objective = SAM(model, rho=ProportionalToLR(base, **BOUNDS))
    base.param_groups[0]["lr"] = lr
    before = equality.bits(model)
    with pytest.raises(ValueError, match=f"lr_max must bound the learning rate, got lr={lr} and"):
        objective.backward(toy_models.closure_of(model, toy_models.batch()))
    assert equality.same_bits(before, equality.bits(model))
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"lr_min": 0.5},
            ValueError,
            "lr_min must be below lr_max, got lr_min=0.5 and lr_max=0.5. For a constant radius "
            "pass rho=0.6.",
        ),
        ({"lr_min": 0.6}, ValueError, "lr_min must be below lr_max"),
        ({"rho_min": 0.7}, ValueError, "rho_min must not exceed rho_max, got rho_min=0.7"),
        ({"rho_max": -0.1}, ValueError, "rho_max must be at least 0 and finite, got -0.1"),
        ({"lr_max": float("nan")}, ValueError, "lr_max must be at least 0 and finite, got nan"),
        ({"lr_min": -0.1}, ValueError, "lr_min must be at least 0 and finite, got -0.1"),
        ({"rho_min": "0"}, TypeError, "rho_min must be a number, got str"),
        ({"group": 1}, ValueError, "group must be at most 0, got 1. Pass 0."),
    ],
)
def test_bad_bounds(change: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        ProportionalToLR(optimizer(), **{**BOUNDS, **change})


def test_proportional_to_lr_needs_an_optimizer() -> None:
    with pytest.raises(TypeError, match="optimizer must be a torch optimizer, got Linear"):
        ProportionalToLR(nn.Linear(1, 1), **BOUNDS)


def test_inverse_sqrt_counts_steps() -> None:
    model, data = toy_models.mlp(), toy_models.batch()
    schedule = InverseSqrt(0.4)
    objective, closure = SAM(model, rho=schedule), toy_models.closure_of(model, data)
    used = [float(objective.backward(closure).rho) for _ in range(4)]
    assert used == pytest.approx([0.4 / math.sqrt(t) for t in (1, 2, 3, 4)])
    # Micro-batches of one step share its radius, and a failed step does not count.
    used = [float(objective.backward(closure, sync=last).rho) for last in (False, False, True)]
    assert used == pytest.approx([0.4 / math.sqrt(5)] * 3)
    with pytest.raises(TypeError):
        objective.backward(lambda: None)
    assert schedule.state_dict() == {"num_steps": 5}
    resumed = InverseSqrt(0.4)
    resumed.load_state_dict(schedule.state_dict())
    assert resumed.value() == schedule.value() == pytest.approx(0.4 / math.sqrt(6))


@pytest.mark.parametrize("state", [{}, {"num_steps": -5}, {"num_steps": "3"}])
def test_a_state_without_a_count_is_refused(state: dict[str, Any]) -> None:
    for counter in (InverseSqrt(0.4), EntropySGD(nn.Linear(1, 1), scoping=0.1)):
        with pytest.raises(ValueError, match="state must hold num_steps, a count of steps, got"):
            counter.load_state_dict(state)


@pytest.mark.parametrize("rho_0", [-0.1, float("nan")])
def test_inverse_sqrt_refuses(rho_0: float) -> None:
    with pytest.raises(ValueError, match="rho_0 must be at least 0 and finite, got"):
        InverseSqrt(rho_0)


def test_a_custom_schedule() -> None:
    class Halving(Schedule):
        rho = 1.0

        def value(self) -> float:
            return self.rho

        def advance(self) -> None:
            self.rho /= 2

    model = toy_models.mlp()
    objective, closure = SAM(model, rho=Halving()), toy_models.closure_of(model, toy_models.batch())
    assert [float(objective.backward(closure).rho) for _ in range(3)] == [1.0, 0.5, 0.25]


def test_a_schedule_is_readable_in_the_repr_of_an_objective() -> None:
    objective = SAM(nn.Linear(1, 1), rho=InverseSqrt(0.1))
    assert repr(objective) == "SAM(rho=InverseSqrt(rho_0=0.1, num_steps=0))"
