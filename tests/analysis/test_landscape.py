"""Lines and planes through quadratics and small models with known losses."""

import pytest
import torch
from torch import nn

from surrogap.analysis import Hessian, Surface, eigenvalues
from surrogap.analysis.landscape import (
    between,
    gradient_direction,
    line,
    plane,
    random_direction,
)
from tests import equality
from tests.analysis.reference import batches, network, quadratic, symmetric

STEPS = (-1.0, 0.0, 0.5, 2.0)


def test_along_eigenvectors_a_quadratic_is_its_eigenvalue() -> None:
    matrix, _ = symmetric([4.0, 2.0, 1.0])
    surface = quadratic(matrix, torch.zeros(3, dtype=torch.float64), offset=1.0)
    top = eigenvalues(Hessian(surface), 2, tolerance=1e-6)
    seen = []
    result = line(
        surface, top.vectors[0], STEPS, label="top", progress=lambda *count: seen.append(count)
    )
    assert seen == [(i, 4) for i in range(1, 5)]
    assert (result.steps, result.label) == (STEPS, "top")
    assert result.losses == pytest.approx([1.0 + 4.0 * step**2 / 2 for step in STEPS])
    seen.clear()
    grid = plane(
        *(surface, *top.vectors, (-1.0, 0.5, 1.0), (0.0, 2.0)),
        labels=("first", "second"),
        progress=lambda *count: seen.append(count),
    )
    assert seen == [(i, 6) for i in range(1, 7)]
    for y, row in zip(grid.y_steps, grid.losses, strict=True):
        assert row == pytest.approx([1.0 + 2.0 * x**2 + y**2 for x in grid.x_steps])


def test_uphill() -> None:
    surface = Surface(network("attention"), batches())
    direction = gradient_direction(surface)
    _, gradient = surface.gradient()
    assert float(direction.norm()) == pytest.approx(1.0)
    here, there = line(surface, direction, [0.0, 1e-5]).losses
    assert (there - here) / 1e-5 == pytest.approx(float(gradient.norm()), rel=1e-4)


def test_filters_are_as_long_as_those_of_the_weights() -> None:
    model = network("convnet")
    surface = Surface(model, batches())
    directions = [random_direction(surface, seed) for seed in (0, 0, 1)]
    assert torch.equal(directions[0], directions[1])
    assert not torch.equal(directions[0], directions[2])
    pieces = surface.space.pieces(directions[0])
    for (name, parameter), piece in zip(model.named_parameters(), pieces, strict=True):
        if parameter.ndim < 2:
            assert not piece.any(), name
        else:
            torch.testing.assert_close(
                piece.flatten(1).norm(dim=1), parameter.flatten(1).norm(dim=1)
            )


def test_filter_normalisation_does_not_see_the_scale_of_a_layer() -> None:
    """A ReLU model computes the same with one layer times 2 and the next times 1/2."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(48, 9, bias=False), nn.ReLU(), nn.Linear(9, 3))
    model = model.double()
    curves = []
    for factor in (1.0, 16.0):
        with torch.no_grad():
            model[1].weight.mul_(factor)
            model[3].weight.div_(factor)
        surface = Surface(model, batches())
        curves.append(line(surface, random_direction(surface), STEPS).losses)
    assert curves[0] == pytest.approx(curves[1], rel=1e-9)


@pytest.mark.parametrize("is_training", [False, True])
def test_the_line_between_two_models_ends_at_both(is_training: bool) -> None:
    one, other = (network("convnet", is_training=is_training) for _ in range(2))
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
        other[1].running_mean.add_(1.0)
        other[1].running_var.mul_(3.0)
    before = equality.bits(one)
    surface = Surface(one, batches())
    seen = []
    result = between(
        surface, other, (0.0, 0.25, 1.0), progress=lambda *count: seen.append(count), label="a-b"
    )
    assert seen == [(1, 3), (2, 3), (3, 3)]
    assert result.label == "a-b"
    ends = [float(surface.loss()), float(Surface(other, batches()).loss())]
    assert [result.losses[0], result.losses[2]] == pytest.approx(ends, rel=1e-12)
    assert equality.same_bits(before, equality.bits(one))


def test_frozen_parameters_stay_on_the_line() -> None:
    one, other = network("mlp"), network("mlp")
    one[1].weight.requires_grad_(False)
    with torch.no_grad():
        other[3].bias.add_(1.0)
    surface = Surface(one, batches())
    end = float(Surface(other, batches()).loss())
    assert between(surface, other, (1.0,)).losses == pytest.approx((end,))


def test_refuses() -> None:
    surface = Surface(network("convnet"), batches())
    with pytest.raises(ValueError, match=r"other must have the same .* got none for 0\.weight ins"):
        between(surface, network("mlp"), (0.0,))
    one, other = network("mlp"), network("mlp")
    one[3].bias.requires_grad_(False)
    with torch.no_grad():
        other[3].bias.add_(1.0)
    with pytest.raises(ValueError, match=r"other must have the same frozen .* values of 3\.bias"):
        between(Surface(one, batches()), other, (0.0,))
    flat = Surface(nn.Linear(1, 1), [torch.ones(1, 1)], lambda m, x: 0 * m(x).sum())
    with pytest.raises(ValueError, match=r"gradient must be .* not zero, got norm 0\.0"):
        gradient_direction(flat)
