"""Gaps on quadratics, where one step and the worst case have closed forms."""

import math

import pytest
import torch
from torch import Tensor, nn

from surrogap import SAM
from surrogap.analysis import Hessian, Surface, dominant_eigenvalue
from surrogap.analysis.gap import Gap, cost_of_gaps, surrogate_gaps
from tests import equality, toy_models
from tests.analysis.reference import batches, network, quadratic, symmetric

RHOS = (0.3, 0.05, 1.0)


def worst(matrix: Tensor, g: Tensor, rho: float) -> float:
    """`max g^T d + d^T H d / 2` over `||d|| <= rho`, by the multiplier's equation."""
    values, vectors = torch.linalg.eigh(matrix)
    c = vectors.T @ g
    low = max(float(values[-1]), 0.0) + 1e-13
    high = low + float(g.norm()) / rho + 1.0
    for _ in range(200):  # d = (mu - H)^-1 g shortens as mu grows
        mu = (low + high) / 2
        if float((c / (mu - values)).norm()) > rho:
            low = mu
        else:
            high = mu
    d = vectors @ (c / (high - values))
    return float(g @ d + d @ matrix @ d / 2)


@pytest.mark.parametrize("spectrum", [[5.0, 4.0, 1.0, 0.1], [3.0, 1.0, -2.0, -6.0]])
def test_a_slope(spectrum: list[float]) -> None:
    matrix, vectors = symmetric(spectrum)
    w = vectors @ torch.tensor([0.2, -0.3, 0.1, 0.4]).double()
    g = matrix @ w
    seen = []
    result = surrogate_gaps(
        quadratic(matrix, w, offset=2.0),
        RHOS,
        num_ascent_steps=200,
        progress=lambda done, all_: seen.append((done, all_)),
    )
    assert seen == [(1, 3), (2, 3), (3, 3)]
    assert result.grad_norm == pytest.approx(float(g.norm()))
    assert [gap.rho for gap in result.gaps] == sorted(RHOS)
    unit = g / g.norm()
    for gap in result.gaps:
        expected = gap.rho * g.norm() + gap.rho**2 / 2 * (unit @ matrix @ unit)
        assert gap.gap == pytest.approx(float(expected), rel=1e-9)
        assert gap.loss == pytest.approx(2.0 + float(w @ g) / 2)
        assert gap.worst_gap == pytest.approx(worst(matrix, g, gap.rho), rel=1e-6)
        assert gap.worst_gap >= gap.gap


def test_at_a_minimum_the_worst_case_measures_the_eigenvalue() -> None:
    matrix, vectors = symmetric([7.0, 3.0, 1.0, 0.5])
    surface = quadratic(matrix, torch.zeros(4, dtype=torch.float64))
    eigen = dominant_eigenvalue(Hessian(surface), tolerance=1e-6)
    for arguments in ({"num_ascent_steps": 60}, {"num_ascent_steps": 1, "start": vectors[:, 0]}):
        for gap in surrogate_gaps(surface, RHOS, **arguments).gaps:
            assert gap.gap == 0.0  # no gradient, no ascent
            assert gap.worst_gap == pytest.approx(7.0 * gap.rho**2 / 2, rel=1e-6)
            assert gap.worst_sharpness == pytest.approx(float(eigen.values[0]), rel=1e-6)


def test_a_start_is_tried_both_ways() -> None:
    """In one dimension the worst direction on a slope is the gradient's, from any start."""
    matrix = torch.ones(1, 1).double()
    surface = quadratic(matrix, torch.ones(1).double())
    (gap,) = surrogate_gaps(surface, [0.5], num_ascent_steps=1, start=-torch.ones(1)).gaps
    assert gap.worst_gap == pytest.approx((1.5**2 - 1) / 2)


def test_one_step_is_sams_own_on_one_batch() -> None:
    model = network("attention")
    (data,) = batches((9,))
    report = SAM(model, rho=0.1).backward(toy_models.closure_of(model, data))
    (gap,) = surrogate_gaps(Surface(model, [data]), [0.1]).gaps
    assert gap.gap == pytest.approx(float(report.gap), rel=1e-9)
    assert gap.perturbed_loss == pytest.approx(float(report.perturbed_loss), rel=1e-12)
    assert math.isnan(gap.worst_gap)


def test_the_worst_case_is_at_least_one_step_on_a_network() -> None:
    model = network("convnet", is_training=True)
    before = equality.bits(model)
    result = surrogate_gaps(Surface(model, batches()), [0.1, 0.5], num_ascent_steps=5)
    assert all(gap.worst_loss >= gap.perturbed_loss > gap.loss for gap in result.gaps)
    assert equality.same_bits(before, equality.bits(model))


@pytest.mark.parametrize(("num_ascent_steps", "has_start"), [(0, False), (4, False), (4, True)])
def test_the_cost_is_what_was_announced(num_ascent_steps: int, has_start: bool) -> None:
    forward, backward = 0, 0
    x, y = toy_models.batch(6)

    def loss_fn(model: torch.nn.Module, batch: toy_models.Batch) -> Tensor:
        nonlocal forward, backward
        forward += 1
        backward += torch.is_grad_enabled()
        return toy_models.cross_entropy(model, batch)

    surface = Surface(network("mlp"), [(x, y)], loss_fn, is_checked=False)
    start = surface.space.random(0) if has_start else None
    surrogate_gaps(surface, [0.01, 0.02, 0.03], num_ascent_steps=num_ascent_steps, start=start)
    cost = cost_of_gaps(3, num_ascent_steps=num_ascent_steps, has_start=has_start)
    assert (forward + 2 * backward) / 3 == pytest.approx(cost)


def test_without_a_finite_gradient_the_gap_is_nan() -> None:
    """f = sqrt(|0 w|) has the value 0, and the derivative infinity times 0."""
    surface = Surface(
        nn.Linear(1, 1, bias=False), [torch.ones(1)], lambda m, x: (0 * m.weight).abs().sum().sqrt()
    )
    found = surrogate_gaps(surface, [0.1])
    assert math.isnan(found.gaps[0].gap)
    assert math.isnan(found.grad_norm)


def test_numbers() -> None:
    gap = Gap(rho=0.5, loss=1.0, perturbed_loss=2.0, worst_loss=3.0)
    assert (gap.gap, gap.worst_gap, gap.sharpness, gap.worst_sharpness) == (1.0, 2.0, 8.0, 16.0)


def test_refuses() -> None:
    surface = quadratic(torch.eye(2).double(), torch.ones(2).double())
    with pytest.raises(ValueError, match="rhos must hold at least one radius, got none"):
        surrogate_gaps(surface, [])
    with pytest.raises(ValueError, match="rhos must be above 0 and finite, got 0"):
        surrogate_gaps(surface, [0.1, 0.0])
    with pytest.raises(ValueError, match="num_ascent_steps must be at least 0"):
        surrogate_gaps(surface, [0.1], num_ascent_steps=-1)
    with pytest.raises(TypeError, match=r"num_ascent_steps must be an integer, got 2\.5"):
        surrogate_gaps(surface, [0.1], num_ascent_steps=2.5)  # type: ignore[arg-type]
