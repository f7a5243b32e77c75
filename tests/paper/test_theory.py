"""The paper's theory: equalities exactly, bounds on runs with known constants."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from surrogap.paper import theory
from surrogap.paper.theory import GSAMSettings

SHORT = GSAMSettings(num_steps=64, num_seeds=2)


def test_lemma_3_1_the_perturbed_loss_prefers_the_sharper_minimum() -> None:
    statement = theory.lemma_3_1(rho=0.1)
    assert statement.holds == "yes"
    # C + sigma * rho^2 / 2, as in its proof.
    expected = [0.1 + 20.0 * 0.01 / 2, 0.4 + 2.0 * 0.01 / 2]
    assert statement.numbers["perturbed_loss"] == pytest.approx(expected)
    assert theory.lemma_3_1(rho=0.5).holds == "no"  # a larger radius prefers the flat one


def test_lemma_3_2_the_gap_is_not_negative_for_small_radii() -> None:
    statements = theory.lemma_3_2((0.001, 0.01, 3.0), num_points=60)
    fractions = [statement.numbers["fraction"] for statement in statements]
    assert fractions[:2] == [1.0, 1.0]
    assert fractions[2] < 1.0  # and may be for large ones
    assert [s.holds for s in statements] == ["yes", "yes", "this rho is not small"]


def test_lemma_3_3_the_gap_measures_the_eigenvalue() -> None:
    for statement in theory.lemma_3_3():
        rho = statement.numbers["rho"]
        expected = 2 * (math.exp(rho) - rho - 1) / rho**2
        assert statement.numbers["sharpness"] == pytest.approx(expected, rel=1e-6)
        # O(rho), as the lemma's proof says: 1/3 here.
        assert statement.numbers["error"] / rho == pytest.approx(1 / 3, rel=0.15)
        assert statement.holds == "yes"
    (far,) = theory.lemma_3_3((8.0,))
    assert far.holds == "no"


def test_the_problem_has_the_constants_that_the_bound_takes() -> None:
    u = torch.linspace(-4, 4, 4001, dtype=torch.float64, requires_grad=True)
    loss = u**2 / (1 + u**2)
    (slope,) = torch.autograd.grad(loss.sum(), u, create_graph=True)
    (curvature,) = torch.autograd.grad(slope.sum(), u)
    assert float(slope.detach().abs().max()) == pytest.approx(theory.MAX_SLOPE, rel=1e-5)
    assert float(curvature.abs().max()) == pytest.approx(theory.SMOOTHNESS, rel=1e-5)
    assert float(curvature.min()) < 0  # not convex


def reference(run: GSAMSettings, loss: Any, start: Tensor, seed: int) -> list[Tensor]:
    """GSAM by its equations."""
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
    theory.descend_with_gsam(theory.bowl, start, SHORT, lambda step, w, report: seen.append(w))
    expected = [w for seed in range(2) for w in reference(SHORT, theory.bowl, start, seed)]
    torch.testing.assert_close(seen, expected)


def test_theorem_5_1_averages_and_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    statements = theory.theorem_5_1(SHORT)
    assert [statement.numbers["num_steps"] for statement in statements] == [16, 32, 64]
    squares = torch.zeros(64, dtype=torch.float64)
    start = torch.full((10,), 1.5, dtype=torch.float64)
    for seed in range(2):
        for step, w in enumerate(reference(SHORT, theory.bowl, start, seed)):
            w = w.requires_grad_()
            (gradient,) = torch.autograd.grad(theory.bowl(w), w)
            squares[step] += gradient @ gradient / 2
    for statement in statements:
        numbers = statement.numbers
        assert numbers["loss"] == pytest.approx(float(squares[: numbers["num_steps"]].mean()))
        assert numbers["perturbed_loss"] <= numbers["bound"]
        assert statement.holds == "yes"
    multiple = numbers["perturbed_loss"] / ((1 + math.log(64)) / 8)
    assert f"it is {multiple:.2g} of the rate" in statements[-1].stated
    monkeypatch.setattr(theory, "convergence_bound", lambda *_: 0.0)
    assert {statement.holds for statement in theory.theorem_5_1(SHORT)} == {"no"}


def test_theorem_5_3_between_its_bounds_and_where_not() -> None:
    run = GSAMSettings(lr_0=0.2, num_steps=200, num_seeds=1)
    statement = theory.theorem_5_3(run)
    assert statement.holds == "yes"
    assert statement.numbers["upper"] == pytest.approx(2.7 * 0.4 * 16.0 * 0.2 * 0.2**2)
    # With one eigenvalue nothing is orthogonal: the upper bound holds, the lower does not.
    isotropic = theory.theorem_5_3(run, spectrum=(2.0, 2.0, 2.0))
    assert isotropic.numbers["total"] == pytest.approx(0.0, abs=1e-12)
    assert isotropic.numbers["total"] < isotropic.numbers["lower"]
    assert isotropic.holds.startswith("no: g_p is parallel to g")


def test_theorem_5_3_adds_up_what_the_ascent_takes_from_the_gap() -> None:
    """`alpha * eta_t * ||g_perp||^2`, against the reference's gradients."""
    run = GSAMSettings(lr_0=0.2, num_steps=5, num_seeds=1)
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
    found = theory.theorem_5_3(run, spectrum=(0.5, 3.0)).numbers["total"]
    assert found == pytest.approx(total, rel=1e-8)


def test_the_figure_shows_the_averages() -> None:
    statements = theory.theorem_5_1(SHORT)
    lines = theory.convergence_figure(statements).axes[0].lines
    assert list(lines[0].get_ydata()) == [statement.numbers["loss"] for statement in statements]
    assert list(lines[2].get_ydata()) == [statement.numbers["bound"] for statement in statements]


def test_corollary_5_2_1_the_order_of_the_bounds_turns_at_the_radius_of_training() -> None:
    narrow, wide = (statement.numbers for statement in theory.corollary_5_2_1())
    assert narrow["rho_true"] < narrow["rho_train"] == wide["rho_train"] < wide["rho_true"]
    assert narrow["sharp"] < narrow["flat"]
    assert wide["sharp"] > wide["flat"]
    assert {statement.holds for statement in theory.corollary_5_2_1()} == {"yes"}
