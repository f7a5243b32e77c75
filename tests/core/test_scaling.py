"""Loss scaling and autocast: one `unscale_`, ordinary clipping, and overflows."""

import copy
from contextlib import suppress
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from surrogap import EntropySGD
from tests import equality, toy_models
from tests.objective_cases import NUM_PASSES, OBJECTIVES, TWO_PASS, every_objective

SCALE = 2.0**12


def scaler_for(device: torch.device) -> GradScaler:
    return GradScaler(device.type, init_scale=SCALE, growth_interval=1000)


@every_objective
def test_scaled_direction_is_the_direction_times_the_scale(name: str, device: torch.device) -> None:
    model, data = toy_models.mlp().double().to(device), toy_models.batch(device=device)
    plain = copy.deepcopy(model)
    expected = OBJECTIVES[name].make(plain).backward(toy_models.closure_of(plain, data))
    report = (
        OBJECTIVES[name]
        .make(model)
        .backward(toy_models.closure_of(model, data), scaler=scaler_for(device))
    )
    assert (
        equality.relative_error(toy_models.flat_grad(model), SCALE * toy_models.flat_grad(plain))
        < 1e-13
    )
    for field in ("loss", "perturbed_loss", "gap", "grad_norm", "perturbed_grad_norm", "cosine"):
        ours, theirs = getattr(report, field), getattr(expected, field)
        assert float(ours) == pytest.approx(float(theirs), rel=1e-12, nan_ok=True), field


@every_objective
def test_a_disabled_scaler_changes_nothing(name: str) -> None:
    model, data = toy_models.mlp(), toy_models.batch()
    expected = toy_models.direction(OBJECTIVES[name].make, model, data)
    scaler = GradScaler("cpu", enabled=False)
    OBJECTIVES[name].make(model).backward(toy_models.closure_of(model, data), scaler=scaler)
    assert torch.equal(toy_models.flat_grad(model), expected)


def train(
    name: str,
    model: nn.Module,
    data: toy_models.Batch,
    scaler: GradScaler | None,
    dtype: torch.dtype,
) -> list[float]:
    """The gradient norms before clipping in three steps under autocast."""
    objective = OBJECTIVES[name].make(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    norms, x = [], data[0].float()

    def closure() -> Tensor:
        with torch.autocast(x.device.type, dtype, enabled=dtype != torch.float32):
            return nn.functional.cross_entropy(model(x), data[1])

    for _ in range(3):
        optimizer.zero_grad()
        objective.backward(closure, scaler=scaler)
        if scaler:
            scaler.unscale_(optimizer)
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.05)))
        if scaler:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
    return norms


@every_objective
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_clipped_training_under_autocast(
    name: str, dtype: torch.dtype, device: torch.device
) -> None:
    """Three steps match float32 without a scaler, up to half precision."""
    model, data = toy_models.mlp().to(device), toy_models.batch(device=device)
    plain = copy.deepcopy(model)
    scaler = scaler_for(device) if dtype == torch.float16 else None
    norms = train(name, model, data, scaler, dtype)
    expected = train(name, plain, data, None, torch.float32)
    assert norms == pytest.approx(expected, rel=0.05)
    moved = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    target = torch.cat([p.detach().reshape(-1) for p in plain.parameters()])
    assert equality.relative_error(moved, target) < 2e-3
    assert scaler is None or scaler.get_scale() == SCALE


@every_objective
def test_autocast_around_the_call_is_autocast_in_the_closure(
    name: str, device: torch.device
) -> None:
    """Autocast's cache of cast weights must not hide the perturbation."""
    model, data = toy_models.mlp().to(device), toy_models.batch(device=device)
    inside, outside = copy.deepcopy(model), copy.deepcopy(model)
    closure = toy_models.closure_of(inside, data)

    def cast() -> Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            return closure()

    expected = OBJECTIVES[name].make(inside, **loud(name)).backward(cast)
    with torch.autocast(device.type, torch.bfloat16):
        objective = OBJECTIVES[name].make(outside, **loud(name))
        report = objective.backward(toy_models.closure_of(outside, data))
    assert torch.equal(toy_models.flat_grad(outside), toy_models.flat_grad(inside))
    assert float(report.gap) == pytest.approx(float(expected.gap), nan_ok=True)
    assert name not in TWO_PASS or float(report.gap) > 0.01


@every_objective
def test_backward_passes_run_outside_autocast(name: str, device: torch.device) -> None:
    """Inside, torch would round the gradients of a loss that is computed in float32."""
    inside, x = toy_models.mlp().to(device), toy_models.batch(device=device)[0].float()
    outside, targets = copy.deepcopy(inside), torch.randn(3, 7, device=device)
    autocast = partial(torch.autocast, device.type, torch.bfloat16)

    def loss_of(model: nn.Module) -> Tensor:
        features = model(x)
        with autocast(enabled=False):
            return (features.float() @ targets).square().mean()

    OBJECTIVES[name].make(inside).backward(lambda: autocast()(loss_of)(inside))
    with autocast():
        OBJECTIVES[name].make(outside).backward(lambda: loss_of(outside))
        assert torch.is_autocast_enabled(device.type)
    assert torch.equal(toy_models.flat_grad(outside), toy_models.flat_grad(inside))


