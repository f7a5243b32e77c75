"""DistributedDataParallel against the same arithmetic in one process."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from surrogap import GSAM
from tests import equality, toy_models
from tests.distributed.processes import Processes
from tests.objective_cases import OBJECTIVES, every_objective, every_two_pass

SIZE = 4  # samples in a process


def shard(rank: int) -> toy_models.Batch:
    return toy_models.batch(SIZE, seed=100 + rank)


def whole(ranks: range) -> toy_models.Batch:
    shards = [shard(rank) for rank in ranks]
    return torch.cat([x for x, _ in shards]), torch.cat([y for _, y in shards])


def model_of(network: str) -> nn.Module:
    torch.manual_seed(0)
    return toy_models.MODELS[network]().double()


def direction(name: str, network: str, scope: str | int | None) -> Tensor:
    """In each process: `.grad` after one call; a number as scope means groups of that size."""
    model = DistributedDataParallel(model_of(network))
    group = dist.new_subgroups(scope)[0] if isinstance(scope, int) else scope
    settings = {} if group is None else {"scope": group}
    objective = OBJECTIVES[name].make(model, **settings)
    objective.backward(toy_models.closure_of(model, shard(dist.get_rank())))
    return toy_models.flat_grad(model)


def mean_direction(name: str, network: str, parts: list[toy_models.Batch]) -> Tensor:
    directions = [
        toy_models.direction(OBJECTIVES[name].make, model_of(network), part) for part in parts
    ]
    return torch.stack(directions).mean(0)


@every_objective
@pytest.mark.parametrize("network", ["mlp", "attention"])
def test_replica_is_the_mean_of_the_shards_directions(
    name: str, network: str, four: Processes
) -> None:
    expected = mean_direction(name, network, [shard(rank) for rank in range(4)])
    results = four.run(direction, name, network, None)
    assert equality.relative_error(results[0], expected) < 1e-12
    assert equality.same_bits(results[:1] * 3, results[1:])


@every_two_pass
def test_global_is_the_direction_of_the_whole_batch(name: str, four: Processes) -> None:
    expected = mean_direction(name, "mlp", [whole(range(4))])
    results = four.run(direction, name, "mlp", "global")
    assert equality.relative_error(results[0], expected) < 1e-12
    assert equality.same_bits(results[:1] * 3, results[1:])


@every_two_pass
def test_a_group_is_the_mean_of_the_groups_directions(name: str, four: Processes) -> None:
    expected = mean_direction(name, "mlp", [whole(range(2)), whole(range(2, 4))])
    results = four.run(direction, name, "mlp", 2)
    assert equality.relative_error(results[0], expected) < 1e-12
    assert equality.same_bits(results[:1] * 3, results[1:])


def half_climb(model: nn.Module, data: toy_models.Batch, alpha: float, **settings: Any) -> None:
    """Fill `.grad` twice: norm layers climb along the gradient on half of each shard.

    From the second call on, the first pass computes only gradients that the step needs.
    """
    x, y = data
    is_first = torch.arange(len(x)) % SIZE < SIZE // 2
    objective = GSAM(model, rho=0.1, alpha=alpha, perturb="norms", **settings)
    for _ in range(2):
        model.zero_grad()
        objective.backward(
            lambda: toy_models.cross_entropy(model, (x, y)),
            climb=lambda: toy_models.cross_entropy(model, (x[is_first], y[is_first])),
        )


def half_climb_in_a_process(alpha: float, scope: str) -> Tensor:
    model = DistributedDataParallel(model_of("attention"))
    half_climb(model, shard(dist.get_rank()), alpha, scope=scope)
    return toy_models.flat_grad(model)


@pytest.mark.parametrize("alpha", [0.0, 0.4])
@pytest.mark.parametrize("scope", ["replica", "global"])
def test_norms_that_climb_on_a_part(scope: str, alpha: float, two: Processes) -> None:
    parts = [shard(0), shard(1)] if scope == "replica" else [whole(range(2))]
    expected = []
    for part in parts:
        model = model_of("attention")
        half_climb(model, part, alpha)
        expected.append(toy_models.flat_grad(model))
    results = two.run(half_climb_in_a_process, alpha, scope)
    assert equality.relative_error(results[0], torch.stack(expected).mean(0)) < 1e-12
    assert equality.same_bits(results[:1], results[1:])
