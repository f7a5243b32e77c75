"""Products of every method are those of the dense Hessian."""

import re
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from surrogap.analysis import Hessian, Surface
from surrogap.analysis.hessian import PRODUCT_METHODS
from tests import equality, toy_models
from tests.analysis.reference import batches, dense, network, quadratic, symmetric
from tests.analysis.test_surface import InterruptedHereError, assert_undisturbed, state_of

TOLERANCE = {"forward-over-reverse": 1e-12, "double-backward": 1e-12, "finite-differences": 1e-7}


@pytest.mark.parametrize("method", PRODUCT_METHODS)
@pytest.mark.parametrize("is_training", [False, True])
@pytest.mark.parametrize("name", list(toy_models.MODELS))
def test_product_is_that_of_the_dense_hessian(
    name: str, is_training: bool, method: Any, device: torch.device
) -> None:
    model = network(name, is_training=is_training)
    hessian = Hessian(Surface(model.to(device), batches()), method)
    v = hessian.space.random(5)
    before = state_of(model)
    product = hessian @ v
    assert_undisturbed(model, before)
    assert hessian.method == method
    assert hessian.num_products == 1
    assert (
        equality.relative_error(product, dense(name, is_training=is_training) @ v.cpu())
        < TOLERANCE[method]
    )


@pytest.mark.parametrize("method", PRODUCT_METHODS)
def test_everything_is_left_as_it_was_where_it_raises(method: Any) -> None:
    model = network("convnet", is_training=True)
    calls = 0

    def loss_fn(model: nn.Module, batch: toy_models.Batch) -> Tensor:
        nonlocal calls
        calls += 1
        torch.rand(1)
        if calls == 3:
            raise InterruptedHereError
        return toy_models.cross_entropy(model, batch)

    surface = Surface(model, batches(), loss_fn, is_checked=False)
    before = state_of(model)
    with pytest.raises(InterruptedHereError):
        _ = Hessian(surface, method) @ surface.space.random(0)
    assert_undisturbed(model, before)


@pytest.mark.parametrize("method", PRODUCT_METHODS)
def test_a_quadratic_in_float64_and_float32(method: Any) -> None:
    matrix, _ = symmetric([4.0, 1.0, -2.0])
    for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 1e-4)):
        hessian = Hessian(quadratic(matrix.to(dtype), torch.ones(3, dtype=dtype)), method)
        v = torch.tensor([0.3, -1.0, 2.0], dtype=dtype)
        assert equality.relative_error(hessian @ v, matrix @ v.double()) < tolerance


@pytest.mark.parametrize("method", PRODUCT_METHODS)
def test_zero_for_a_linear_loss_and_for_a_zero_vector(method: Any) -> None:
    model = nn.Linear(3, 1).double()
    data = [torch.randn(4, 3, dtype=torch.float64)]
    linear = Hessian(Surface(model, data, lambda m, x: m(x).mean()), method)
    assert float((linear @ linear.space.random(0)).norm()) < 1e-8
    square = Hessian(Surface(model, data, lambda m, x: m(x).square().mean()), method)
    assert not (square @ square.space.zeros()).any()


class Square(torch.autograd.Function):
    """A custom square with a backward rule, but no forward rule."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * grad


class OnceSquare(Square):
    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * grad


class ModernSquare(torch.autograd.Function):
    """The same for torch.func, and still without a forward rule."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * x

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    backward = Square.backward


def ctc(x: Tensor) -> Tensor:
    targets, lengths = torch.ones(1, 1, dtype=torch.long), torch.ones(1, dtype=torch.long)
    return nn.functional.ctc_loss(x.log_softmax(1)[:, None], targets, 3 * lengths, lengths)


@pytest.mark.parametrize(
    ("function", "reasons"),
    [
        (Square.apply, ["autograd.Function"]),
        (ModernSquare.apply, ["jvp"]),
        (OnceSquare.apply, ["autograd.Function", "once_differentiable"]),
        (lambda x: nn.functional.group_norm(x[None], 1), ["native_group_norm_backward"]),
        (ctc, ["_ctc_loss", "_ctc_loss_backward"]),
    ],
)
def test_falls_back_and_quotes_the_reason(function: Any, reasons: list[str]) -> None:
    model = nn.Linear(3, 4).double()
    x = torch.randn(3, 3, dtype=torch.float64)
    hessian = Hessian(Surface(model, [x], lambda m, x: (function(m(x)) ** 2).mean()))
    v = hessian.space.random(0)
    with pytest.warns(UserWarning, match="to avoid this warning") as caught:
        product = hessian @ v
    assert hessian.method == PRODUCT_METHODS[len(reasons)]
    for warning, reason, method in zip(caught, reasons, PRODUCT_METHODS, strict=False):
        assert f" instead of {method}; pass method=" in str(warning.message)
        assert re.search(rf"avoid this warning\. .*{reason}", str(warning.message))
    assert len(caught) == len(reasons)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = hessian @ v  # with the method that it fell back to
    torch.testing.assert_close(again, product)
    differences = Hessian(hessian.surface, "finite-differences") @ v
    assert equality.relative_error(product, differences) < 1e-6


def test_an_error_of_the_model_is_no_missing_rule() -> None:
    def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            raise RuntimeError("out of memory")
        return model(batch).mean()

    surface = Surface(nn.Linear(3, 1), [torch.randn(4, 3)], loss_fn)
    with pytest.raises(RuntimeError, match="out of memory"):
        _ = Hessian(surface) @ surface.space.random(0)


def test_refuses_an_unknown_method_and_a_wrong_step() -> None:
    surface = Surface(nn.Linear(3, 1), [torch.randn(4, 3)], lambda m, x: m(x).mean())
    with pytest.raises(ValueError, match=r"method must be one of forward-over-reverse, .* 'exact'"):
        Hessian(surface, "exact")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="step must be above 0 and finite, got 0"):
        Hessian(surface, "finite-differences", step=0.0)
    with pytest.raises(ValueError, match=r"vector must have shape \(4,\)"):
        _ = Hessian(surface) @ torch.zeros(3)


def test_a_step_of_ones_own() -> None:
    """The error of a central difference of a cubic is step^2 times its third derivative."""
    model = nn.Linear(1, 1, bias=False).double()
    surface = Surface(model, [torch.ones(1, 1).double()], lambda m, x: m(x).pow(4).sum())
    w = float(model.weight.detach())
    found = Hessian(surface, "finite-differences", step=0.5) @ torch.ones(1).double()
    assert float(found) == pytest.approx(12 * w * w + 4 * 0.5**2, rel=1e-12)


def test_float32_finite_differences_are_good_to_a_thousandth() -> None:
    model = network("mlp")
    data = [(x.float(), y) for x, y in batches()]
    hessian = Hessian(Surface(model.float(), data), "finite-differences")
    v = hessian.space.random(5)
    assert equality.relative_error(hessian @ v, dense("mlp") @ v.double()) < 3e-3
