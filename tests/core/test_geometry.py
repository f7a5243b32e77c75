"""`perturb=`: the parameters that climb, and the gradients that the first pass computes."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from timm import layers
from timm.layers import BatchNormAct2d, LayerNorm2d, RmsNorm
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from surrogap import ASAM, GSAM, SAM, GapPenalty, Objective
from surrogap.core.geometry import Geometry, Kind, kinds_of
from surrogap.core.weights import Weights
from tests import equality, reference, toy_models
from tests.objective_cases import RHO


class RMSNorm(nn.Module):
    """Over the channels of images, as in denoising-diffusion-pytorch."""

    def __init__(self) -> None:
        super().__init__()
        self.g = nn.Parameter(torch.ones(1, 4, 1, 1))


class LlamaRMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x


class WeightNorm(nn.Module):
    """Its name ends in Norm, but it has a matrix, so it is not a normalisation layer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))


class MambaRMSNormGated(LlamaRMSNorm):
    pass


class CosineNorm1d(LlamaRMSNorm):
    pass


class Normalise(LlamaRMSNorm):
    pass


NORMS = {
    "BatchNorm1d": nn.BatchNorm1d(4),
    "BatchNorm2d": nn.BatchNorm2d(4),
    "SyncBatchNorm": nn.SyncBatchNorm(4),
    "LayerNorm": nn.LayerNorm(4),
    "LayerNorm of two dimensions": nn.LayerNorm((2, 2)),
    "GroupNorm": nn.GroupNorm(2, 4),
    "InstanceNorm": nn.InstanceNorm2d(4, affine=True),
    "RMSNorm": nn.RMSNorm(4),
    "timm's LayerNorm2d": LayerNorm2d(4),
    "timm's BatchNormAct2d": BatchNormAct2d(4),
    "timm's RmsNorm": RmsNorm(4),
    "timm's RmsNormFp32": layers.RmsNormFp32(4),
    "timm's RmsNormAct2d": layers.RmsNormAct2d(4),
    "timm's EvoNorm2dS0": layers.EvoNorm2dS0(4, groups=2),
    "timm's FilterResponseNormTlu2d": layers.FilterResponseNormTlu2d(4),
    "by name": LlamaRMSNorm(),
    "over channels": RMSNorm(),
    "gated, as Mamba2's": MambaRMSNormGated(),
    "named after its dimensions": CosineNorm1d(),
}


@pytest.mark.parametrize("name", NORMS)
def test_norms_are_found(name: str) -> None:
    model = nn.ModuleDict({"linear": nn.Linear(4, 4), "norm": NORMS[name]})
    found = kinds_of("norms", Geometry(), Weights(model))
    names = [name for name, _ in model.named_parameters()]
    assert {n for n, kind in zip(names, found, strict=True) if kind != Kind.FIXED} == {
        n for n in names if n.startswith("norm.")
    }


@pytest.mark.parametrize("other", [nn.Linear(4, 4), WeightNorm(), Normalise(), nn.PReLU(4)])
def test_others_are_not(other: nn.Module) -> None:
    model = nn.ModuleDict({"other": other, "norm": nn.LayerNorm(4)})
    found = kinds_of("norms", Geometry(), Weights(model))
    names = [name for name, _ in model.named_parameters()]
    assert all(
        (k != Kind.FIXED) == n.startswith("norm.") for n, k in zip(names, found, strict=True)
    )


def test_frozen_norms_are_refused() -> None:
    model = toy_models.convnet()
    model[1].requires_grad_(False)
    with pytest.raises(ValueError, match="as with LoRA, unfreeze them, or leave perturb out"):
        SAM(model, perturb="norms")


@pytest.mark.parametrize("kind", [SAM, GSAM, ASAM, GapPenalty])
def test_norms_equal_the_selection_of_a_function(kind: type[Objective]) -> None:
    model, data = toy_models.convnet(), toy_models.batch()
    norms = toy_models.direction(lambda m: kind(m, perturb="norms"), model, data)
    named = toy_models.direction(
        lambda m: kind(m, perturb=lambda n, _: n.startswith("1.")), model, data
    )
    assert torch.equal(norms, named)


def test_sam_on_norms_is_the_reference() -> None:
    model, data = toy_models.Attention().double(), toy_models.batch()
    f, w = reference.loss_of(copy.deepcopy(model), lambda net: toy_models.cross_entropy(net, data))
    mask = reference.selected(model, lambda name, _: ".norm" in name)
    assert 0 < mask.sum() < len(mask)
    expected = reference.sam(f, w, reference.climb(f, w, RHO, mask=mask))
    ours = toy_models.direction(lambda m: SAM(m, rho=RHO, perturb="norms"), model, data)
    assert equality.relative_error(ours, expected) < 1e-11


def gradients_of_passes(objective: Objective, model: nn.Module) -> list[set[str]]:
    """The parameters that receive a gradient in each pass."""
    names = {p: name for name, p in model.named_parameters()}
    passes: list[set[str]] = []
    closure = toy_models.closure_of(model, toy_models.batch())
    objective.backward(closure)  # the first call computes all
    hooks = [p.register_hook(lambda _, p=p: passes[-1].add(names[p])) for p in names]

    def counted() -> Tensor:
        passes.append(set())
        return closure()

    objective.backward(counted)
    for hook in hooks:
        hook.remove()
    return passes


