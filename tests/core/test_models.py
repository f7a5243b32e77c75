"""Compiled and parametrized models."""

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from surrogap import SAM
from tests import equality, toy_models
from tests.objective_cases import OBJECTIVES, every_objective


@pytest.mark.filterwarnings("ignore")  # the compiler's own warnings
@every_objective
@pytest.mark.parametrize("kind", ["mlp", "convnet"])
@pytest.mark.parametrize(
    "backend",
    ["aot_eager", pytest.param("inductor", marks=pytest.mark.gpu)],
)
def test_compiled_models(name: str, kind: str, backend: str) -> None:
    torch.compiler.reset()
    device = "cpu" if backend == "aot_eager" else "cuda"
    model, data = toy_models.MODELS[kind]().double().to(device), toy_models.batch(device=device)
    plain, before = copy.deepcopy(model), [p.detach().clone() for p in model.parameters()]
    compiled = torch.compile(model, backend=backend)
    for objective, net in (
        (OBJECTIVES[name].make(compiled), compiled),
        (OBJECTIVES[name].make(plain), plain),
    ):
        for _ in range(2):
            objective.backward(toy_models.closure_of(net, data))
    assert equality.relative_error(toy_models.flat_grad(model), toy_models.flat_grad(plain)) < 1e-10
    assert equality.same_bits(before, [p.detach() for p in model.parameters()])
    for ours, theirs in zip(model.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")
@every_objective
def test_models_compiled_with_cuda_graphs(name: str) -> None:
    """Such models reuse the memory of their outputs and gradients in every call."""
    torch.compiler.reset()
    model, data = toy_models.mlp().double().cuda(), toy_models.batch(device="cuda")
    expected = copy.deepcopy(model)
    report = OBJECTIVES[name].make(expected).backward(toy_models.closure_of(expected, data))
    compiled = torch.compile(model, mode="reduce-overhead")
    objective = OBJECTIVES[name].make(compiled)
    for _ in range(4):
        model.zero_grad()
        ours = objective.backward(toy_models.closure_of(compiled, data))
    assert (
        equality.relative_error(toy_models.flat_grad(model), toy_models.flat_grad(expected)) < 1e-10
    )
    assert float(ours.value) == pytest.approx(float(report.value), rel=1e-12)


def test_perturb_sees_names_without_the_prefix_of_compile() -> None:
    model, data = toy_models.mlp().double(), toy_models.batch()
    names: list[str] = []
    compiled = torch.compile(model, backend="eager")
    SAM(compiled, perturb=lambda name, p: names.append(name) or True)
    assert names == [name for name, _ in model.named_parameters()]
    expected = toy_models.direction(
        lambda m: SAM(m, perturb=lambda name, p: name.startswith("1.")), model, data
    )
    SAM(compiled, perturb=lambda name, p: name.startswith("1.")).backward(
        toy_models.closure_of(model, data)
    )
    assert torch.equal(toy_models.flat_grad(model), expected)


class Symmetric(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.triu() + x.triu(1).T


@every_objective
def test_parametrized_models(name: str) -> None:
    """The direction is for the original parameters, as if the model computed the formula."""

    class ByHand(nn.Module):
        def __init__(self, weight: torch.Tensor, bias: torch.Tensor) -> None:
            super().__init__()
            self.bias, self.weight = nn.Parameter(bias.clone()), nn.Parameter(weight.clone())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weight = self.weight.triu() + self.weight.triu(1).T
            return nn.functional.linear(x, weight, self.bias)

    model = nn.Linear(5, 5).double()
    by_hand = ByHand(model.weight.detach(), model.bias.detach())
    parametrize.register_parametrization(model, "weight", Symmetric())
    before, x = equality.bits(model), torch.randn(7, 5, dtype=torch.float64)
    for net in (model, by_hand):
        OBJECTIVES[name].make(net).backward(lambda net=net: torch.tanh(net(x)).square().mean())
    assert (
        equality.relative_error(toy_models.flat_grad(model), toy_models.flat_grad(by_hand)) < 1e-12
    )
    assert equality.same_bits(before, equality.bits(model))


@every_objective
def test_parametrizations_that_are_cached(name: str) -> None:
    """A cache around the whole call does not carry weights from one pass to the other."""
    model, x = nn.Linear(5, 5).double(), torch.randn(7, 5, dtype=torch.float64)
    parametrize.register_parametrization(model, "weight", Symmetric())
    directions = []
    for context in (nullcontext(), parametrize.cached()):
        model.zero_grad()
        torch.manual_seed(0)
        with context:
            OBJECTIVES[name].make(model).backward(lambda: torch.tanh(model(x)).square().mean())
        directions.append(toy_models.flat_grad(model))
    assert torch.equal(*directions)


@every_objective
@pytest.mark.parametrize("wrap", [parametrizations.weight_norm, parametrizations.orthogonal])
def test_parametrizations_of_torch(name: str, wrap: object) -> None:
    model = wrap(nn.Linear(5, 5))
    before, x = [p.detach().clone() for p in model.parameters()], torch.randn(7, 5)
    OBJECTIVES[name].make(model).backward(lambda: torch.tanh(model(x)).square().mean())
    assert equality.same_bits(before, [p.detach() for p in model.parameters()])
    assert toy_models.flat_grad(model).norm() > 0
