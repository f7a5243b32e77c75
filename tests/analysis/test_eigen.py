"""Eigenvalues against those of the dense Hessian in float64, and of another library."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from surrogap.analysis import Hessian, Surface
from surrogap.analysis.eigen import dominant_eigenvalue, eigenvalues
from surrogap.analysis.lanczos import Lanczos
from tests import equality, toy_models
from tests.analysis.reference import batches, dense, network, quadratic, symmetric

SPECTRUM = [9.0, 6.0, 5.0, 0.3, 0.2, 0.0, -0.1, -2.0, -7.0]


def made(spectrum: list[float] = SPECTRUM) -> tuple[Hessian, Tensor]:
    matrix, vectors = symmetric(spectrum)
    return Hessian(quadratic(matrix, torch.ones(len(spectrum), dtype=torch.float64))), vectors


@pytest.mark.parametrize("is_training", [False, True])
@pytest.mark.parametrize("name", list(toy_models.MODELS))
def test_top_five_of_small_networks(name: str, is_training: bool, device: torch.device) -> None:
    truth = torch.linalg.eigvalsh(dense(name, is_training=is_training))
    model = network(name, is_training=is_training).to(device)
    hessian = Hessian(Surface(model, batches()))
    top = eigenvalues(hessian, 5, tolerance=1e-5)
    assert top.has_converged
    torch.testing.assert_close(top.values.cpu(), truth.flip(0)[:5], rtol=1e-6, atol=0)
    bottom = eigenvalues(hessian, 2, "smallest", tolerance=1e-5)
    torch.testing.assert_close(bottom.values.cpu(), truth[:2], rtol=1e-6, atol=0)
    assert hessian.num_products == top.num_products + bottom.num_products


@pytest.mark.parametrize("which", ["largest", "smallest", "dominant"])
def test_order_vectors_and_residuals(which: Any) -> None:
    hessian, vectors = made()
    columns = {"largest": [0, 1, 2], "smallest": [8, 7, 6], "dominant": [0, 8, 1]}[which]
    result = eigenvalues(hessian, 3, which, tolerance=1e-7)
    torch.testing.assert_close(result.values, torch.tensor(SPECTRUM).double()[columns])
    for vector, column in zip(result.vectors, columns, strict=True):
        assert float((vector @ vectors[:, column]).abs()) == pytest.approx(1.0, abs=1e-9)


def test_residuals_are_what_they_say_before_convergence() -> None:
    surface = Surface(network("mlp"), batches())
    result = eigenvalues(Hessian(surface), 3, max_products=8, tolerance=1e-12)
    assert not result.has_converged
    assert result.num_products == 8
    for value, vector, residual in zip(
        result.values, result.vectors, result.residuals, strict=True
    ):
        assert float(vector.norm()) == pytest.approx(1.0, rel=1e-10)
        found = (dense("mlp") @ vector - value * vector).norm()
        torch.testing.assert_close(found, residual, rtol=1e-6, atol=1e-12)


def test_the_basis_stays_orthonormal_and_then_is_complete() -> None:
    hessian, _ = made([1e6, 1.0, 1.0, 1.0, 0.5, 0.0, 0.0, -1e-3])  # and breaks down on the way
    lanczos = Lanczos(hessian, hessian.space.random(0))
    for _ in range(8):
        lanczos.advance()
    basis = torch.stack([lanczos.basis.combination(e) for e in torch.eye(8).double()])
    torch.testing.assert_close(basis @ basis.T, torch.eye(8).double())
    assert lanczos.is_complete
    expected = torch.tensor([-1e-3, 0.0, 0.0, 0.5, 1.0, 1.0, 1.0, 1e6]).double()
    torch.testing.assert_close(lanczos.ritz().values, expected, rtol=1e-12, atol=1e-8)


def test_power_iteration_finds_the_largest_absolute_value() -> None:
    hessian, vectors = made([*SPECTRUM[1:], -12.0])
    seen = []
    result = dominant_eigenvalue(
        hessian, tolerance=1e-6, progress=lambda done, most: seen.append((done, most))
    )
    assert result.has_converged
    assert float(result.values[0]) == pytest.approx(-12.0, rel=1e-9)
    assert float((result.vectors[0] @ vectors[:, -1]).abs()) == pytest.approx(1.0, rel=1e-9)
    assert seen == [(i + 1, 100) for i in range(result.num_products)]
    residual = (hessian @ result.vectors[0] - result.values[0] * result.vectors[0]).norm()
    torch.testing.assert_close(residual, result.residuals[0], rtol=1e-4, atol=0)


@pytest.mark.parametrize("find", [dominant_eigenvalue, eigenvalues])
def test_a_warm_start_saves_products_and_does_not_bind(find: Any) -> None:
    hessian, vectors = made([9.0, 8.5, *SPECTRUM[2:]])
    cold = find(hessian)
    assert find(hessian, start=3 * cold.vectors[0]).num_products < cold.num_products
    wrong = find(hessian, start=vectors[:, 4], max_products=300, tolerance=1e-4)
    assert float(wrong.values[0]) == pytest.approx(9.0, rel=1e-4)


@pytest.mark.parametrize("find", [dominant_eigenvalue, eigenvalues])
def test_a_flat_surface(find: Any) -> None:
    result = find(made([0.0] * 5)[0])
    assert (float(result.values[0]), result.num_products) == (0.0, 1)
    assert result.has_converged


def cusp(model: nn.Module, batch: Tensor) -> Tensor:
    """At w = 0 the gradient is 0, and the second derivative is not finite."""
    return (0 * model.weight).abs().pow(1.5).sum()  # type: ignore[operator]


def test_a_hessian_that_is_not_finite_is_an_error() -> None:
    hessian = Hessian(Surface(nn.Linear(3, 1, bias=False), [torch.ones(1)], cusp))
    with pytest.raises(RuntimeError, match="Hessian must be finite, got a product with"):
        eigenvalues(hessian, 1)


@pytest.mark.parametrize("find", [dominant_eigenvalue, eigenvalues])
def test_stops_where_it_is_told(find: Any) -> None:
    result = find(made()[0], tolerance=1e-12, max_products=3)
    assert (result.num_products, result.has_converged) == (3, False)


def medium() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten()),
        nn.Linear(128, 10),
    )


@pytest.mark.filterwarnings("ignore:.torch.jit.script:FutureWarning")  # as it is imported
def test_against_another_library_on_a_medium_network() -> None:
    curvlinops = pytest.importorskip("curvlinops")
    model = medium()
    data = [(x.float(), y) for x, y in batches((20, 13))]
    model(data[0][0])
    model.eval()
    hessian = Hessian(Surface(model, data))
    theirs = curvlinops.HessianLinearOperator(
        model, nn.CrossEntropyLoss(), list(model.parameters()), data, progressbar=False
    )
    v = hessian.space.random(0)
    assert equality.relative_error(hessian @ v, theirs @ v) < 1e-5
    top = eigenvalues(hessian, 3, tolerance=1e-3)
    for value, vector in zip(top.values, top.vectors, strict=True):
        assert equality.relative_error(theirs @ vector, value * vector) < 2e-3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tolerance": 0.0}, "tolerance must be above 0 and finite, got 0.0"),
        ({"max_products": 0}, "max_products must be at least 1"),
        ({"start": torch.ones(2)}, r"vector must have shape \(9,\)"),
    ],
)
def test_both_refuse(arguments: dict[str, Any], message: str) -> None:
    for find in (dominant_eigenvalue, eigenvalues):
        with pytest.raises(ValueError, match=message):
            find(made()[0], **arguments)


def test_refuses_what_it_cannot_find() -> None:
    hessian, _ = made()
    with pytest.raises(TypeError, match=r"max_products must be an integer, got 10\.0"):
        eigenvalues(hessian, 1, max_products=10.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="num must be at least 1"):
        eigenvalues(hessian, 0)
    with pytest.raises(ValueError, match=r"num must be at most max_products .* num=10, max_pro"):
        eigenvalues(hessian, 10)
    with pytest.raises(ValueError, match="which must be one of largest, smallest, dominant, got"):
        eigenvalues(hessian, 1, "top")  # type: ignore[arg-type]