@every_objective
@pytest.mark.parametrize("raises", [False, True])
def test_autocast_around_the_call_caches_no_weights(name: str, raises: bool) -> None:
    """Autocast's cache must not hold the weights of the last pass afterwards."""
    model, data = toy_models.mlp(), toy_models.batch()
    plain, losses = copy.deepcopy(model), iter([1.0])
    with torch.autocast("cpu", torch.bfloat16):
        expected = plain(data[0].float())
    with torch.autocast("cpu", torch.bfloat16):
        closure, objective = (
            toy_models.closure_of(model, data),
            OBJECTIVES[name].make(model, **loud(name)),
        )
        with suppress(StopIteration):
            objective.backward(lambda: closure() * (next(losses) if raises else 1.0))
        assert torch.equal(model(data[0].float()), expected)


def loud(name: str) -> dict[str, float]:
    """A radius that is visible in bfloat16."""
    return {} if name in ("Vanilla", "EntropySGD") else {"rho": 0.5}


@every_objective
@pytest.mark.parametrize("overflowing", [{1}, {2}, {1, 2}], ids=["first", "second", "both"])
@pytest.mark.parametrize("poison", [float("inf"), float("nan")])
def test_overflow(name: str, overflowing: set[int], poison: float, device: torch.device) -> None:
    """An infinite gradient skips one step and halves the scale. The next step is right."""
    if NUM_PASSES[name] == 1:
        overflowing = {1}
    model, data = toy_models.convnet().to(device), toy_models.batch(device=device)
    scaler, number = scaler_for(device), iter(range(1, 100))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    objective, closure = OBJECTIVES[name].make(model), toy_models.closure_of(model, data)
    weights = [p.detach().clone() for p in model.parameters()]

    def overflow() -> Tensor:
        loss = closure()
        if next(number) in overflowing:
            # The loss is finite, but one entry of one gradient is not.
            first = model[0].weight.reshape(-1)[0]
            loss = loss + (first - first.detach()) * torch.tensor(poison, device=device)
            return torch.nan_to_num(loss.detach()) + (loss - loss.detach())
        return loss

    def step(run: object) -> None:
        optimizer.zero_grad()
        objective.backward(run, scaler=scaler)
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()

    step(overflow)
    assert equality.same_bits(weights, [p.detach() for p in model.parameters()])
    assert not optimizer.state
    assert scaler.get_scale() == SCALE / 2
    twin = copy.deepcopy(model)
    expected = toy_models.direction(OBJECTIVES[name].make, twin, data)
    expected *= min(1.0, 1.0 / (float(expected.norm()) + 1e-6))
    step(closure)
    assert scaler.get_scale() == SCALE / 2
    assert equality.relative_error(toy_models.flat_grad(model), expected) < 1e-5
    moved = torch.cat([p.detach().reshape(-1).cpu() for p in model.parameters()])
    start = torch.cat([w.reshape(-1).cpu() for w in weights])
    assert equality.relative_error(start - moved, 0.1 * expected) < 1e-4


@every_objective
def test_without_a_scaler_non_finite_gradients_reach_grad(name: str) -> None:
    """So a check in the caller's loop can see them."""
    model = toy_models.mlp()
    before, closure = equality.bits(model), toy_models.closure_of(model, toy_models.batch())
    OBJECTIVES[name].make(model).backward(lambda: closure() * float("inf"))
    assert equality.same_bits(before, equality.bits(model))
    assert not bool(toy_models.flat_grad(model).isfinite().any())


@pytest.mark.parametrize("poison", [float("inf"), float("nan")])
def test_no_climb_along_a_non_finite_gradient(poison: float) -> None:
    model, seen = nn.Linear(4, 1, bias=False), []
    slope = torch.tensor([1.0, poison, 3.0, -2.0])

    def closure() -> Tensor:
        seen.append(model.weight.detach().clone())
        return (model.weight * slope).sum()

    for name in OBJECTIVES:
        if name in TWO_PASS:
            seen.clear()
            OBJECTIVES[name].make(model).backward(closure)
            assert equality.same_bits(seen[:1], seen[1:]), name


@pytest.mark.parametrize("averaging", [0.75, 0.0])
@pytest.mark.parametrize("poison", [float("inf"), float("nan")])
def test_inner_steps_after_a_non_finite_gradient(poison: float, averaging: float) -> None:
    """It reaches `.grad`, so that a scaler sees it, but later passes have a finite loss."""
    model, seen = nn.Linear(4, 1, bias=False), []
    slopes = iter([torch.tensor([1.0, poison, 3.0, -2.0]), *[torch.ones(4)] * 3])
    before = equality.bits(model)

    def closure() -> Tensor:
        seen.append(model.weight.detach().clone())
        return (model.weight * next(slopes)).sum()

    EntropySGD(model, inner_steps=4, averaging=averaging, noise=0.0).backward(closure)
    assert equality.same_bits(before, equality.bits(model))
    assert all(bool(weight.isfinite().all()) for weight in seen)
    assert not torch.equal(seen[0], seen[1])
    assert model.weight.grad is not None
    assert model.weight.grad.isfinite().tolist() == [[True, False, True, True]]


def test_entropy_sgd_unscales_its_inner_steps() -> None:
    """The inner steps are not homogeneous in the loss, so they must be unscaled."""
    model, data = toy_models.mlp().double(), toy_models.batch()
    plain = copy.deepcopy(model)
    torch.manual_seed(2)
    EntropySGD(plain, noise=0.01).backward(toy_models.closure_of(plain, data))
    torch.manual_seed(2)
    scaler = GradScaler("cpu", init_scale=SCALE)
    EntropySGD(model, noise=0.01).backward(toy_models.closure_of(model, data), scaler=scaler)
    assert (
        equality.relative_error(toy_models.flat_grad(model), SCALE * toy_models.flat_grad(plain))
        < 1e-13
    )
