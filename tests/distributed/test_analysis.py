"""Curvature measured by several processes equals that of one process with all the data."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from surrogap.analysis import Hessian, Surface, eigenvalues
from surrogap.core.shards import whole_of
from tests import equality, toy_models
from tests.analysis.reference import batches, dense, network
from tests.distributed.processes import Failure, Processes

SHARES = {"mlp": [0, 1, 0], "convnet": [1, 1, 1], "attention": [1, 0, 0]}


def part(share: list[int]) -> list[toy_models.Batch]:
    return [b for b, rank in zip(batches(), share, strict=True) if rank == dist.get_rank()]


def replicated(name: str, share: list[int]) -> tuple[float, Tensor, Tensor, bool]:
    model = DistributedDataParallel(network(name), find_unused_parameters=True)
    if name == "convnet" and dist.get_rank():  # as they are after a training step
        model.module[1].running_mean.fill_(0.7)
    before = equality.bits(model)
    surface = Surface(model, part(share))
    loss, gradient = surface.gradient()
    product = Hessian(surface) @ surface.space.random(5)
    return float(loss), gradient, product, equality.same_bits(before, equality.bits(model))


@pytest.mark.parametrize("name", list(toy_models.MODELS))
def test_ddp_is_one_process_with_all_the_data(name: str, two: Processes) -> None:
    whole = Surface(network(name), batches())
    loss, gradient = whole.gradient()
    results = two.run(replicated, name, SHARES[name])
    for found_loss, found_gradient, product, is_intact in results:
        assert found_loss == pytest.approx(float(loss), rel=1e-12)
        torch.testing.assert_close(found_gradient, gradient)
        expected = dense(name) @ whole.space.random(5)
        assert equality.relative_error(product, expected) < 1e-12
        assert is_intact


def sharded(model: nn.Module, *, is_hybrid: bool = False) -> nn.Module:
    number = dist.get_world_size()
    shape = {"copies": 2, "pieces": number // 2} if is_hybrid else {"pieces": number}
    mesh = init_device_mesh("cpu", tuple(shape.values()), mesh_dim_names=tuple(shape))
    for module in list(model.modules()):
        if isinstance(module, nn.Linear):
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def gathered(surface: Surface, vector: Tensor) -> Tensor:
    """The whole vector, from the shards of all processes."""
    pieces = zip(surface.space.pieces(vector), surface.weights.parameters, strict=True)
    return torch.cat([whole_of(piece, p).full_tensor().reshape(-1) for piece, p in pieces])


def pieces(sizes: tuple[int, ...]) -> list[toy_models.Batch]:
    """A batch of a different size for each process."""
    return [batches(sizes)[dist.get_rank()]]


def spread(is_hybrid: bool) -> tuple[list[Tensor], list[float], bool]:
    model = sharded(network("mlp"), is_hybrid=is_hybrid)
    sizes = (5, 6) if dist.get_world_size() == 2 else (5, 2, 3, 1)
    before = [p.to_local().clone() for p in model.parameters()]
    surface = Surface(model, pieces(sizes))
    v = surface.space.random(5)
    loss, gradient = surface.gradient()
    product = Hessian(surface, "finite-differences") @ v
    numbers = [float(loss), float(surface.loss()), float(surface.space.norm(v))]
    after = [p.to_local().clone() for p in model.parameters()]
    is_intact = equality.same_bits(before, after) and all(
        p.grad is None for p in model.parameters()
    )
    vectors = [gathered(surface, x) for x in (v, gradient, product)]
    return vectors, numbers, is_intact


@pytest.mark.parametrize("is_hybrid", [False, True])
def test_fsdp_is_one_process_with_all_the_data(is_hybrid: bool, four: Processes) -> None:
    whole = Surface(network("mlp"), batches())
    v = whole.space.random(5)
    loss, gradient = whole.gradient()
    for vectors, numbers, is_intact in four.run(spread, is_hybrid):
        torch.testing.assert_close(vectors[0], v)
        torch.testing.assert_close(vectors[1], gradient)
        assert equality.relative_error(vectors[2], dense("mlp") @ v) < 1e-7
        assert numbers == pytest.approx([float(loss), float(loss), float(v.norm())], rel=1e-12)
        assert is_intact


def top_of_replicas() -> list[float]:
    model = DistributedDataParallel(network("mlp"))
    hessian = Hessian(Surface(model, part([0, 1, 1])))
    return eigenvalues(hessian, 2, tolerance=1e-5).values.tolist()


def top_of_pieces() -> list[float]:
    hessian = Hessian(Surface(sharded(network("mlp")), pieces((5, 6))), "finite-differences")
    pairs = eigenvalues(hessian, 2, tolerance=1e-4)
    norms = [float(hessian.space.norm(vector)) for vector in pairs.vectors]
    assert norms == pytest.approx([1.0, 1.0])
    return pairs.values.tolist()


@pytest.mark.parametrize("find", [top_of_replicas, top_of_pieces])
def test_eigenvalues_are_those_of_one_process(
    find: Callable[[], list[float]], two: Processes
) -> None:
    truth = torch.linalg.eigvalsh(dense("mlp")).flip(0)[:2].tolist()
    one, other = two.run(find)
    assert one == other == pytest.approx(truth, rel=1e-6)


def warned() -> str:
    with pytest.warns(UserWarning, match="weights are sharded") as caught:
        hessian = Hessian(Surface(sharded(network("mlp")), pieces((5, 6))))
    return f"{hessian.method}: {caught[0].message}"


def test_sharded_weights_fall_back_with_a_warning(two: Processes) -> None:
    for message in two.run(warned):
        assert message.startswith("finite-differences: Using finite-differences instead of forward")


def unequal() -> None:
    Surface(sharded(network("mlp")), part([0, 1, 0]))


def dropping() -> None:
    model = DistributedDataParallel(toy_models.Attention(dropout=0.1 * dist.get_rank()).double())
    Surface(model, part([0, 1, 0]))


def test_all_processes_refuse_together(two: Processes) -> None:
    for failure in two.try_run(unequal):
        assert isinstance(failure, Failure)
        assert "number of batches must be the same in each process, got 1 to 2" in failure
    for failure in two.try_run(dropping):
        assert isinstance(failure, Failure)
        assert "model must give the same loss for the same batch" in failure
