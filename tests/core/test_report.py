"""The values of a report, their device, and that creating it does not synchronise."""

import copy
import math

import pytest
import torch
from torch import Tensor, nn

from surrogap import SAM, Report, Vanilla
from surrogap.core.report import MEASURES
from tests import reference, toy_models
from tests.objective_cases import ETA, OBJECTIVES, RHO, every_objective, every_two_pass, is_large


@every_two_pass
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_fields(name: str, dtype: torch.dtype, device: torch.device) -> None:
    model, data = toy_models.mlp().to(device, dtype), toy_models.batch(device=device)
    f, w = reference.loss_of(copy.deepcopy(model), lambda net: toy_models.cross_entropy(net, data))
    report = OBJECTIVES[name].make(model).backward(toy_models.closure_of(model, data))
    masks = {k: reference.selected(model, k).to(device) for k in (reference.is_not_bias, is_large)}
    adaptive = reference.adaptive_climb(f, w, RHO, ETA, masks[reference.is_not_bias])
    mask = masks[is_large] if name.endswith("partial") else None
    delta = adaptive if name.startswith("ASAM") else reference.climb(f, w, RHO, mask=mask)
    g, g_p = reference.gradient(f, w), reference.gradient(f, w + delta)
    expected = {
        "loss": f(w),
        "perturbed_loss": f(w + delta),
        "gap": f(w + delta) - f(w),
        "grad_norm": g.norm(),
        "perturbed_grad_norm": g_p.norm(),
        "cosine": g @ g_p / (g.norm() * g_p.norm()),
        "rho": RHO,
    }
    if name == "SAM-partial":
        expected |= {"grad_norm": math.nan, "cosine": math.nan}
    tolerance = 1e-11 if dtype == torch.float64 else 2e-5
    for field, value in expected.items():
        found = float(getattr(report, field))
        assert found == pytest.approx(float(value), rel=tolerance, nan_ok=True), field
    assert not float(report.cosine) > 0.9999  # the two gradients differ


@every_objective
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_fields_are_scalars_of_full_precision_on_the_device(
    name: str, dtype: torch.dtype, device: torch.device
) -> None:
    model, data = toy_models.mlp().to(device, dtype), toy_models.batch(device=device)
    report = OBJECTIVES[name].make(model).backward(toy_models.closure_of(model, data))
    for name in MEASURES:
        value = getattr(report, name)
        assert value.shape == ()
        assert value.device.type == device.type
        assert value.dtype == torch.promote_types(dtype, torch.float32)
        assert not value.requires_grad


def test_vanilla_reports_what_it_knows() -> None:
    model, data = toy_models.mlp().double(), toy_models.batch()
    report = Vanilla(model).backward(toy_models.closure_of(model, data))
    assert float(report.grad_norm) == pytest.approx(float(toy_models.flat_grad(model).norm()))
    missing = (report.perturbed_loss, report.gap, report.perturbed_grad_norm, report.cosine)
    assert all(bool(value.isnan()) for value in (*missing, report.rho))


def test_a_report_prints_its_measures() -> None:
    model, data = toy_models.mlp(), toy_models.batch()
    text = repr(SAM(model, rho=0.5).backward(toy_models.closure_of(model, data)))
    assert text.startswith("Report(loss=")
    assert text.endswith("rho=0.5)")


def test_a_report_does_not_change_later() -> None:
    """Values derived after later steps, and after changes to `.grad`, are those of its step."""
    model, data = toy_models.mlp(), toy_models.batch()
    objective, closure = SAM(model), toy_models.closure_of(model, data)
    early, late = objective.backward(closure), objective.backward(closure)
    expected = float(early.grad_norm), float(early.cosine)
    objective.backward(lambda: 100 * closure())
    for p in model.parameters():
        p.grad.zero_()
    assert (float(late.grad_norm), float(late.cosine)) == expected


