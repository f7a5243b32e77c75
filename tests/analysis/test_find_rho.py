"""The sweep measures the quantities of a training step, and suggests the range that it should."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from surrogap import SAM
from surrogap.analysis import Surface
from surrogap.analysis.find_rho import (
    COSINE_FROM,
    COSINE_TO,
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


def test_the_suggestion_is_where_the_cosine_falls() -> None:
    surface = quadratic(torch.diag(torch.tensor([9.0, 1.0])).double(), torch.ones(2).double())
    slow = find_rho(surface)
    assert slow.low is None  # a quadratic turns little
    assert slow.high == math.inf
    assert "sweep larger radii" in slow.explain(0.1)
    assert "is too small: the step is nearly" in slow.explain(0.1)

    def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
        (w,) = model.parameters()
        return batch * (w[0] ** 2 / 2 + torch.cos(3 * w[1]))

    point = nn.ParameterList([torch.tensor([0.1, 0.4]).double()])
    surface = Surface(point, [torch.ones(())], loss_fn, num_samples_of=lambda batch: 1)
    rhos = [1e-3 * 1.05**i for i in range(200)]
    sweep = find_rho(surface, rhos)
    assert sweep.low is not None
    for rho, cosine in ((sweep.low, COSINE_FROM), (sweep.high, COSINE_TO)):
        before, after = find_rho(surface, [0.95 * rho, 1.05 * rho]).radii
        assert before.cosine > cosine > after.cosine
    assert sweep.center == pytest.approx(math.sqrt(sweep.low * sweep.high))
    assert sweep.contains(sweep.center)
    assert "is within" in sweep.explain(sweep.center)
    assert "too large" in sweep.explain(2 * sweep.high)
    assert "too small" in sweep.explain(sweep.low / 2)
    assert sweep.explain().startswith(f"Try rho from {sweep.low:.2g} to {sweep.high:.2g}")


def test_a_ceiling_ends_the_suggestion() -> None:
    surface = quadratic(torch.eye(2).double(), torch.ones(2).double())
    sweep = find_rho(surface, [0.1 * 1.01**i for i in range(300)], ceiling=2.0)
    # f = ||w||^2 / 2 is 1 at the start, where ||w|| is sqrt(2), and 2 where it is 2.
    assert sweep.high == pytest.approx(2 - math.sqrt(2), rel=1e-3)


def made(*cosines: float) -> Sweep:
    radii = tuple(Radius(10.0**i, 1.0, 2.0, c) for i, c in enumerate(cosines))
    return Sweep(radii, 1, 1.0, 10.0)


def test_words_for_the_ends_of_a_sweep() -> None:
    radii = made(0.9, 0.2).radii
    assert "sweep smaller radii" in Sweep(radii, 1, 1.0, 1.0).explain()
    unbounded = Sweep(radii, 1, 0.5, math.inf)
    assert unbounded.explain() == "Try rho from 0.5. Radii above 10 were not swept."
    assert unbounded.explain(20.0).endswith(" 20 was not swept.")
    assert unbounded.explain(2.0).endswith(" 2 is within this range.")
    assert unbounded.center == 0.5


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
    with pytest.raises(ValueError, match="batches must not be empty, got none"):
        find_rho(Surface(network("mlp"), [], is_checked=False), [0.1])
    flat = Surface(nn.Linear(1, 1), [torch.ones(1, 1)], lambda m, x: 0 * m(x).sum())
    with pytest.raises(RuntimeError, match=r"gradient must not be zero, got norm 0\.0 on a batch"):
        find_rho(flat, [0.1])
    with pytest.raises(
        RuntimeError, match=r"and there must be an ascent step. Measure a model that"
    ):
        find_rho(surface, [0.1], climb=lambda surface: surface.space.zeros())
