"""`objective.loss` in several processes: averaged once, never inside `no_sync`."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel

from surrogap import GSAM, SAM, Vanilla
from surrogap.rho import InverseSqrt
from tests import equality, toy_models
from tests.distributed import test_fsdp as fsdp
from tests.distributed.processes import Processes
from tests.distributed.test_ddp import mean_direction, model_of, shard, whole
from tests.distributed.test_replicas import fingerprint
from tests.objective_cases import OBJECTIVES, every_objective


def both_ways(name: str, scope: str | None) -> list[Tensor]:
    """`.grad` after `loss(...).backward()`, and after `backward`."""
    gradients, settings = [], {} if scope is None else {"scope": scope}
    for way in range(2):
        model = DistributedDataParallel(model_of("mlp"))
        objective = OBJECTIVES[name].make(model, **settings)
        closure = toy_models.closure_of(model, shard(dist.get_rank()))
        for _ in range(2):
            objective.backward(closure) if way else objective.loss(closure).backward()
        gradients.append(toy_models.flat_grad(model))
    return gradients


@every_objective
def test_it_adds_what_backward_adds(name: str, two: Processes) -> None:
    results = two.run(both_ways, name, None)
    expected = 2 * mean_direction(name, "mlp", [shard(0), shard(1)])
    for by_loss, by_backward in results:
        assert torch.equal(by_loss, by_backward)
        assert equality.relative_error(by_loss, expected) < 1e-12
    assert equality.same_bits(*results)


def test_with_global_scope(two: Processes) -> None:
    expected = 2 * mean_direction("GSAM", "mlp", [whole(range(2))])
    for by_loss, by_backward in two.run(both_ways, "GSAM", "global"):
        assert torch.equal(by_loss, by_backward)
        assert equality.relative_error(by_loss, expected) < 1e-12


MakeLoss = Callable[[Callable[[], Tensor]], Tensor]


def loop(model: Any, make_loss: MakeLoss, num_steps: int = 3) -> Tensor:
    """A plain training loop with accumulation, scaling and clipping."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = GradScaler("cpu", init_scale=2.0**10)
    x, y = shard(dist.get_rank())
    parts = [(x[:2], y[:2]), (x[2:], y[2:])]
    for _ in range(num_steps):
        for index, part in enumerate(parts):
            context: AbstractContextManager[object] = nullcontext() if index else model.no_sync()
            with context:
                loss = make_loss(toy_models.closure_of(model, part)) / 2
                scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return torch.cat([tensor.double().reshape(-1) for tensor in equality.bits(model.module)])


def unperturbed(network: str, options: dict[str, Any]) -> list[Tensor]:
    """Weights after the plain loop, and after the loop with objectives that do not perturb."""
    plain = loop(DistributedDataParallel(model_of(network), **options), lambda closure: closure())
    results = [plain]
    for make in (Vanilla, lambda model: SAM(model, rho=0.0)):
        model = DistributedDataParallel(model_of(network), **options)
        results.append(loop(model, make(model).loss))
    return results


@pytest.mark.parametrize("network", ["mlp", "attention"])
@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}], ids=str)
def test_without_a_perturbation_the_loop_is_unchanged(
    network: str, options: dict[str, Any], two: Processes
) -> None:
    for plain, vanilla, sam in two.run(unperturbed, network, options):
        assert torch.equal(plain, vanilla)
        assert torch.equal(plain, sam)


def one_step(name: str) -> Tensor:
    model = DistributedDataParallel(model_of("mlp"))
    return loop(model, OBJECTIVES[name].make(model).loss, 1)


@pytest.mark.parametrize("name", ["SAM", "GSAM", "ASAM-ascent", "Intermittent", "EntropySGD"])
def test_accumulation_scaling_and_clipping_together(name: str, two: Processes) -> None:
    parts = [(x[p], y[p]) for x, y in (shard(0), shard(1)) for p in (slice(0, 2), slice(2, 4))]
    expected = mean_direction(name, "mlp", parts)
    expected *= min(1.0, float(0.1 / (expected.norm() + 1e-6)))  # as clip_grad_norm_ does
    start = torch.cat([tensor.reshape(-1) for tensor in equality.bits(model_of("mlp"))])
    results = two.run(one_step, name)
    for after in results:
        assert equality.relative_error(after - start, -0.1 * expected) < 1e-11
    assert torch.equal(*results)


