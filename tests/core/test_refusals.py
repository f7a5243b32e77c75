"""Refused set-ups, whose steps would otherwise be silently wrong."""

from functools import partial
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

from surrogap import GSAM, SAM, EntropySGD
from tests import equality, toy_models
from tests.objective_cases import OBJECTIVES, every_objective


def stepping(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    """Call `backward` and step, as timm's NativeScaler does."""
    loss.backward()
    optimizer.step()


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}], ids=str)
@every_objective
def test_a_backward_that_steps_the_optimizer(name: str, options: dict, make: type) -> None:
    model = toy_models.mlp()
    optimizer, before = make(model.parameters(), lr=0.1, **options), equality.bits(model)
    with pytest.raises(RuntimeError, match="backward must not step the optimizer, got one that"):
        OBJECTIVES[name].make(model).backward(
            toy_models.closure_of(model, toy_models.batch()), backward=partial(stepping, optimizer)
        )
    assert all(parameter.grad is None for parameter in model.parameters())
    assert equality.same_bits(before, equality.bits(model))
    optimizer.step()  # it is allowed again


def test_a_backward_that_steps_another_optimizer() -> None:
    model, other = toy_models.mlp(), nn.Linear(2, 2)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    expected = toy_models.direction(SAM, model, toy_models.batch())
    closure = toy_models.closure_of(model, toy_models.batch())
    SAM(model).backward(closure, backward=partial(stepping, optimizer))
    assert torch.equal(toy_models.flat_grad(model), expected)


class Scaled(nn.Module):
    """A loss with its own parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(()))

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits * self.temperature, labels)


@every_objective
@pytest.mark.parametrize("way", ["backward", "loss"])
def test_a_parameter_outside_the_model(name: str, way: str) -> None:
    model, criterion = toy_models.mlp(), Scaled()
    x, y = toy_models.batch()
    objective = OBJECTIVES[name].make(model)
    with pytest.raises(RuntimeError, match=r"outside the objective's model, got one of shape \("):
        getattr(objective, way)(lambda: criterion(model(x.float()), y))
    assert criterion.temperature.grad is None


def test_other_tensors_that_may_be_in_the_graph() -> None:
    """Inputs that require gradients, frozen parameters, and modules in one list."""
    model, criterion = toy_models.mlp(), Scaled()
    x, y = toy_models.batch()
    x = x.float().requires_grad_()
    SAM(nn.ModuleList([model, criterion])).backward(lambda: criterion(model(x), y))
    assert criterion.temperature.grad is not None
    assert x.grad is not None
    criterion.requires_grad_(False)
    SAM(model).backward(lambda: criterion(model(x), y))


def test_the_graph_is_checked_once_per_model() -> None:
    model, other = toy_models.mlp(), toy_models.mlp()
    x, y = toy_models.batch()
    x = x.float()
    objective = SAM(model)
    objective.backward(lambda: nn.functional.cross_entropy(model(x), y))
    objective.backward(lambda: nn.functional.cross_entropy(model(x) + other(x), y))
    model.append(nn.Identity())  # the model has changed, so it is checked again
    with pytest.raises(RuntimeError, match="outside the objective's model"):
        objective.backward(lambda: nn.functional.cross_entropy(model(x) + other(x), y))


def bound_late(model: nn.Module, batches: list[toy_models.Batch]) -> list[object]:
    closures = []
    for x, y in batches:
        closures.append(lambda: toy_models.cross_entropy(model, (x, y)))  # noqa: B023
    return closures


def test_closures_that_all_see_the_last_micro_batch() -> None:
    model = toy_models.mlp()
    batches = [toy_models.batch(seed=seed) for seed in range(2)]
    message = "closure must be a list of functions with a batch each, got several that read the sa"
    with pytest.raises(ValueError, match=message):
        GSAM(model).backward(bound_late(model, batches))
    closure = toy_models.closure_of(model, batches[0])
    with pytest.raises(ValueError, match="climb must be a list of functions with a batch each"):
        GSAM(model).backward(closure, climb=bound_late(model, batches))


class Batch:
    def __init__(self, model: nn.Module, data: toy_models.Batch) -> None:
        self.closure = toy_models.closure_of(model, data)

    def loss(self) -> Tensor:
        return self.closure()


def test_closures_that_are_bound() -> None:
    model = toy_models.mlp().double()
    batches = [toy_models.batch(seed=seed) for seed in range(2)]
    lists = [
        [toy_models.closure_of(model, data) for data in batches],
        [lambda data=data: toy_models.cross_entropy(model, data) for data in batches],
        [lambda *, data=data: toy_models.cross_entropy(model, data) for data in batches],
        [partial(toy_models.cross_entropy, model, data) for data in batches],
        [Batch(model, data).loss for data in batches],
    ]
    gradients = []
    for closures in lists:
        GSAM(model).backward(closures)
        gradients.append(toy_models.flat_grad(model))
        model.zero_grad()
    assert all(torch.equal(gradient, gradients[0]) for gradient in gradients)
    closure = toy_models.closure_of(model, batches[0])
    EntropySGD(model).backward([closure] * 2)  # the same function twice is intended


@pytest.fixture
def engines() -> dict[str, type[nn.Module]]:
    """Classes with the names of the engines' own, which are not installed."""

    class DeepSpeedEngine(nn.Sequential):
        __module__ = "deepspeed.runtime.engine"

    class PipelineEngine(DeepSpeedEngine):
        __module__ = "deepspeed.runtime.pipe.engine"

    class DistributedDataParallel(nn.Sequential):
        __module__ = "megatron.core.distributed.distributed_data_parallel"

    class FullyShardedDataParallel(nn.Sequential):
        __module__ = "torch.distributed.fsdp.fully_sharded_data_parallel"

    class GradSampleModule(nn.Sequential):
        __module__ = "opacus.grad_sample.grad_sample_module"

    classes = (
        *(DeepSpeedEngine, PipelineEngine, DistributedDataParallel, FullyShardedDataParallel),
        GradSampleModule,
    )
    return {each.__name__: each for each in classes}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("DeepSpeedEngine", "model must not be trained by DeepSpeed, got DeepSpeedEngine"),
        ("PipelineEngine", "model must not be trained by DeepSpeed, got PipelineEngine"),
        ("DistributedDataParallel", "model must not be trained by Megatron, got Distributed"),
        ("GradSampleModule", "model must not be trained by Opacus, got GradSampleModule"),
        (
            "FullyShardedDataParallel",
            r"by FSDP1, got FullyShardedDataParallel\..*fully_shard \(FSDP2\)",
        ),
    ],
)
def test_engines(name: str, message: str, engines: dict[str, type[nn.Module]]) -> None:
    with pytest.raises(TypeError, match=message):
        SAM(engines[name](toy_models.mlp()))
    with pytest.raises(TypeError, match=message):
        SAM(nn.ModuleList([engines[name](toy_models.mlp())]))


