"""Trace and density of dense Hessians: exact terms exactly, estimates within their error."""

import pytest
import torch
from torch import Tensor

from surrogap.analysis import Hessian, Surface
from surrogap.analysis.spectrum import density, trace
from tests.analysis.reference import batches, dense, network, quadratic, symmetric


def made(spectrum: list[float]) -> Hessian:
    matrix, _ = symmetric(spectrum)
    return Hessian(quadratic(matrix, torch.ones(len(spectrum), dtype=torch.float64)))


class Matrix:
    """A dense operator, for tests that take many products."""

    def __init__(self, spectrum: list[float]) -> None:
        self.space = made(spectrum).space
        self._matrix, _ = symmetric(spectrum)

    def __matmul__(self, v: Tensor) -> Tensor:
        return self._matrix @ v


def test_the_trace_of_a_low_rank_is_exact() -> None:
    hessian = made([5.0, -3.0, 2.0, 1.0] + [0.0] * 26)
    seen = []
    result = trace(hessian, num_products=15, progress=lambda done, all_: seen.append((done, all_)))
    assert result.value == pytest.approx(5.0, rel=1e-10)
    assert result.standard_error == pytest.approx(0.0, abs=1e-10)
    assert hessian.num_products == result.num_products == len(seen) <= 15


def test_the_trace_of_a_small_operator_is_exact() -> None:
    assert trace(made([4.0, -1.0, 0.5]), num_products=30).value == pytest.approx(3.5, rel=1e-10)


def test_the_trace_of_a_network_is_within_its_error() -> None:
    truth = float(dense("mlp").trace())
    results = [trace(Hessian(Surface(network("mlp"), batches())), seed=1000 * s) for s in range(4)]
    for result in results:
        assert abs(result.value - truth) < 4 * result.standard_error
        assert result.num_products == 30
    assert len({result.value for result in results}) == 4


def test_the_error_is_that_of_the_estimates() -> None:
    """The spread of many estimates for a flat spectrum, where nearly all of it is sampled."""
    operator = Matrix(torch.linspace(0.9, 1.1, 40).tolist())
    results = [trace(operator, num_products=24, seed=100 * seed) for seed in range(60)]
    values = torch.tensor([result.value for result in results])
    errors = torch.tensor([result.standard_error for result in results])
    assert float(values.mean()) == pytest.approx(40.0, abs=4 * float(values.std()) / 60**0.5)
    assert float(values.std()) == pytest.approx(float(errors.square().mean().sqrt()), rel=0.35)


def test_neighbouring_seeds_are_independent() -> None:
    """With vectors shared by seed and seed + 1, the estimates had a correlation of 0.88."""
    operator = Matrix(torch.linspace(0.5, 2.0, 60, dtype=torch.float64).tolist())
    estimates = torch.tensor([trace(operator, seed=seed).value for seed in range(300)])
    neighbours = torch.stack([estimates[:-1], estimates[1:]])
    # Three standard errors of the correlation of 300 independent pairs.
    assert abs(float(torch.corrcoef(neighbours)[0, 1])) < 3 / 300**0.5
    first, second = (density(operator, num_vectors=2, num_steps=3, seed=seed) for seed in (0, 1))
    assert not set(first.nodes.flatten().tolist()) & set(second.nodes.flatten().tolist())


def test_quadrature_has_the_moments_of_its_vectors() -> None:
    """`sum(weight * node^k) = v^T H^k v` for k below twice the number of steps."""
    surface = Surface(network("convnet"), batches())
    matrix, num_steps = dense("convnet"), 4
    result = density(Hessian(surface), num_vectors=2, num_steps=num_steps, seed=3)
    assert result.num_products == 2 * num_steps
    vectors = [surface.space.random(3, "density", i) for i in range(2)]
    for k in range(2 * num_steps):
        powers = [v @ torch.linalg.matrix_power(matrix, k) @ v / (v @ v) for v in vectors]
        assert result.moment(k) == pytest.approx(float(sum(powers) / 2), rel=1e-8)


def test_all_steps_give_all_eigenvalues() -> None:
    spectrum = [-1.0, 0.0, 2.0, 5.0]
    seen = []
    result = density(
        made(spectrum),
        num_vectors=3,
        num_steps=40,
        progress=lambda done, all_: seen.append((done, all_)),
    )
    assert seen == [(i + 1, 12) for i in range(12)]
    for row in result.nodes:
        torch.testing.assert_close(row, torch.tensor(spectrum).double())
    torch.testing.assert_close(result.weights.sum(1), torch.ones(3).double())


def test_the_density_integrates_to_one() -> None:
    result = density(Hessian(Surface(network("mlp"), batches())), num_vectors=2, num_steps=10)
    values = torch.linspace(-3, 8, 4001, dtype=torch.float64)
    spread = result.at(values, width=0.05)
    assert float(torch.trapezoid(spread, values)) == pytest.approx(1.0, rel=1e-6)
    assert float(torch.trapezoid(values * spread, values)) == pytest.approx(result.moment(1))


def test_refuses() -> None:
    hessian = made([1.0, 2.0])
    with pytest.raises(TypeError, match=r"num_products must be an integer, got 30\.0"):
        trace(hessian, num_products=30.0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"num_steps must be an integer, got 3\.0"):
        density(hessian, num_steps=3.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="num_products must be at least 6"):
        trace(hessian, num_products=5)
    with pytest.raises(ValueError, match="num_vectors must be at least 1"):
        density(hessian, num_vectors=0)
    with pytest.raises(ValueError, match="num_steps must be at least 1"):
        density(hessian, num_steps=0)
