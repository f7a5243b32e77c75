"""Products of every method are those of the dense Hessian."""

import re
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

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
    for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 1e-3)):
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
    assert equality.relative_error(product, differences) < 1e-5


X = torch.linspace(-1, 1, 15, dtype=torch.float64).view(5, 3).sin()
LEAF = X.clone().requires_grad_()


def mean_square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def small_model() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


class HoldsReference(nn.Module):
    """The small model, and a term of a weight that is read through a Python list."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = small_model()
        self.references = [self.inner[0].weight]

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.references[0].pow(3).sum()


class Checkpointed(nn.Module):
    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        self.inner = small_model()
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        if self.use_reentrant:
            x = x.detach().requires_grad_()
        x = checkpoint(self.inner[:2], x, use_reentrant=self.use_reentrant)
        return self.inner[2](x)


class GraphlessTanh(torch.autograd.Function):
    """A backward pass without a graph, as that of torchdiffeq.odeint_adjoint."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.tanh()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        with torch.no_grad():
            return grad * (1 - x.tanh() ** 2)


def graphless(model: nn.Module, x: Tensor) -> Tensor:
    return GraphlessTanh.apply(model[0](x)).square().mean()


def graphless_in_the_middle(model: nn.Module, x: Tensor) -> Tensor:
    return model[2](GraphlessTanh.apply(model[:2](x))).square().mean()


def gradient_of_input(model: nn.Module, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return (gradient - 1).square().mean()


def gradient_of_leaf(model: nn.Module, x: Tensor) -> Tensor:
    (gradient,) = torch.autograd.grad(model(LEAF).sum(), LEAF, create_graph=True)
    return (gradient - 1).square().mean()


@pytest.mark.parametrize(
    ("model", "loss_fn", "method", "reason"),
    [
        (HoldsReference(), mean_square, "double-backward", "not attributes of a module"),
        (small_model(), gradient_of_input, "double-backward", "functorch transform"),
        (small_model(), gradient_of_leaf, "double-backward", "not have been used in the graph"),
        (Checkpointed(use_reentrant=False), mean_square, "double-backward", "saved tensor hooks"),
        (Checkpointed(use_reentrant=True), mean_square, "finite-differences", "Reentrant"),
        (small_model(), graphless, "finite-differences", "GraphlessTanhBackward may not be"),
        (small_model(), graphless_in_the_middle, "finite-differences", "not symmetric, with"),
        (
            nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 4))).double(),
            lambda model, x: model(x).tanh().square().mean(),
            "finite-differences",
            "not symmetric, with a relative error",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:Using double-backward")
@pytest.mark.filterwarnings("ignore:Using finite-differences")
def test_a_product_that_would_be_wrong_uses_the_next_method(
    model: nn.Module, loss_fn: Any, method: Any, reason: str
) -> None:
    surface = Surface(model, [X[:3], X[3:]], loss_fn)
    v = surface.space.random(0)
    hessian = Hessian(surface)
    with pytest.warns(UserWarning, match=f"{method} instead of .*{reason}"):
        product = hessian @ v
    assert hessian.method == method
    differences = Hessian(surface, "finite-differences", step=1e-5) @ v
    assert equality.relative_error(product, differences) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_training", [False, True])
@pytest.mark.parametrize("name", list(toy_models.MODELS))
@pytest.mark.parametrize("is_autocast", [False, True])
def test_rounding_is_no_asymmetry(
    name: str, is_training: bool, is_autocast: bool, dtype: torch.dtype
) -> None:
    def loss_fn(model: nn.Module, batch: toy_models.Batch) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
            return toy_models.cross_entropy(model, batch)

    data = [(x.to(dtype), y) for x, y in batches()]
    surface = Surface(network(name, is_training=is_training).to(dtype), data, loss_fn)
    hessian = Hessian(surface, "double-backward")
    _ = hessian @ surface.space.random(0)  # where a warning is an error
    assert hessian.method == "double-backward"


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


def test_finite_differences_along_a_sharp_direction_in_float32() -> None:
    """The loss `exp(50 * w)` is as sharp as small language models are."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    sharp = Surface(model, [torch.ones(1, 1)], lambda m, x: (50 * m(x)).exp().sum())
    product = Hessian(sharp, "finite-differences") @ torch.ones(1)
    assert float(product) == pytest.approx(2500, rel=1e-3)


def test_float32_finite_differences_are_good_to_a_thousandth() -> None:
    model = network("mlp")
    data = [(x.float(), y) for x, y in batches()]
    hessian = Hessian(Surface(model.float(), data), "finite-differences")
    v = hessian.space.random(5)
    assert equality.relative_error(hessian @ v, dense("mlp") @ v.double()) < 3e-3