def test_the_first_pass_computes_only_gradients_that_climb() -> None:
    model = toy_models.convnet()
    every = {name for name, _ in model.named_parameters()}
    norms = {"1.weight", "1.bias"}
    for objective, first in (
        (SAM(model, perturb="norms"), norms),
        (ASAM(model, perturb="norms"), norms),
        (GSAM(model, perturb="norms", alpha=0.0), norms),
        (GSAM(model, perturb="norms", alpha=0.4), every),
        (ASAM(model, perturb="norms", alpha=0.4), every),
        (SAM(model), every),
    ):
        assert gradients_of_passes(objective, model) == [first, every], objective
    assert all(p.requires_grad for p in model.parameters())


def test_parameters_require_gradients_again_after_an_error() -> None:
    model = toy_models.convnet()
    with pytest.raises(ZeroDivisionError):
        SAM(model, perturb="norms").backward(lambda: 1 / 0)
    assert all(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_under_activation_checkpointing(use_reentrant: bool) -> None:
    model, data = toy_models.convnet().double(), toy_models.batch()
    expected = toy_models.direction(lambda m: SAM(m, perturb="norms"), model, data)
    x = data[0].requires_grad_()

    def closure() -> Tensor:
        hidden = checkpoint(model[:3], x, use_reentrant=use_reentrant)
        return nn.functional.cross_entropy(model[3:](hidden), data[1])

    objective = SAM(model, perturb="norms")
    model[1].momentum = 0.0  # a checkpointed pass runs BatchNorm twice
    objective.backward(closure)
    assert equality.relative_error(toy_models.flat_grad(model), expected) < 1e-12


class Recomputed(torch.autograd.Function):
    """A block that runs again in its backward pass, as in reversible networks."""

    @staticmethod
    def forward(ctx: Any, block: nn.Module, x: Tensor) -> Tensor:
        ctx.block, ctx.x = block, x.detach()
        return block(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        x = ctx.x.requires_grad_()
        with torch.enable_grad():
            ctx.block(x).backward(gradient)
        return None, x.grad


@pytest.mark.parametrize("run", [partial(checkpoint, use_reentrant=True), Recomputed.apply])
def test_blocks_that_need_gradients_of_weights_that_do_not_climb(run: Callable[..., Any]) -> None:
    """A block that runs its own backward pass does so only if its input requires a gradient."""
    torch.manual_seed(0)
    stem, block = nn.Linear(3, 8), nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8))
    model = nn.ModuleList([stem, block, nn.LayerNorm(8), nn.Linear(8, 2)]).double()
    x, y = torch.randn(5, 3).double(), torch.arange(5) % 2

    def loss(hidden: Tensor) -> Tensor:
        return nn.functional.cross_entropy(model[3](model[2](hidden)), y)

    objective = SAM(model, rho=0.5, perturb="norms")
    expected = objective.backward(lambda: loss(block(stem(x)))).perturbed_loss
    objective = SAM(model, rho=0.5, perturb="norms")
    for _ in range(2):
        found = objective.backward(lambda: loss(run(block, stem(x)))).perturbed_loss
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_model() -> None:
    model, data = toy_models.convnet(), toy_models.batch()
    expected = toy_models.direction(lambda m: SAM(m, perturb="norms"), model, data)
    compiled = torch.compile(model, backend="aot_eager")
    objective = SAM(compiled, perturb="norms")
    for _ in range(2):
        model.zero_grad()
        objective.backward(toy_models.closure_of(compiled, data))
    assert equality.relative_error(toy_models.flat_grad(model), expected) < 1e-5


def test_asam_scales_all_but_biases() -> None:
    weights = Weights(toy_models.Attention())
    found = dict(zip(weights.names, kinds_of(None, Geometry(0.01), weights), strict=True))
    plain = {name for name, kind in found.items() if kind == Kind.PLAIN}
    assert plain == {name for name in found if name.endswith("bias")}
    assert "block.self_attn.in_proj_bias" in plain
    assert found["block.norm1.weight"] == found["temperature"] == Kind.SCALED


def test_a_batch_that_reaches_none_of_the_parameters_that_climb() -> None:
    """Two heads, of which the first climbs: a batch of the second has the plain gradient."""
    body, heads = nn.Linear(48, 4), nn.ModuleList([nn.Linear(4, 3), nn.Linear(4, 3)])
    model = nn.ModuleList([body, heads]).double()
    x, y = toy_models.batch()

    def loss(head: int) -> Tensor:
        return nn.functional.cross_entropy(heads[head](body(x.flatten(1)).tanh()), y)

    loss(1).backward()
    expected = body.weight.grad.clone()
    objective = SAM(model, rho=0.5, perturb=lambda name, _: name.startswith("1.0"))
    for _ in range(2):  # from the second call on, the first pass computes fewer gradients
        model.zero_grad()
        report = objective.backward(lambda: loss(1))
        assert float(report.gap) == 0
        assert torch.equal(body.weight.grad, expected)
    both = float(objective.backward([lambda: loss(0), lambda: loss(1)]).gap)
    assert both == pytest.approx(float(objective.backward(lambda: loss(0)).gap), rel=1e-12)
