"""Friendly-SAM and MomentumSAM in several processes, against plain loops in one."""

import copy
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from surrogap import MomentumSAM
from tests import equality, reference, toy_models
from tests.core.test_new_objective import RHO, SIGMA, flat, friendly
from tests.distributed.processes import Processes
from tests.distributed.test_ddp import model_of
from tests.new_objective import FriendlySAM

STEPS = 20


def data_of(rank: int, step: int) -> toy_models.Batch:
    return toy_models.batch(4, seed=100 * step + rank)


def loss_at(model: nn.Module, data: toy_models.Batch) -> reference.Loss:
    return reference.loss_of(copy.deepcopy(model), lambda net: toy_models.cross_entropy(net, data))[
        0
    ]


def train_friendly(scope: str) -> tuple[Tensor, dict[str, Tensor]]:
    model = DistributedDataParallel(model_of("mlp"))
    objective = FriendlySAM(model, rho=RHO, sigma=SIGMA, scope=scope)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        objective.backward(toy_models.closure_of(model, data_of(dist.get_rank(), step)))
        optimizer.step()
        optimizer.zero_grad()
    return flat(model), objective.state_dict()["along"]


def test_friendly_sam_keeps_a_mean_for_each_process(two: Processes) -> None:
    model = model_of("mlp")
    w, means = flat(model), [torch.zeros_like(flat(model))] * 2
    for step in range(STEPS):
        losses = [loss_at(model, data_of(rank, step)) for rank in range(2)]
        pairs = [friendly(f, w, m) for f, m in zip(losses, means, strict=True)]
        w, means = w - 0.1 * (pairs[0][0] + pairs[1][0]) / 2, [m for _, m in pairs]
    results = two.run(train_friendly, "replica")
    assert equality.same_bits([results[0][0]], [results[1][0]])
    assert equality.relative_error(results[0][0], w) < 1e-9
    for (_, state), m in zip(results, means, strict=True):
        assert equality.relative_error(torch.cat([t.reshape(-1) for t in state.values()]), m) < 1e-9
        assert all(not name.startswith("module.") for name in state)


def test_friendly_sam_of_all_processes_has_one_mean(two: Processes) -> None:
    model = model_of("mlp")
    w, m = flat(model), torch.zeros_like(flat(model))
    for step in range(STEPS):
        losses = [loss_at(model, data_of(rank, step)) for rank in range(2)]
        d, m = friendly(lambda v, fs=losses: (fs[0](v) + fs[1](v)) / 2, w, m)
        w = w - 0.1 * d
    results = two.run(train_friendly, "global")
    assert equality.same_bits(list(results[0][1].values()), list(results[1][1].values()))
    assert equality.relative_error(results[0][0], w) < 1e-9


def skip_a_step(way: str) -> list[dict[str, Tensor]]:
    """Train for three steps of two calls. In the second, one process overflows in the first."""
    model = DistributedDataParallel(model_of("mlp"))
    objective = FriendlySAM(model, rho=RHO, sigma=SIGMA)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    states = []
    for step in range(3):
        for call in range(2):
            closure = toy_models.closure_of(model, data_of(dist.get_rank(), 2 * step + call))
            factor = float("inf") if (step, call, dist.get_rank()) == (1, 0, 1) else 1.0

            def scaled(closure=closure, factor=factor) -> Tensor:
                return closure() * factor

            with model.no_sync() if call == 0 else nullcontext():
                if way == "backward":
                    objective.backward(scaled, scaler=scaler)
                else:
                    scaler.scale(objective.loss(scaled, scaler=scaler)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        states.append(objective.state_dict()["along"])
    return states


@pytest.mark.parametrize("way", ["backward", "loss"])
def test_no_process_keeps_the_mean_of_a_step_that_one_of_them_skips(
    way: str, two: Processes
) -> None:
    for first, second, third in two.run(skip_a_step, way):
        assert equality.same_bits(list(first.values()), list(second.values()))
        assert not any(torch.equal(second[name], third[name]) for name in third)


def train_momentum(wrapper: str) -> Tensor:
    model = model_of("mlp")
    if wrapper == "ddp":
        model = DistributedDataParallel(model)
    elif wrapper == "fsdp2":
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    objective = MomentumSAM(model, optimizer, rho=0.3)
    rank, world = dist.get_rank(), dist.get_world_size()
    for step in range(STEPS):
        parts = [data_of(r, step) for r in range(world)] if wrapper == "one" else None
        if parts is None:
            objective.backward(toy_models.closure_of(model, data_of(rank, step)))
        else:
            objective.backward(
                lambda parts=parts: (
                    sum(toy_models.cross_entropy(model, part) for part in parts) / world
                )
            )
        optimizer.step()
        optimizer.zero_grad()
    whole = [p.full_tensor() if wrapper == "fsdp2" else p for p in model.parameters()]
    return torch.cat([p.detach().reshape(-1) for p in whole])


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
def test_momentum_sam_trains_as_one_process_does(wrapper: str, two: Processes) -> None:
    expected = two.run(train_momentum, "one")[0]
    results = two.run(train_momentum, wrapper)
    assert equality.same_bits(results[:1], results[1:])
    assert equality.relative_error(results[0], expected) < 1e-10