def test_the_report_owns_its_loss() -> None:
    """A model compiled with CUDA graphs overwrites its last loss."""
    model, seen = nn.Linear(3, 1), []

    def closure() -> Tensor:
        seen.append(model(torch.ones(1, 3)).sum().square())
        return seen[-1]

    report = SAM(model).backward(closure)
    expected = [float(loss.detach()) for loss in seen]
    for loss in seen:
        loss.data.fill_(7.0)
    assert [float(report.loss), float(report.perturbed_loss)] == expected


def test_cosine_is_bounded() -> None:
    one = torch.ones(())
    report = Report(one, one, None, 0.1, lambda: torch.tensor([1.0, 1.0 + 2e-7, 1.0]), None)
    assert float(report.cosine) == 1.0


def test_cosine_of_small_gradients() -> None:
    """The product of their squared norms underflows in float32."""
    model = nn.Linear(2, 1, bias=False)
    slopes = iter([torch.tensor([1.0, 0.0]), torch.tensor([1.0, 1.0])])
    report = SAM(model).backward(lambda: (1e-12 * next(slopes) * model.weight).sum())
    assert float(report.cosine) == pytest.approx(0.5**0.5, rel=1e-6)


def test_norms_are_those_of_this_call() -> None:
    """Gradients of earlier calls in `.grad` are not included."""
    model, data = toy_models.mlp().double(), toy_models.batch()
    objective = SAM(model)
    first = objective.backward(toy_models.closure_of(model, data))
    second = objective.backward(toy_models.closure_of(model, data))
    assert float(first.grad_norm) == float(second.grad_norm)


def test_the_mean_of_micro_batches() -> None:
    """For two halves with one perturbation each, whose losses were divided by two."""
    model = toy_models.mlp().double()
    objective = SAM(model, rho=RHO)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    closures = [toy_models.closure_of(model, toy_models.batch(seed=seed)) for seed in (1, 2)]
    wholes = [objective.backward(closure) for closure in closures]
    halves = [
        objective.backward(lambda c=closure: (c() / 2, "aux"), scaler=scaler)
        for closure in closures
    ]
    mean = Report.mean(halves, divisor=2)
    for field in ("loss", "perturbed_loss", "gap", "rho"):
        expected = sum(float(getattr(report, field)) for report in wholes) / 2
        assert float(getattr(mean, field)) == pytest.approx(expected, rel=1e-12)
    gg, gp, pp = (
        sum(float(a(r) * b(r)) for r in wholes) / 2
        for a, b in (
            (lambda r: r.grad_norm, lambda r: r.grad_norm),
            (lambda r: r.cosine * r.grad_norm, lambda r: r.perturbed_grad_norm),
            (lambda r: r.perturbed_grad_norm, lambda r: r.perturbed_grad_norm),
        )
    )
    assert float(mean.grad_norm) == pytest.approx(gg**0.5, rel=1e-6)
    assert float(mean.perturbed_grad_norm) == pytest.approx(pp**0.5, rel=1e-6)
    assert float(mean.cosine) == pytest.approx(gp / (gg * pp) ** 0.5, rel=1e-6)
    assert mean.aux == ["aux", "aux"]
    assert Report.mean(halves[:1], divisor=2) is halves[0]


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature")
@every_objective
@pytest.mark.parametrize("kind", toy_models.MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_synchronisation(name: str, kind: str, dtype: torch.dtype) -> None:
    """With dropout, BatchNorm, a scaler and clipping: CUDA raises at a synchronisation."""
    model = toy_models.Attention(dropout=0.1) if kind == "attention" else toy_models.MODELS[kind]()
    model = model.to("cuda", dtype)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    scaler = torch.amp.GradScaler("cuda", enabled=dtype == torch.float32)
    objective, closure = (
        OBJECTIVES[name].make(model),
        toy_models.closure_of(model, toy_models.batch(device="cuda")),
    )

    def step() -> Report:
        optimizer.zero_grad()
        report = objective.backward(closure, scaler=scaler)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        return report

    step()
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        report = step()
        for measure in MEASURES:
            assert getattr(report, measure).is_cuda  # derived on the device, but not read
        with pytest.raises(RuntimeError, match="synchroniz"):
            float(report.loss)  # otherwise the test would show nothing
    finally:
        torch.cuda.set_sync_debug_mode("default")
