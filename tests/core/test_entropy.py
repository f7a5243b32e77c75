"""The Langevin steps of Entropy-SGD against the reference."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from surrogap import EntropySGD
from tests import equality, reference, toy_models
from tests.objective_cases import WALK


def losses(
    model: nn.Module, batches: list[toy_models.Batch]
) -> tuple[list[reference.Loss], Tensor]:
    pairs = [
        reference.loss_of(
            copy.deepcopy(model), lambda net, data=data: toy_models.cross_entropy(net, data)
        )
        for data in batches
    ]
    return [f for f, _ in pairs], pairs[0][1]


def walking(model: nn.Module, batches: list[toy_models.Batch]) -> Callable[[], Tensor]:
    """A closure that draws a new batch in each pass."""
    stream = iter(batches)
    return lambda: toy_models.cross_entropy(model, next(stream))


@pytest.mark.parametrize("inner_steps", [1, 2, 6])
def test_closure_may_draw_a_batch_for_each_step(inner_steps: int, device: torch.device) -> None:
    model = toy_models.mlp().double().to(device)
    batches = [toy_models.batch(seed=seed, device=device) for seed in range(inner_steps)]
    fs, w = losses(model, batches)
    expected = reference.entropy_sgd(fs, w, **WALK)
    EntropySGD(model, inner_steps=inner_steps, noise=0.0, **WALK).backward(walking(model, batches))
    assert equality.relative_error(toy_models.flat_grad(model), expected) < 1e-13


def test_noise_is_normal_and_scaled_by_the_root_of_the_step(device: torch.device) -> None:
    model, noise = toy_models.mlp().double().to(device), 0.3
    batches = [toy_models.batch(seed=seed, device=device) for seed in range(4)]
    fs, w = losses(model, batches)
    torch.manual_seed(11)
    normals = [
        torch.cat([torch.empty_like(p).normal_().reshape(-1) for p in model.parameters()]).detach()
        for _ in range(4)
    ]
    expected = reference.entropy_sgd(fs, w, noise=noise, normals=normals, **WALK)
    torch.manual_seed(11)
    EntropySGD(model, inner_steps=4, noise=noise, **WALK).backward(walking(model, batches))
    assert equality.relative_error(toy_models.flat_grad(model), expected) < 1e-13


def test_scoping_raises_gamma_with_the_step() -> None:
    """In the authors' code the step is never incremented, so scoping has no effect."""
    model, data = toy_models.mlp().double(), toy_models.batch()
    objective = EntropySGD(model, inner_steps=2, noise=0.0, scoping=0.1, **WALK)
    fs, w = losses(model, [data, data])
    for step in range(4):
        model.zero_grad()
        objective.backward(toy_models.closure_of(model, data))
        gamma = WALK["gamma"] * 1.1**step
        expected = reference.entropy_sgd(fs, w, **{**WALK, "gamma": gamma})
        assert equality.relative_error(toy_models.flat_grad(model), expected) < 1e-12
    resumed = EntropySGD(model, scoping=0.1, **WALK)
    resumed.load_state_dict(objective.state_dict())
    assert resumed.gamma_now == objective.gamma_now == pytest.approx(WALK["gamma"] * 1.1**4)


def test_micro_batches_share_a_step_of_scoping() -> None:
    model, data = toy_models.mlp(), toy_models.batch()
    objective = EntropySGD(model, scoping=0.1)
    for sync in (False, False, True):
        objective.backward(toy_models.closure_of(model, data), sync=sync)
    assert objective.state_dict() == {"num_steps": 1}


def test_inner_steps_in_half_precision_are_kept_in_float32() -> None:
    """Inner steps below the resolution of bfloat16 add up."""
    model = nn.Linear(4, 1, bias=False).bfloat16()
    nn.init.ones_(model.weight)
    objective = EntropySGD(
        model, gamma=1e-6, inner_steps=8, inner_lr=1e-4, noise=0.0, averaging=0.0
    )
    objective.backward(lambda: model.weight.sum())
    # Each of 8 steps moves by 1e-4 against a unit of 7.8e-3: d = gamma * 8e-4.
    assert model.weight.grad.float().tolist()[0] == pytest.approx([8e-10] * 4, rel=0.01)


def test_report_is_that_of_the_first_pass() -> None:
    model = toy_models.mlp().double()
    batches = [toy_models.batch(seed=seed) for seed in range(3)]
    fs, w = losses(model, batches)
    report = EntropySGD(model, inner_steps=3).backward(walking(model, batches))
    assert float(report.loss) == pytest.approx(float(fs[0](w)))
    assert float(report.grad_norm) == pytest.approx(float(reference.gradient(fs[0], w).norm()))
    assert all(bool(x.isnan()) for x in (report.gap, report.perturbed_loss, report.cosine))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"inner_steps": 0}, ValueError, "inner_steps must be at least 1"),
        ({"inner_steps": 2.0}, TypeError, "inner_steps must be an integer, got 2.0"),
        ({"inner_steps": True}, TypeError, "inner_steps must be an integer, got True"),
        ({"averaging": 1.0}, ValueError, "averaging must be at least 0 and below 1, got 1.0"),
        ({"gamma": 0.0}, ValueError, "gamma must be above 0 and finite, got 0.0"),
        ({"inner_lr": 0.0}, ValueError, "inner_lr must be above 0 and finite, got 0.0"),
    ],
)
def test_bad_settings(change: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        EntropySGD(nn.Linear(2, 1), **change)
