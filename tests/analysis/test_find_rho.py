"""The sweep measures the quantities of a training step, and suggests the range that it should."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from surrogap import SAM
from surrogap.analysis import Surface
from surrogap.analysis.find_rho import (
    GAP_FROM,
    GAP_TO,
    Radius,
    Sweep,
    cost_of_find_rho,
    find_rho,
)
from tests import toy_models
from tests.analysis.reference import SIZES, batches, network, quadratic


def test_what_it_measures_is_what_training_sees() -> None:
    model = network("convnet", is_training=True)
    sweep = find_rho(Surface(model, batches()), [0.3, 0.05], num_batches=2)
    assert [radius.rho for radius in sweep.radii] == [0.05, 0.3]
    for radius in sweep.radii:
        reports = [
            SAM(model, rho=radius.rho).backward(toy_models.closure_of(model, data))
            for data in batches()[:2]
        ]
        for name in ("loss", "perturbed_loss", "gap", "cosine"):
            expected = sum(float(getattr(report, name)) for report in reports) / 2
            assert getattr(radius, name) == pytest.approx(expected, rel=1e-8)


def test_another_ascent_step_is_scaled_by_the_radius() -> None:
    """f = w A w / 2 along a fixed vector: the gap and the cosine in closed form."""
    a, w, v = torch.diag(torch.tensor([9.0, 1.0])).double(), torch.ones(2).double(), [0.6, 0.8]
    delta = torch.tensor(v).double()
    (radius,) = find_rho(quadratic(a, w), [0.5], climb=lambda surface: delta).radii
    there = w + 0.5 * delta
    assert radius.perturbed_loss == pytest.approx(float(there @ a @ there) / 2)
    cosine = nn.functional.cosine_similarity(a @ w, a @ there, dim=0)
    assert radius.cosine == pytest.approx(float(cosine))


def test_dropout_has_the_same_masks_in_both_passes() -> None:
    model = toy_models.Attention(dropout=0.2).double()
    surface = Surface(model, batches(), is_checked=False)
    (radius,) = find_rho(surface, [1e-6]).radii
    assert radius.cosine == pytest.approx(1.0, abs=1e-4)


def test_the_suggestion_is_where_the_gap_is_large_enough_and_not_too_large() -> None:
    """f = ||w||^2 / 2 at ||w|| = 1: the gap is rho + rho^2 / 2."""
    surface = quadratic(torch.eye(2).double(), torch.tensor([0.6, 0.8]).double())
    sweep = find_rho(surface, [1e-3 * 1.01**i for i in range(800)])
    assert (sweep.low, sweep.high) == pytest.approx(
        (math.sqrt(1 + 2 * GAP_FROM) - 1, math.sqrt(1 + 2 * GAP_TO) - 1), rel=1e-4
    )
    assert sweep.low is not None
    assert sweep.center == pytest.approx(math.sqrt(sweep.low * sweep.high))
    assert sweep.contains(sweep.center)
    assert "is within" in sweep.explain(sweep.center)
    assert sweep.explain(1.0).endswith("1 is too large: it raises the loss by more than 0.5.")
    assert sweep.explain(0.01).endswith("0.01 is too small: it raises the loss by less than 0.05.")
    assert sweep.explain().startswith(f"Try rho from {sweep.low:.2g} to {sweep.high:.2g}")


def test_the_unit_of_the_gap_is_that_of_the_loss() -> None:
    one, many = (
        find_rho(quadratic(unit * torch.eye(2).double(), torch.ones(2).double()), unit=unit)
        for unit in (1.0, 1000.0)
    )
    assert one.low == pytest.approx(many.low)
    assert one.high == pytest.approx(many.high)
    assert many.explain(10.0).endswith("10 is too large: it raises the loss by more than 500.")


def made(*perturbed_losses: float) -> Sweep:
    """Radii 1, 10, 100, ... with loss 1."""
    radii = (Radius(10.0**i, 1.0, loss, 0.9) for i, loss in enumerate(perturbed_losses))
    return Sweep(tuple(radii), 1)


def test_words_for_the_ends_of_a_sweep() -> None:
    assert made(2.0, 3.0).explain() == (
        "Already at rho = 1 the ascent step raises the loss from 1 to 2: sweep smaller radii."
    )
    small = made(1.001, 1.002)
    assert (small.low, small.high, small.center) == (None, math.inf, None)
    assert small.explain() == (
        "Up to rho = 10 the ascent step raises the loss by less than 0.05: sweep larger radii."
    )
    unbounded = made(1.0, 1.1)  # in the middle, on a logarithmic scale
    assert unbounded.low == pytest.approx(math.sqrt(10.0))
    assert unbounded.explain() == "Try rho from 3.2. Radii above 10 were not swept."
    assert unbounded.explain(20.0).endswith(" 20 was not swept.")
    assert unbounded.explain(4.0).endswith(" 4 is within this range.")
    below = made(1.2, 2.0)  # the gap is large enough at the first radius
    assert below.explain().endswith(" Radii below 1 were not swept.")
    assert below.explain(0.5).endswith(" 0.5 was not swept.")
    assert unbounded.center == unbounded.low
    assert made(1.001, math.inf).explain() == (
        "The loss is not finite from rho = 10 on, and rises by less than 0.05 at 1: sweep radii "
        "between them."
    )


def test_an_overflow_is_too_large() -> None:
    def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
        return (model(batch) * 30).exp().mean()

    surface = Surface(nn.Linear(1, 1), [torch.ones(1, 1)], loss_fn)
    assert find_rho(surface, [0.001, 10.0]).high <= 10.0


def test_the_cost_is_what_was_announced_and_the_random_state_stays() -> None:
    loader = DataLoader(TensorDataset(*toy_models.batch(12)), batch_size=3, shuffle=True)
    calls, seen = 0, []

    def loss_fn(model: nn.Module, batch: toy_models.Batch) -> Tensor:
        nonlocal calls
        calls += 1
        return toy_models.cross_entropy(model, batch)

    surface = Surface(network("mlp"), loader, loss_fn, is_checked=False)
    state = torch.get_rng_state()
    find_rho(surface, [0.1, 0.2], num_batches=3, progress=lambda *count: seen.append(count))
    assert torch.equal(state, torch.get_rng_state())
    assert calls == cost_of_find_rho(2, 3) == 9
    assert seen == [(2, 9), (3, 9), (5, 9), (6, 9), (8, 9), (9, 9)]


def test_fewer_batches_than_asked_for_are_all() -> None:
    assert find_rho(Surface(network("mlp"), batches()), [0.1], num_batches=9).num_batches == len(
        SIZES
    )


def test_refuses() -> None:
    surface = Surface(network("mlp"), batches())
    with pytest.raises(ValueError, match="rhos must hold at least one radius"):
        find_rho(surface, [])
    with pytest.raises(ValueError, match="rhos must be above 0"):
        find_rho(surface, [-0.1])
    with pytest.raises(ValueError, match="num_batches must be at least 1"):
        find_rho(surface, [0.1], num_batches=0)
    with pytest.raises(TypeError, match=r"num_batches must be an integer, got 2\.0"):
        find_rho(surface, [0.1], num_batches=2.0)  # type: ignore[arg-type]
    with torch.no_grad():
        broken = network("mlp")
        next(broken.parameters()).fill_(torch.nan)
    with pytest.raises(RuntimeError, match=r"gradient must be finite.* got a gradient of norm nan"):
        find_rho(Surface(broken, batches(), is_checked=False), [0.1])
    with pytest.raises(ValueError, match="batches must not be empty, got none"):
        find_rho(Surface(network("mlp"), [], is_checked=False), [0.1])
    flat = Surface(nn.Linear(1, 1), [torch.ones(1, 1)], lambda m, x: 0 * m(x).sum())
    with pytest.raises(RuntimeError, match=r"may be zero, got a gradient of norm 0\.0 on a batch"):
        find_rho(flat, [0.1])
    with pytest.raises(RuntimeError, match=r"nor the ascent step may be zero.* Measure a model"):
        find_rho(surface, [0.1], climb=lambda surface: surface.space.zeros())
    with pytest.raises(ValueError, match="unit must be above 0"):
        find_rho(surface, [0.1], unit=0.0)
