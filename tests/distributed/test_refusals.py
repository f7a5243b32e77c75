"""Refused wrappers, with which replicas would diverge or gradients would be wrong."""

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from surrogap import GSAM, SAM, Intermittent
from tests import equality, toy_models
from tests.distributed.processes import Processes
from tests.distributed.test_ddp import mean_direction, model_of, shard
from tests.objective_cases import OBJECTIVES


class Outer(nn.Module):
    """A wrapper around the DDP wrapper, as in Fabric."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inner = DistributedDataParallel(model)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def made_before_wrapping(way: str, wrapper: str, name: str) -> str:
    model = model_of("mlp")
    objective = OBJECTIVES[name].make(nn.ModuleList([model]) if wrapper == "list" else model)
    wrapped = Outer(model) if wrapper == "outer" else DistributedDataParallel(model)
    before = equality.bits(model)
    with pytest.raises(ValueError, match="model must be the wrapper") as error:
        getattr(objective, way)(toy_models.closure_of(wrapped, shard(dist.get_rank())))
    assert equality.same_bits(before, equality.bits(model))
    wrapped(shard(0)[0]).sum().backward()  # no hook is left
    return str(error.value)


@pytest.mark.parametrize(
    ("way", "wrapper", "name"),
    [
        ("loss", "ddp", "GSAM"),
        ("backward", "ddp", "Vanilla"),
        ("loss", "outer", "Intermittent"),
        ("backward", "list", "EntropySGD"),
    ],
)
def test_an_objective_made_before_the_wrapper(
    way: str, wrapper: str, name: str, two: Processes
) -> None:
    for message in two.run(made_before_wrapping, way, wrapper, name):
        assert message == (
            "model must be the wrapper, got the model inside DistributedDataParallel. Build the "
            "objective after wrapping, from what DistributedDataParallel, accelerator.prepare or "
            "fabric.setup returned. Otherwise replicas diverge."
        )


def trained_alone() -> Tensor:
    """Each process trains its own model, next to another one in DDP."""
    model, objective = model_of("mlp"), None
    objective = Intermittent(GSAM(model, rho=0.1, alpha=0.4))
    teacher = DistributedDataParallel(model_of("mlp")).requires_grad_(False)
    x, y = shard(dist.get_rank())
    objective.loss(
        lambda: nn.functional.cross_entropy(model(x), y) + 0.0 * teacher(x).sum()
    ).backward()
    return toy_models.flat_grad(model)


def test_independent_training_is_allowed(two: Processes) -> None:
    for rank, gradient in enumerate(two.run(trained_alone)):
        expected = mean_direction("GSAM", "mlp", [shard(rank)])
        assert equality.relative_error(gradient, expected) < 1e-12


def first_generation(when: str) -> str:
    model = toy_models.mlp()
    objective = SAM(model) if when == "after" else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # FSDP1 is deprecated
        wrapped = FullyShardedDataParallel(
            model, use_orig_params=True, device_id=torch.device("cpu")
        )
    x, y = shard(dist.get_rank())
    with pytest.raises(TypeError) as error:
        (objective or SAM(wrapped)).loss(lambda: nn.functional.cross_entropy(wrapped(x.float()), y))
    return str(error.value)


@pytest.mark.parametrize("when", ["before", "after"])
def test_fsdp1(when: str, two: Processes) -> None:
    for message in two.run(first_generation, when):
        assert message.startswith(
            "model must not be trained by FSDP1, got FullyShardedDataParallel"
        )
        assert "torch.distributed.fsdp.fully_shard" in message


def static() -> str:
    with pytest.raises(ValueError, match="static_graph") as error:
        SAM(DistributedDataParallel(toy_models.mlp(), static_graph=True))
    model = DistributedDataParallel(toy_models.mlp(), find_unused_parameters=True)
    SAM(model).loss(toy_models.closure_of(model, shard(dist.get_rank()))).backward()
    return str(error.value)


def joined() -> str:
    model = DistributedDataParallel(toy_models.mlp())
    with model.join(), pytest.raises(RuntimeError, match="join") as error:
        SAM(model).backward(toy_models.closure_of(model, toy_models.batch()))
    return str(error.value)


def test_uneven_inputs(two: Processes) -> None:
    for message in two.run(joined):
        assert message.startswith("model must not be inside join() of DistributedDataParallel")


def test_a_static_graph(two: Processes) -> None:
    for message in two.run(static):
        assert message.startswith("static_graph of DistributedDataParallel must be False, got True")


def sharded_with_another() -> None:
    """Under FSDP2 the leaves of the graph are gathered parameters, which belong to the model."""
    from tests.distributed import test_fsdp as fsdp

    model, scale = fsdp.sharded(fsdp.network()), nn.Parameter(torch.ones(()).double())
    closure = toy_models.closure_of(model, fsdp.mine())
    GSAM(model).loss(closure).backward()
    with pytest.raises(RuntimeError, match="outside the objective's model, got one of shape"):
        GSAM(model).loss(lambda: closure() * scale)


def test_a_parameter_outside_a_sharded_model(two: Processes) -> None:
    two.run(sharded_with_another)
