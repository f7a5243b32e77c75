"""Dense references in float64, and surfaces with known derivatives."""

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from surrogap.analysis import Surface
from tests import toy_models

SIZES = (5, 2, 4)


def batches(sizes: Sequence[int] = SIZES, seed: int = 1) -> list[toy_models.Batch]:
    """Batches of different sizes, in float64."""
    x, y = toy_models.batch(sum(sizes), seed=seed)
    return list(zip(x.split(list(sizes)), y.split(list(sizes)), strict=True))


def network(name: str, *, is_training: bool = False) -> nn.Module:
    """A small model in float64, with running statistics that are not the initial ones."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = toy_models.MODELS[name]().double()
    model(toy_models.batch(16, seed=7)[0])
    return model.train(is_training)


def dense_hessian(model: nn.Module, data: Sequence[toy_models.Batch]) -> Tensor:
    """The Hessian of the sample-weighted mean loss, all rows at once."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    total = sum(len(y) for _, y in data)
    with sdpa_kernel(SDPBackend.MATH):
        losses = [toy_models.cross_entropy(model, b) * (len(b[1]) / total) for b in data]
    gradients = torch.autograd.grad(sum(losses), parameters, create_graph=True)
    gradient = torch.cat([g.reshape(-1) for g in gradients])
    rows = torch.autograd.grad(
        gradient, parameters, torch.eye(len(gradient)).to(gradient), is_grads_batched=True
    )
    return torch.cat([r.reshape(len(gradient), -1) for r in rows], dim=1)


@cache
def dense(name: str, *, is_training: bool = False) -> Tensor:
    """The Hessian of a small model on the default batches."""
    return dense_hessian(network(name, is_training=is_training), batches())


class Point(nn.Module):
    """A model whose only parameter is a vector."""

    def __init__(self, w: Tensor) -> None:
        super().__init__()
        self.w = nn.Parameter(w.clone())


def quadratic(hessian: Tensor, w: Tensor, *, offset: float = 0.0) -> Surface:
    """`f(w) = offset + w^T H w / 2`, in two batches that share it unequally."""

    def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
        assert isinstance(model, Point)
        return batch.mean() * (offset + model.w @ hessian @ model.w / 2)

    # Over the five samples the factors have mean 1.
    return Surface(Point(w), [torch.tensor([2.0, 0.5, 0.5]), torch.tensor([1.5, 0.5])], loss_fn)


def symmetric(eigenvalues: Sequence[float] | Tensor, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A matrix with these eigenvalues, and its eigenvectors as columns."""
    values = torch.as_tensor(eigenvalues, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    size = len(values)
    noise = torch.randn(size, size, dtype=torch.float64, generator=generator)
    vectors, _ = torch.linalg.qr(noise)
    return vectors @ torch.diag(values) @ vectors.T, vectors
