import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from surrogap.analysis import Hessian, Surface, cross_entropy
from surrogap.analysis.space import Space
from surrogap.core.weights import Weights
from tests import equality, toy_models
from tests.analysis.reference import SIZES, batches, network


@pytest.mark.parametrize("name", list(toy_models.MODELS))
def test_ragged_batches_are_the_whole_set(name: str, device: torch.device) -> None:
    model = network(name).to(device)
    whole = tuple(torch.cat(parts).to(device) for parts in zip(*batches(), strict=True))
    expected = toy_models.cross_entropy(model, whole)
    gradient = torch.autograd.grad(expected, list(model.parameters()))
    surface = Surface(model, batches())
    loss, found = surface.gradient()
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(surface.loss(), expected.detach())
    torch.testing.assert_close(found, torch.cat([g.reshape(-1) for g in gradient]))


def test_batches_of_every_kind_that_holds_tensors() -> None:
    model = nn.Linear(2, 1)
    x = torch.randn(5, 2)
    expected = model(x).mean().detach().double()
    for wrap in (lambda t: t, lambda t: {"x": t}, lambda t: ["a name", [t]]):
        parts = [wrap(x[:3]), wrap(x[3:])]

        def loss_fn(model: nn.Module, batch: Any) -> Tensor:
            while not isinstance(batch, Tensor):
                batch = batch["x"] if isinstance(batch, dict) else batch[-1]
            return model(batch).mean()

        torch.testing.assert_close(Surface(model, parts, loss_fn).loss(), expected)


def state_of(model: nn.Module) -> tuple[list[Tensor], list[bool], list[Tensor | None], Tensor]:
    gradients = [parameter.grad for parameter in model.parameters()]
    modes = [module.training for module in model.modules()]
    return equality.bits(model), modes, gradients, torch.get_rng_state()


def assert_undisturbed(model: nn.Module, before: tuple[Any, ...]) -> None:
    after = state_of(model)
    assert equality.same_bits(before[0], after[0])
    assert before[1] == after[1]
    assert all(a is b for a, b in zip(before[2], after[2], strict=True))
    assert torch.equal(before[3], after[3])


class InterruptedHereError(Exception):
    pass


@pytest.mark.parametrize("is_interrupted", [False, True])
def test_everything_is_left_as_it_was(is_interrupted: bool) -> None:
    model = network("convnet", is_training=True)
    model[3].training = False  # modes that differ must stay different
    loader = DataLoader(TensorDataset(*toy_models.batch(11)), batch_size=4, shuffle=True)
    for parameter in list(model.parameters())[1:]:
        parameter.grad = torch.randn_like(parameter)
    kept = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    calls = 0

    def loss_fn(model: nn.Module, batch: toy_models.Batch) -> Tensor:
        nonlocal calls
        calls += 1
        if is_interrupted and calls == 3:
            torch.rand(1)
            raise InterruptedHereError
        return cross_entropy(model, batch)

    before = state_of(model)
    surface = Surface(model, loader, loss_fn, is_checked=False)
    for measure in (surface.gradient, surface.loss):
        calls = 0
        try:
            with surface.moved(0.1 * surface.space.random(0)):
                measure()
        except InterruptedHereError:
            assert is_interrupted
        assert_undisturbed(model, before)
    for gradient, parameter in zip(kept, model.parameters(), strict=True):
        assert gradient is parameter.grad or torch.equal(gradient, parameter.grad)


def test_gradients_of_other_modules_and_of_inputs_are_left_as_they_were() -> None:
    model, head = nn.Linear(2, 4), nn.Linear(4, 3)
    x, y = torch.randn(5, 2, requires_grad=True), torch.arange(5) % 3
    head.bias.grad = bias_grad = torch.ones(3)
    surface = Surface(
        model, [(x, y)], lambda m, batch: cross_entropy(nn.Sequential(m, head), batch)
    )
    surface.gradient()
    assert head.weight.grad is x.grad is None
    assert head.bias.grad is bias_grad
    assert torch.equal(bias_grad, torch.ones(3))


