"""Replicas stay bit-identical, and errors are never silent."""

import hashlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel

from surrogap import GSAM, SAM
from surrogap.rho import InverseSqrt
from tests import equality, toy_models
from tests.distributed.processes import Processes, is_failure
from tests.distributed.test_ddp import mean_direction, model_of, shard, whole
from tests.objective_cases import OBJECTIVES, every_objective


def fingerprint(model: nn.Module) -> str:
    """A checksum of the bits of all weights and buffers."""
    digest = hashlib.sha256()
    for tensor in equality.bits(model):
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def thousand_steps(name: str, scope: str) -> tuple[str, str, bool]:
    model = DistributedDataParallel(toy_models.convnet().bfloat16())
    start = fingerprint(model)
    objective = OBJECTIVES[name].make(model, scope=scope)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(1000):
        x = torch.randn(4, 3, 4, 4, generator=generator).bfloat16()
        y = torch.randint(3, (4,), generator=generator)
        optimizer.zero_grad()
        objective.backward(lambda x=x, y=y: nn.functional.cross_entropy(model(x), y))
        optimizer.step()
    is_finite = all(bool(tensor.isfinite().all()) for tensor in model.state_dict().values())
    return start, fingerprint(model), is_finite


@pytest.mark.parametrize(("name", "scope"), [("GSAM", "replica"), ("SAM", "global")])
def test_a_thousand_steps_in_bfloat16(name: str, scope: str, four: Processes) -> None:
    results = four.run(thousand_steps, name, scope, timeout=300.0)
    start, end, is_finite = results[0]
    assert is_finite
    assert start != end
    assert results == [results[0]] * 4


def overflowing_steps(scope: str, number: int) -> list[tuple[str, float, bool]]:
    """Checksums after three steps. Pass `number` of the second overflows in one process."""
    model = DistributedDataParallel(toy_models.convnet().double())
    objective = GSAM(model, scope=scope)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = GradScaler("cpu", init_scale=2.0**10)
    data, records = shard(dist.get_rank()), []
    for step in range(3):
        passes = iter([1, 2])

        def closure(step: int = step, passes: Iterator[int] = passes) -> Tensor:
            loss = toy_models.cross_entropy(model, data)
            overflows = next(passes) == number and step == 1 and dist.get_rank() == 1
            return loss * 1e306 if overflows else loss  # infinite when scaled

        before = equality.bits(model.module)[: len(list(model.parameters()))]
        optimizer.zero_grad()
        objective.backward(closure, scaler=scaler)
        scaler.step(optimizer)
        scaler.update()
        moved = not equality.same_bits(before, equality.bits(model.module)[: len(before)])
        records.append((fingerprint(model), scaler.get_scale(), moved))
    return records


@pytest.mark.parametrize("scope", ["replica", "global"])
@pytest.mark.parametrize("number", [1, 2])
def test_an_overflow_in_one_process_skips_the_step_in_all(
    scope: str, number: int, two: Processes
) -> None:
    first, second = two.run(overflowing_steps, scope, number)
    assert first == second
    assert [moved for _, _, moved in first] == [True, False, True]
    assert [scale for _, scale, _ in first] == [2.0**10, 2.0**9, 2.0**9]