def inside_no_sync(case: str) -> tuple[Tensor, int]:
    """`.grad` before the average, and the number of steps counted."""
    model = DistributedDataParallel(model_of("mlp"))
    rho = InverseSqrt(0.1)
    objective = GSAM(model, rho=rho, alpha=0.4)
    closure = toy_models.closure_of(model, shard(dist.get_rank()))
    with patch.object(dist, "all_reduce", side_effect=AssertionError):
        if case == "backward alone":
            loss = objective.loss(closure)
        with model.no_sync():
            if case == "objective.backward":
                objective.backward(closure)
            else:
                loss = loss if case == "backward alone" else objective.loss(closure)
                loss.backward()
        if case == "sync=False":
            model.zero_grad()
            objective.loss(closure, sync=False).backward()
    return toy_models.flat_grad(model), rho.num_steps


@pytest.mark.parametrize("case", ["loss", "backward alone", "objective.backward", "sync=False"])
def test_inside_no_sync_nothing_is_averaged_or_counted(case: str, two: Processes) -> None:
    for rank, (gradient, num_steps) in enumerate(two.run(inside_no_sync, case)):
        assert (
            equality.relative_error(gradient, mean_direction("GSAM", "mlp", [shard(rank)])) < 1e-12
        )
        assert num_steps == 0


def buffers_inside_no_sync(way: str) -> list[Tensor]:
    model = DistributedDataParallel(model_of("convnet"))
    objective, closure = SAM(model), toy_models.closure_of(model, shard(dist.get_rank()))
    with model.no_sync():
        objective.backward(closure) if way == "backward" else objective.loss(closure).backward()
    return [buffer.clone() for buffer in model.buffers()]


@pytest.mark.parametrize("way", ["loss", "backward"])
def test_inside_no_sync_no_statistics_are_broadcast(way: str, two: Processes) -> None:
    for rank, buffers in enumerate(two.run(buffers_inside_no_sync, way)):
        model = model_of("convnet")
        model(shard(rank)[0])
        assert equality.same_bits(buffers, list(model.buffers()))


