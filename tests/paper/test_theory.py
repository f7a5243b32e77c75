"""What is exact in the paper's theory, exactly; what is a bound, on runs with known constants."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from surrogap.paper import theory
from surrogap.paper.theory import Run

SHORT = Run(num_steps=64, num_seeds=2)


def test_lemma_3_1_the_perturbed_loss_prefers_the_sharper_minimum() -> None:
    result = theory.lemma_3_1(rho=0.1)
    assert result.is_shown
    # C + sigma * rho^2 / 2, as in its proof.
    assert result.sharp_perturbed_loss == pytest.approx(0.1 + 20.0 * 0.01 / 2)
    assert result.flat_perturbed_loss == pytest.approx(0.4 + 2.0 * 0.01 / 2)
    assert not theory.lemma_3_1(rho=0.5).is_shown  # with a larger radius it prefers the flat one


def test_lemma_3_2_the_gap_is_not_negative_for_small_radii() -> None:
    signs = theory.lemma_3_2((0.001, 0.01, 3.0), num_points=60)
    assert [sign.part for sign in signs[:2]] == [1.0, 1.0]
    assert signs[2].part < 1.0  # and may be for large ones


def test_lemma_3_3_the_gap_measures_the_eigenvalue() -> None:
    for estimate in theory.lemma_3_3():
        rho = estimate.rho
        expected = 2 * (math.exp(rho) - rho - 1) / rho**2
        assert estimate.sharpness == pytest.approx(expected, rel=1e-6)
        # O(rho), as the lemma's proof says: 1/3 here.
        assert estimate.error / rho == pytest.approx(1 / 3, rel=0.15)


def test_the_problem_has_the_constants_that_the_bound_takes() -> None:
    u = torch.linspace(-4, 4, 4001, dtype=torch.float64, requires_grad=True)
    loss = u**2 / (1 + u**2)
    (slope,) = torch.autograd.grad(loss.sum(), u, create_graph=True)
    (curvature,) = torch.autograd.grad(slope.sum(), u)
    assert float(slope.detach().abs().max()) == pytest.approx(theory.MAX_SLOPE, rel=1e-5)
    assert float(curvature.abs().max()) == pytest.approx(theory.SMOOTHNESS, rel=1e-5)
    assert float(curvature.min()) < 0  # not convex


def reference(run: Run, loss: Any, start: Tensor, seed: int) -> list[Tensor]:
    """GSAM by its equations, in a few lines."""
    generator = torch.Generator().manual_seed(seed)
    w, points = start.clone(), []
    for step in range(1, run.num_steps + 1):
        noise = torch.randn(start.shape, generator=generator, dtype=start.dtype)
        noise *= run.noise / noise.norm()
        points.append(w)

        def gradient(at: Tensor, noise: Tensor = noise) -> Tensor:
            at = at.detach().requires_grad_()
            return torch.autograd.grad(loss(at) + noise @ at, at)[0]

        g = gradient(w)
        g_p = gradient(w + run.rho_0 / math.sqrt(step) * g / (g.norm() + 1e-12))
        g_perp = g - (g @ g_p) / (g_p @ g_p) * g_p
        w = w - run.lr_0 / math.sqrt(step) * (g_p - run.alpha * g_perp)
    return points


def test_a_run_is_gsam_with_the_theorems_schedules() -> None:
    seen: list[Tensor] = []
    start = torch.full((10,), 1.5, dtype=torch.float64)
    theory.descend(theory.bowl, start, SHORT, 3, lambda step, w, report: seen.append(w))
    for found, expected in zip(seen, reference(SHORT, theory.bowl, start, 3), strict=True):
        torch.testing.assert_close(found, expected)


def test_theorem_5_1_averages_and_bound() -> None:
    seen: list[tuple[int, int]] = []
    result = theory.theorem_5_1(SHORT, progress=lambda *count: seen.append(count))
    assert seen == [(1, 2), (2, 2)]
    assert result.steps == (16, 32, 64)
    squares = torch.zeros(64, dtype=torch.float64)
    start = torch.full((10,), 1.5, dtype=torch.float64)
    for seed in range(2):
        for step, w in enumerate(reference(SHORT, theory.bowl, start, seed)):
            w = w.requires_grad_()
            (gradient,) = torch.autograd.grad(theory.bowl(w), w)
            squares[step] += gradient @ gradient / 2
    averages = [float(squares[:step].mean()) for step in result.steps]
    assert result.loss == pytest.approx(averages)
    for average, bound in zip(result.perturbed_loss, result.bound, strict=True):
        assert average <= bound
    rate = (1 + math.log(64)) / 8
    assert result.scaled()[-1] == pytest.approx(
        (result.loss[-1] / rate, result.perturbed_loss[-1] / rate)
    )


def test_theorem_5_3_between_its_bounds_and_where_not() -> None:
    run = Run(lr_0=0.2, num_steps=200, num_seeds=1)
    seen: list[tuple[int, int]] = []
    result = theory.theorem_5_3(run=run, progress=lambda *count: seen.append(count))
    assert seen == [(1, 1)]
    assert result.is_between
    assert result.upper == pytest.approx(2.7 * 0.4 * 16.0 * 0.2 * 0.2**2)
    # With one eigenvalue nothing is orthogonal: the upper bound holds, the lower does not.
    isotropic = theory.theorem_5_3((2.0, 2.0, 2.0), run)
    assert isotropic.total == pytest.approx(0.0, abs=1e-12)
    assert isotropic.total < isotropic.lower


def test_theorem_5_3_adds_up_what_the_ascent_takes_from_the_gap() -> None:
    """`alpha * eta_t * ||g_perp||^2`, against the reference's gradients."""
    run = Run(lr_0=0.2, num_steps=5, num_seeds=1)
    spectrum = torch.tensor([0.5, 3.0], dtype=torch.float64)
    total = 0.0
    generator = torch.Generator().manual_seed(0)
    points = reference(run, lambda w: (spectrum * w * w).sum() / 2, torch.ones(2).double(), 0)
    for step, w in enumerate(points, start=1):
        noise = torch.randn(2, generator=generator, dtype=torch.float64)
        g = spectrum * w + run.noise * noise / noise.norm()
        g_p = g + spectrum * (run.rho_0 / math.sqrt(step)) * g / g.norm()
        g_perp = g - (g @ g_p) / (g_p @ g_p) * g_p
        total += run.alpha * run.lr_0 / math.sqrt(step) * float(g_perp @ g_perp)
    assert theory.theorem_5_3((0.5, 3.0), run).total == pytest.approx(total, rel=1e-8)


def test_the_figure_shows_the_averages() -> None:
    result = theory.theorem_5_1(SHORT)
    lines = theory.convergence_figure(result).axes[0].lines
    assert list(lines[0].get_ydata()) == list(result.loss)
    assert list(lines[2].get_ydata()) == list(result.bound)