def test_hooks_of_deepspeed() -> None:
    """ZeRO adds hooks to the parameters of the model."""
    model, module = toy_models.mlp(), ModuleType("deepspeed.runtime.zero.stage_1_and_2")
    exec("def reduce(parameter): ...", module.__dict__)
    objective = SAM(model)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(module.reduce)
    with pytest.raises(RuntimeError, match=r"got one from deepspeed\.runtime\.zero\.stage_1_and_2"):
        objective.loss(toy_models.closure_of(model, toy_models.batch()))


@pytest.mark.parametrize("layers", [(nn.LazyLinear(1),), (nn.Linear(3, 3), nn.LazyBatchNorm1d())])
def test_lazy_modules(layers: tuple[nn.Module, ...]) -> None:
    model, x = nn.Sequential(*layers), torch.randn(4, 3)
    with pytest.raises(ValueError, match="uninitialised lazy modules, got some"):
        SAM(model)
    model(x)
    SAM(model).backward(lambda: model(x).square().mean())


@every_objective
def test_an_optimizer_that_steps_in_hooks(name: str) -> None:
    """As with torch's own `_apply_optimizer_in_backward`."""
    model = toy_models.mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = equality.bits(model)
    for parameter in model.parameters():
        parameter.register_hook(lambda g: optimizer.step())
    with pytest.raises(RuntimeError, match="backward must not step the optimizer, got one that"):
        OBJECTIVES[name].make(model).backward(toy_models.closure_of(model, toy_models.batch()))
    assert equality.same_bits(before, equality.bits(model))