def messages() -> tuple[int, int]:
    """The number of elements that are averaged in one call, and of parameters."""
    model = DistributedDataParallel(model_of("mlp"))
    closure, sizes, send = toy_models.closure_of(model, shard(dist.get_rank())), [], dist.all_reduce

    def watched(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        sizes.append(tensor.numel())
        return send(tensor, *args, **kwargs)

    with patch.object(dist, "all_reduce", watched):
        loss = GSAM(model).loss(closure)
        assert sizes == []
        loss.backward()
    return sum(sizes), sum(parameter.numel() for parameter in model.parameters())


def test_the_direction_is_averaged_exactly_once(two: Processes) -> None:
    for sent, num_parameters in two.run(messages):
        assert sent == num_parameters


def many_steps(scope: str) -> tuple[str, str]:
    """In bfloat16, with a different weight of the loss in each process."""
    model = DistributedDataParallel(toy_models.convnet().bfloat16())
    start = fingerprint(model)
    objective = GSAM(model, scope=scope)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(60):
        x = torch.randn(4, 3, 4, 4, generator=generator).bfloat16()
        y = torch.randint(3, (4,), generator=generator)
        with nullcontext() if step % 2 else model.no_sync():
            loss = objective.loss(lambda x=x, y=y: nn.functional.cross_entropy(model(x), y))
            (loss / (3 + dist.get_rank())).backward()
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
    return start, fingerprint(model)


@pytest.mark.parametrize("scope", ["replica", "global"])
def test_replicas_stay_identical(scope: str, four: Processes) -> None:
    results = four.run(many_steps, scope)
    assert results[0][0] != results[0][1]
    assert results == [results[0]] * 4


def weighted(scope: str) -> Tensor:
    model = DistributedDataParallel(model_of("mlp"))
    loss = GSAM(model, rho=0.1, alpha=0.4, scope=scope).loss(
        toy_models.closure_of(model, shard(dist.get_rank()))
    )
    ((1.0 + dist.get_rank()) * loss).backward()
    return toy_models.flat_grad(model)


def test_processes_may_weight_their_losses(two: Processes) -> None:
    """A process's own direction has its own weight; a shared direction has the mean weight."""
    first, second = (mean_direction("GSAM", "mlp", [shard(rank)]) for rank in range(2))
    shared = mean_direction("GSAM", "mlp", [whole(range(2))])
    expected = {"replica": (first + 2 * second) / 2, "global": 1.5 * shared}
    for scope, direction in expected.items():
        for gradient in two.run(weighted, scope):
            assert equality.relative_error(gradient, direction) < 1e-12


def with_another_term(order: str) -> Tensor:
    """`.grad` of a loss to which the caller adds another term."""
    model = DistributedDataParallel(model_of("mlp"))
    x, y = shard(dist.get_rank())
    if order == "before":
        other = model(x).square().mean()
    loss = GSAM(model, rho=0.1, alpha=0.4).loss(lambda: nn.functional.cross_entropy(model(x), y))
    if order == "after":
        other = model(x).square().mean()
    (loss + other).backward()
    return toy_models.flat_grad(model)


@pytest.mark.parametrize("order", ["before", "after"])
def test_other_terms_are_averaged_too(order: str, two: Processes) -> None:
    """Also terms from a forward pass of DDP, inside and outside of `no_sync`."""
    expected = mean_direction("GSAM", "mlp", [shard(0), shard(1)])
    for rank in range(2):
        model = model_of("mlp")
        model(shard(rank)[0]).square().mean().backward()
        expected += toy_models.flat_grad(model) / 2
    results = two.run(with_another_term, order)
    for gradient in results:
        assert equality.relative_error(gradient, expected) < 1e-12
    assert torch.equal(*results)


def dropped() -> tuple[list[Tensor], list[Tensor]]:
    """Buffers after a loss without `backward`, and a plain step of DDP after it."""
    model = DistributedDataParallel(model_of("convnet"))
    closure = toy_models.closure_of(model, shard(dist.get_rank()))
    GSAM(model).loss(closure)
    assert all(parameter.grad is None for parameter in model.parameters())
    buffers = [buffer.clone() for buffer in model.buffers()]
    closure().backward()
    return buffers, [toy_models.flat_grad(model)]


def test_without_backward_it_is_a_forward_pass(two: Processes) -> None:
    results = two.run(dropped)
    model = model_of("convnet")
    model(shard(0)[0])
    for buffers, gradient in results:
        assert equality.same_bits(buffers, list(model.buffers()))
        assert equality.same_bits(gradient, results[0][1])


def sharded_step(name: str, hybrid: bool) -> tuple[Tensor, Tensor]:
    """`.grad` of a model under FSDP2 after `loss(...).backward()`, and after `backward`."""
    gradients = []
    for way in range(2):
        mesh = fsdp.copies_of_shards() if hybrid else None
        model = fsdp.sharded(fsdp.network(), mesh)
        objective = OBJECTIVES[name].make(model)
        closure = toy_models.closure_of(model, fsdp.mine())
        if way:
            objective.backward(closure)
        else:
            (objective.loss(closure) * (1.0 + dist.get_rank())).backward()
        gradients.append(fsdp.flat_grad(model))
    return gradients[0], gradients[1]


@every_objective
def test_fsdp2(name: str, two: Processes) -> None:
    expected, _ = fsdp.alone(name, 2)
    for by_loss, by_backward in two.run(sharded_step, name, False):
        assert equality.relative_error(by_loss, 1.5 * expected) < 1e-11  # times the mean weight
        assert equality.relative_error(by_backward, expected) < 1e-11


def test_hybrid_sharding(four: Processes) -> None:
    expected, _ = fsdp.alone("GSAM", 4)
    for by_loss, _ in four.run(sharded_step, "GSAM", True):
        assert equality.relative_error(by_loss, 2.5 * expected) < 1e-11


def sharded_accumulation(way: str) -> tuple[Tensor, int]:
    """Two micro-batches; FSDP2 does not reduce the first, as in Accelerate."""
    model = fsdp.sharded(fsdp.network())
    rho = InverseSqrt(0.1)
    objective = GSAM(model, rho=rho, alpha=0.4)
    closure = toy_models.closure_of(model, fsdp.mine())
    for index in range(2):
        model.set_requires_gradient_sync(index == 1)
        if way == "loss":
            (objective.loss(closure) / 2).backward()
        else:
            objective.backward(lambda: closure() / 2)
        flags = [g.reduce_grads for m in fsdp_modules(model) for g in parameter_groups(m)]
        assert set(flags) == {index == 1}
    return fsdp.flat_grad(model), rho.num_steps


def fsdp_modules(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "_get_fsdp_state")]


def parameter_groups(module: Any) -> list[Any]:
    state = module._get_fsdp_state()
    return getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]


@pytest.mark.parametrize("way", ["loss", "backward"])
def test_fsdp2_without_gradient_sync(way: str, two: Processes) -> None:
    expected, _ = fsdp.alone("GSAM", 2)
    for gradient, num_steps in two.run(sharded_accumulation, way):
        assert equality.relative_error(gradient, expected) < 1e-11
        assert num_steps == 1