class Branches(nn.Module):
    """A model that uses its first branch always, and the others on request."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(48, 3) for _ in range(3))

    def forward(self, x: Tensor, used: tuple[int, ...]) -> Tensor:
        x = x.flatten(1)
        return sum((self.branches[index](x) for index in used), start=torch.zeros(()).double())


def used_by(rank: int) -> tuple[int, ...]:
    return (0, 1) if rank == 0 else (0,)


def partly_unused(name: str, scope: str | None) -> tuple[list[Tensor | None], str]:
    model = DistributedDataParallel(Branches().double(), find_unused_parameters=True)
    rank, settings = dist.get_rank(), {} if scope is None else {"scope": scope}
    objective = OBJECTIVES[name].make(model, **settings)
    x, y = shard(rank)
    objective.backward(lambda: nn.functional.cross_entropy(model(x, used_by(rank)), y))
    gradients = [parameter.grad for parameter in model.parameters()]
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return gradients, fingerprint(model)


@every_objective
def test_a_parameter_unused_in_one_process(name: str, two: Processes) -> None:
    results = two.run(partly_unused, name, None)
    assert results[0][1] == results[1][1]
    sums: list[Tensor] = [torch.zeros(())] * 6
    for rank in range(2):
        torch.manual_seed(0)
        model, (x, y) = Branches().double(), shard(rank)
        OBJECTIVES[name].make(model).backward(
            lambda model=model, x=x, y=y, rank=rank: nn.functional.cross_entropy(
                model(x, used_by(rank)), y
            )
        )
        for index, parameter in enumerate(model.parameters()):
            sums[index] = sums[index] + (0 if parameter.grad is None else parameter.grad / 2)
    for gradients, _ in results:
        assert gradients[4:] == [None, None]  # no process reached the last branch
        for gradient, expected in zip(gradients[:4], sums, strict=False):
            assert gradient is not None
            assert equality.relative_error(gradient, expected) < 1e-12


def test_a_parameter_unused_in_one_process_with_global_scope(two: Processes) -> None:
    results = two.run(partly_unused, "GSAM", "global")
    assert results[0][1] == results[1][1]
    assert results[0][0][4:] == [None, None]
    assert equality.same_bits(results[0][0][:4], results[1][0][:4])


def raising_in(failing: int) -> tuple[bool, bool]:
    """Return whether weights and gradients are unchanged after an error in any process."""
    model = DistributedDataParallel(toy_models.convnet().double())
    rank = dist.get_rank()
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.5)
    before, passes = equality.bits(model), iter([1, 2])

    def closure() -> Tensor:
        loss = toy_models.cross_entropy(model, shard(rank))
        if next(passes) == 2 and rank == failing:
            raise MemoryError
        return loss

    with pytest.raises(MemoryError if rank == failing else RuntimeError):
        SAM(model).backward(closure)
    gradients = [parameter.grad for parameter in model.parameters()]
    return (
        equality.same_bits(before, equality.bits(model)),
        all(g is not None and bool((g == 0.5).all()) for g in gradients),
    )


def test_an_error_in_one_process_is_an_error_in_all() -> None:
    processes = Processes(2, group_timeout=5.0)
    try:
        results = processes.run(raising_in, 1, timeout=60.0)
    finally:
        processes.stop()
    assert results == [(True, True)] * 2


def accumulated(scope: str, name: str) -> tuple[Tensor, Tensor]:
    """The gradient and the weights after a step of two micro-batches, scaled and clipped."""
    model = DistributedDataParallel(model_of("mlp"))
    objective = OBJECTIVES[name].make(model, scope=scope)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = GradScaler("cpu", init_scale=2.0**10)
    x, y = shard(dist.get_rank())
    closures = [
        lambda part=part: nn.functional.cross_entropy(model(x[part]), y[part]) / 2
        for part in (slice(0, 2), slice(2, 4))
    ]
    if scope == "global":
        objective.backward(closures, scaler=scaler)
    else:
        objective.backward(closures[0], scaler=scaler, sync=False)
        objective.backward(closures[1], scaler=scaler)
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    gradient = toy_models.flat_grad(model)
    scaler.step(optimizer)
    return gradient, nn.utils.parameters_to_vector(model.parameters()).detach()


@pytest.mark.parametrize("scope", ["global", "replica"])
@pytest.mark.parametrize("name", ["SAM", "GSAM", "ASAM-ascent"])
def test_accumulation_scaling_and_clipping_together(scope: str, name: str, two: Processes) -> None:
    micro_batches = [
        (x[part], y[part]) for x, y in (shard(0), shard(1)) for part in (slice(0, 2), slice(2, 4))
    ]
    parts = [whole(range(2))] if scope == "global" else micro_batches
    expected = mean_direction(name, "mlp", parts)
    expected *= 0.1 / (expected.norm() + 1e-6)  # as clip_grad_norm_ does
    results = two.run(accumulated, scope, name)
    start = nn.utils.parameters_to_vector(model_of("mlp").parameters()).detach()
    for gradient, after in results:
        assert equality.relative_error(gradient, expected) < 1e-12
        assert equality.relative_error(after, start - 0.1 * expected) < 1e-12
    assert equality.same_bits(list(results[0]), list(results[1]))


def buffers_after_steps(broadcast: bool) -> list[Tensor]:
    model = DistributedDataParallel(model_of("convnet"), broadcast_buffers=broadcast)
    for _ in range(2):
        SAM(model).backward(toy_models.closure_of(model, shard(dist.get_rank())))
    return [buffer.clone() for buffer in model.buffers()]


@pytest.mark.parametrize("broadcast", [True, False])
def test_statistics_are_broadcast_by_default(broadcast: bool, two: Processes) -> None:
    results = two.run(buffers_after_steps, broadcast)
    for rank, buffers in enumerate(results):
        model = model_of("convnet")
        for _ in range(2):
            model(shard(0 if broadcast else rank)[0])
        assert equality.same_bits(buffers, list(model.buffers()))


def beside_plain_steps(options: dict[str, Any]) -> list[Tensor]:
    """A plain step of DDP, a step of an objective, and a plain step again."""
    model = DistributedDataParallel(model_of("mlp"), **options)
    closure, gradients = toy_models.closure_of(model, shard(dist.get_rank())), []
    for step in range(3):
        model.zero_grad()
        if step == 1:
            GSAM(model, rho=0.1, alpha=0.4).backward(closure)
        else:
            closure().backward()
        gradients.append(toy_models.flat_grad(model))
    return gradients


@pytest.mark.parametrize(
    "options",
    [{}, {"gradient_as_bucket_view": True}, {"bucket_cap_mb": 0.001}],
    ids=str,
)
def test_plain_steps_before_and_after(options: dict[str, Any], two: Processes) -> None:
    shards = [shard(0), shard(1)]
    plain, direction = (mean_direction(name, "mlp", shards) for name in ("Vanilla", "GSAM"))
    for gradients in two.run(beside_plain_steps, options):
        for gradient, expected in zip(gradients, [plain, direction, plain], strict=True):
            assert equality.relative_error(gradient, expected) < 1e-12


def added_to_what_was_there() -> Tensor:
    model = DistributedDataParallel(model_of("mlp"))
    for _ in range(2):
        SAM(model, rho=0.1).backward(toy_models.closure_of(model, shard(dist.get_rank())))
    return toy_models.flat_grad(model)


def test_gradients_add_up(two: Processes) -> None:
    expected = 2 * mean_direction("SAM", "mlp", [shard(0), shard(1)])
    for gradient in two.run(added_to_what_was_there):
        assert equality.relative_error(gradient, expected) < 1e-12


def in_many_buckets() -> Tensor:
    from surrogap.core import replicas

    size, replicas._BUCKET_BYTES = replicas._BUCKET_BYTES, 100
    try:
        return added_to_what_was_there()
    finally:
        replicas._BUCKET_BYTES = size


def test_a_direction_may_need_many_buckets(two: Processes) -> None:
    expected = 2 * mean_direction("SAM", "mlp", [shard(0), shard(1)])
    for gradient in two.run(in_many_buckets):
        assert equality.relative_error(gradient, expected) < 1e-12


def names_seen() -> list[str]:
    names: list[str] = []
    inner = nn.ModuleDict({"net": DistributedDataParallel(toy_models.mlp())})
    SAM(inner, perturb=lambda name, _: bool(names.append(name)) or True)
    SAM(
        DistributedDataParallel(torch.compile(toy_models.mlp())),
        perturb=lambda name, _: bool(names.append(name)) or True,
    )
    return names


def test_perturb_gets_the_names_of_the_unwrapped_model(two: Processes) -> None:
    plain = [name for name, _ in toy_models.mlp().named_parameters()]
    expected = [f"net.{name}" for name in plain] + plain
    assert two.run(names_seen) == [expected] * 2


def counted_steps() -> int:
    model = DistributedDataParallel(toy_models.mlp().double())
    rho = InverseSqrt(0.1)
    objective = SAM(model, rho=rho)
    closure = toy_models.closure_of(model, shard(dist.get_rank()))
    for sync in (False, False, True, True):
        objective.backward(closure, sync=sync)
    return rho.state_dict()["num_steps"]


def test_schedules_count_the_calls_that_synchronise(two: Processes) -> None:
    assert two.run(counted_steps) == [2, 2]


def refused(case: str) -> str:
    model = toy_models.mlp()
    wrapped = DistributedDataParallel(model)
    groups = [dist.new_group([rank]) for rank in range(2)]
    several = nn.ModuleList(
        DistributedDataParallel(toy_models.mlp(), process_group=group)
        for group in (groups[dist.get_rank()], dist.group.WORLD)
    )
    arguments: dict[str, Any] = {
        "unwrapped": (model, "replica"),
        "unwrapped, a group": (model, dist.group.WORLD),
        "not in it": (wrapped, groups[1 - dist.get_rank()]),
        "several": (several, None),
        "a number": (wrapped, 3),
        "unknown": (wrapped, "local"),
    }
    model, scope = arguments[case]
    with pytest.raises((TypeError, ValueError)) as error:
        SAM(model, scope=scope)
    return f"{error.type.__name__}: {error.value}"


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("unwrapped", "InvalidValueError: scope must be left out for a model that is"),
        ("unwrapped, a group", "InvalidValueError: scope must be left out for a model that is"),
        ("not in it", "InvalidTypeError: scope must be 'replica', 'global' or a process group"),
        ("several", "InvalidValueError: model must be wrapped in DistributedDataParallel"),
        ("a number", "InvalidTypeError: scope must be 'replica', 'global' or a process group"),
        ("unknown", "InvalidValueError: scope must be 'replica', 'global' or a process group"),
    ],
)
def test_scopes_that_are_refused(case: str, message: str, two: Processes) -> None:
    for result in two.run(refused, case):
        assert result.startswith(message)


def test_one_process_accepts_any_scope() -> None:
    model, data = toy_models.mlp(), toy_models.batch()
    expected = toy_models.direction(SAM, model, data)
    for scope in ("replica", "global"):
        SAM(model, scope=scope).backward(toy_models.closure_of(model, data))
        assert torch.equal(toy_models.flat_grad(model), expected)
        model.zero_grad()
    with pytest.raises(ValueError, match="scope must be 'replica', 'global' or a process group"):
        SAM(model, scope="local")


def test_a_failure_is_reported(two: Processes) -> None:
    """The tests above rely on this."""
    results = two.try_run(refused, "no such case")
    assert all(map(is_failure, results))


def without_sync() -> tuple[Tensor, list[Tensor]]:
    model = DistributedDataParallel(model_of("convnet"))
    model(shard(0)[0])  # DDP broadcasts its buffers in the first pass
    SAM(model, rho=0.1).backward(toy_models.closure_of(model, shard(dist.get_rank())), sync=False)
    return toy_models.flat_grad(model), list(model.buffers())


def test_without_sync_nothing_is_shared(two: Processes) -> None:
    for rank, (gradient, buffers) in enumerate(two.run(without_sync)):
        model = model_of("convnet")
        model(shard(0)[0])
        SAM(model, rho=0.1).backward(toy_models.closure_of(model, shard(rank)))
        assert equality.relative_error(gradient, toy_models.flat_grad(model)) < 1e-14
        assert equality.same_bits(buffers, list(model.buffers()))


class Mixed(nn.Module):
    """Two layers with different dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(48, 8).float(), nn.Linear(8, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x.flatten(1).float()).double())


def in_two_dtypes(scope: str) -> Tensor:
    model = DistributedDataParallel(Mixed())
    x, y = shard(dist.get_rank())
    GSAM(model, rho=0.1, scope=scope).backward(lambda: nn.functional.cross_entropy(model(x), y))
    assert all(parameter.grad.dtype == parameter.dtype for parameter in model.parameters())
    return torch.cat([parameter.grad.double().flatten() for parameter in model.parameters()])


def test_parameters_of_several_dtypes(two: Processes) -> None:
    model, (x, y) = Mixed(), whole(range(2))
    GSAM(model, rho=0.1).backward(lambda: nn.functional.cross_entropy(model(x), y))
    expected = torch.cat([p.grad.double().flatten() for p in model.parameters()])
    for gradient in two.run(in_two_dtypes, "global"):
        assert equality.relative_error(gradient, expected) < 1e-6
