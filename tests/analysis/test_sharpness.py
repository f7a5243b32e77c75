import itertools
import math

import pytest
import torch

from surrogap.analysis import Surface
from surrogap.analysis.sharpness import GAP_COLUMNS, Plan, sharpness
from tests.analysis.reference import batches, dense_hessian, network, quadratic, symmetric


def test_a_minimum_of_a_quadratic() -> None:
    spectrum = [6.0, 3.0, 2.0, 1.0, 0.5, 0.0]
    surface = quadratic(symmetric(spectrum)[0], torch.zeros(6, dtype=torch.float64), offset=0.25)
    plan = Plan(num_eigenvalues=2, tolerance=1e-6, num_trace_products=24)
    result = sharpness(surface, plan)
    assert result.dominant == pytest.approx(6.0)
    assert result.largest.values.tolist() == pytest.approx([6.0, 3.0])
    assert float(result.smallest.values[0]) == pytest.approx(0.0, abs=1e-6)
    assert result.trace.value == pytest.approx(sum(spectrum))
    assert [gap.worst_sharpness for gap in result.gaps.gaps] == pytest.approx([6.0] * 5)
    rows = dict(result.rows())
    assert rows["weights"] == "6"
    assert rows["loss"] == "0.25"
    assert rows["dominant eigenvalue"] == "6"
    assert rows["largest eigenvalues"].startswith("6, 3 (residual up to ")
    assert all(len(row) == len(GAP_COLUMNS) for row in result.gap_rows())
    assert result.gap_rows()[2] == ("0.05", "0", "0", "0.0075", "6")


def test_a_network_costs_no_more_than_announced() -> None:
    model, data, seen = network("convnet"), batches((9,)), []
    surface = Surface(model, data)
    plan = Plan(num_eigenvalues=1, rhos=(0.05, 0.1), num_ascent_steps=2, num_trace_products=6)
    result = sharpness(surface, plan, progress=lambda *cost: seen.append(cost))
    assert all(before <= after for (before, _), (after, _) in itertools.pairwise(seen))
    assert seen[-1] == pytest.approx((plan.cost, plan.cost))
    # Two gradients a product, as `Plan.cost` counts them.
    num_products = result.largest.num_products + result.smallest.num_products
    assert num_products <= 2 * plan.max_products
    assert result.trace.num_products <= plan.num_trace_products
    truth = torch.linalg.eigvalsh(dense_hessian(model, data))
    assert float(result.largest.values[0]) == pytest.approx(float(truth[-1]), rel=1e-2)
    assert len(truth) == result.num_weights


def test_the_dominant_eigenvalue_may_be_the_negative_one() -> None:
    surface = quadratic(symmetric([1.0, -5.0, 0.5])[0], torch.ones(3, dtype=torch.float64))
    result = sharpness(surface, Plan(num_eigenvalues=1, rhos=(0.1,), num_ascent_steps=0))
    assert result.dominant == pytest.approx(-5.0)
    assert math.isnan(result.gaps.gaps[0].worst_gap)


def test_what_has_not_converged_says_so() -> None:
    surface = Surface(network("mlp"), batches())
    plan = Plan(num_eigenvalues=3, max_products=3, rhos=(0.1,), num_ascent_steps=0, tolerance=1e-9)
    assert "not converged" in dict(sharpness(surface, plan).rows())["largest eigenvalues"]