def test_weights_that_the_forward_pass_writes_to_are_restored() -> None:
    model = nn.Sequential(nn.Embedding(4, 3, max_norm=0.5), nn.Flatten(), nn.Linear(6, 3))
    data = [(torch.tensor([[0, 1], [2, 3]]), torch.tensor([0, 1]))]
    before = equality.bits(model)
    surface = Surface(model, data)
    assert equality.same_bits(before, equality.bits(model))
    for measure in (surface.loss, surface.gradient):
        measure()
        assert equality.same_bits(before, equality.bits(model))


def test_a_loss_that_calls_backward() -> None:
    """As adversarial training does, for the gradient of its input."""
    model, data = nn.Linear(3, 2), (torch.randn(4, 3), torch.tensor([0, 1, 0, 1]))

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        x = x.clone().requires_grad_()
        nn.functional.cross_entropy(model(x), y).backward()
        return nn.functional.cross_entropy(model(x + 0.1 * x.grad.sign()).detach(), y)

    surface = Surface(model, [data], loss_fn)
    surface.loss()
    assert model.weight.grad is model.bias.grad is None


class Scaled(torch.autograd.Function):
    """A function whose node has an attribute of a name that torch's own nodes use."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.variable = 3
        return ctx.variable * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return ctx.variable * gradient


def test_a_custom_function_may_have_any_attributes() -> None:
    model, x = nn.Linear(3, 1), torch.randn(4, 3)
    surface = Surface(model, [x], lambda m, x: Scaled.apply(m(x)).mean())
    plain = Surface(model, [x], lambda m, x: 3 * m(x).mean())
    torch.testing.assert_close(surface.gradient(), plain.gradient())


def test_a_loss_that_contains_derivatives() -> None:
    model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return slope.square().mean()

    x = torch.randn(5, 2)
    loss = Surface(model, [x], loss_fn).loss()
    torch.testing.assert_close(loss, loss_fn(model, x).detach().double())
    assert not loss.requires_grad


def test_a_loss_without_derivatives_builds_no_graph() -> None:
    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        assert not torch.is_grad_enabled()
        return model(x).mean()

    Surface(nn.Linear(2, 1), [torch.randn(5, 2)], loss_fn).loss()


def test_training_mode_uses_the_statistics_of_each_batch() -> None:
    model = network("convnet", is_training=True)
    expected = sum(toy_models.cross_entropy(copy.deepcopy(model), b) * len(b[1]) for b in batches())
    torch.testing.assert_close(Surface(model, batches()).loss(), expected.detach() / sum(SIZES))


def test_moved_is_there_and_then_back() -> None:
    model = network("attention").float()
    surface = Surface(model, [(toy_models.batch()[0].float(), toy_models.batch()[1])])
    before, w, delta = equality.bits(model), surface.position(), surface.space.random(3)
    graph = model(toy_models.batch()[0].float()).sum()
    with surface.moved(delta):
        torch.testing.assert_close(surface.position(), w + delta)
    assert equality.same_bits(before, equality.bits(model))
    graph.backward()  # which the way there and back has not broken


def test_frozen_parameters_are_no_weights() -> None:
    model = network("mlp")
    model[1].weight.requires_grad_(False)
    surface = Surface(model, batches())
    assert surface.space.size == sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert surface.gradient()[1].shape == (surface.space.size,)


def test_inner_products_are_those_of_the_flat_vectors() -> None:
    space = Surface(network("mlp"), batches()).space
    x, y = space.random(0), space.random(1)
    torch.testing.assert_close(space.dot(x, y), x @ y)
    torch.testing.assert_close(space.norm(x), x.norm())
    torch.testing.assert_close(space.products(torch.stack([x, y]), y), torch.stack([x @ y, y @ y]))
    assert torch.equal(space.vector(space.pieces(x)), x)
    assert torch.equal(x, space.random(0))
    assert not torch.equal(x, y)


def test_half_precision_is_measured_in_float32() -> None:
    model = nn.Linear(4, 3).bfloat16()
    data = [(torch.randn(5, 4).bfloat16(), torch.arange(5) % 3)]
    loss, gradient = Surface(model, data).gradient()
    assert (loss.dtype, gradient.dtype) == (torch.float64, torch.float32)


def test_refuses_dropout_in_training_mode_alone() -> None:
    model = toy_models.Attention(dropout=0.1).double()
    with pytest.raises(RuntimeError, match=r"same loss for the same batch.*call model\.eval"):
        Surface(model, batches())
    Surface(model.eval(), batches())


def test_refuses_a_loss_that_changes_the_batch() -> None:
    with pytest.raises(RuntimeError, match="If the loss changes the batch in place"):
        Surface(nn.Linear(2, 1), [torch.ones(5, 2)], lambda m, x: m(x.div_(2)).mean())


def test_refuses_batches_that_change() -> None:
    class Augmented:
        def __iter__(self) -> Any:
            return iter([(x + torch.randn_like(x), y) for x, y in batches()])

    with pytest.raises(RuntimeError, match=r"batches must hold the same samples each time, got a"):
        Surface(network("mlp"), Augmented())


@pytest.mark.parametrize(
    ("data", "loss_fn", "error", "message"),
    [
        (iter([1]), cross_entropy, TypeError, "batches must be iterable many times, got list_iter"),
        ([], cross_entropy, ValueError, "batches must hold at least one sample, got none"),
        (["abc"], cross_entropy, TypeError, "batch must hold a tensor with a row .* got str"),
        ([3.0], cross_entropy, TypeError, "batch must hold a tensor with a row .* got float"),
        (batches()[0], cross_entropy, TypeError, r"pairs \(images, labels\), got .* type Tensor"),
        ([dict(zip("xy", batches()[0], strict=True))], cross_entropy, TypeError, "of type dict"),
        (batches(), lambda m, b: 0.5, TypeError, "loss_fn must return the loss .* got float"),
        (batches(), lambda m, b: b[0], RuntimeError, r"loss_fn must return a real scalar, got sha"),
        (batches(), lambda m, b: b[1][0], RuntimeError, r"must return a real .* dtype torch.int64"),
    ],
)
def test_refuses(data: Any, loss_fn: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Surface(network("mlp"), data, loss_fn, is_checked=False).loss()


def test_a_surface_without_samples_is_refused_when_it_is_built() -> None:
    with pytest.raises(ValueError, match="batches must hold at least one sample"):
        Surface(network("mlp"), [])


def test_norms_of_many_weights_are_accurate() -> None:
    """On a CPU, a product of matrices adds up in float32 one after the other."""
    space = Space(Weights(nn.Linear(4096, 1024)))
    x = space.random(0)
    assert float(space.norm(x)) == pytest.approx(float(x.double().norm()), rel=1e-6)


def test_refuses_a_vector_of_another_shape() -> None:
    surface = Surface(network("mlp"), batches())
    with pytest.raises(ValueError, match=r"vector must have shape \(835,\), .* got \(3,\)"):
        surface.space.pieces(torch.zeros(3))


def test_a_perfect_loss_is_the_same_twice() -> None:
    model = nn.Linear(2, 1)
    surface = Surface(model, [torch.ones(3, 2)], lambda m, x: 0.0 * m(x).sum())
    assert not surface.loss()
    assert not math.isnan(float(surface.gradient()[1].norm()))


def test_of_a_compiled_model_the_one_inside_runs() -> None:
    model = network("mlp")
    compiled = torch.compile(model, backend=lambda graph, inputs: pytest.fail("compiled"))
    surfaces = [Surface(m, batches()) for m in (model, compiled)]
    v = surfaces[0].space.random(0)
    one, other = (Hessian(surface) @ v for surface in surfaces)
    assert torch.equal(one, other)
