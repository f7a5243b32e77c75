"""Toy models, batches and losses, and their gradients."""

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

from surrogap.core.objective import Objective

Batch = tuple[Tensor, Tensor]


def mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(48, 16), nn.Tanh(), nn.Linear(16, 3))


def convnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 5, 3),
        nn.BatchNorm2d(5),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(5, 3),
    )


class Attention(nn.Module):
    """A transformer block with pixels as tokens, a zero-dimensional and a tied parameter."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 8, bias=False)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=dropout, batch_first=True)
        self.unembed = nn.Linear(8, 3)
        self.temperature = nn.Parameter(torch.tensor(1.3))
        self.mirror = nn.Linear(3, 8, bias=False)
        self.mirror.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(2).transpose(1, 2)
        mixed = self.block(self.embed(tokens) + self.mirror(tokens.flip(1)))
        return self.unembed(mixed.mean(1)) * self.temperature


class Followed(nn.Module):
    """A model and a frozen one that follows it in each forward pass, like a momentum encoder."""

    def __init__(self, assigns: bool = False) -> None:
        super().__init__()
        self.first, self.second = mlp(), mlp().requires_grad_(False)
        self._assigns = assigns

    def forward(self, x: Tensor) -> Tensor:
        for mine, its in zip(self.second.parameters(), self.first.parameters(), strict=True):
            if self._assigns:
                mine.data = mine.lerp(its.detach(), 0.125)
            else:
                mine.lerp_(its.detach(), 0.125)
        return self.first(x) + self.second(x)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": mlp,
    "convnet": convnet,
    "attention": Attention,
}


def batch(size: int = 8, *, device: torch.device | str = "cpu", seed: int = 1) -> Batch:
    """Images of shape 3 x 4 x 4 in float64, and labels."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, 3, 4, 4, generator=generator, dtype=torch.float64)
    y = torch.randint(3, (size,), generator=generator)
    return x.to(device), y.to(device)


def cross_entropy(model: Callable[[Tensor], Tensor], data: Batch) -> Tensor:
    x, y = data
    return nn.functional.cross_entropy(model(x), y)


def closure_of(model: nn.Module, data: Batch) -> Callable[[], Tensor]:
    """The loss of `model` on `data`, in the dtype of the model."""
    x = data[0].to(next(model.parameters()).dtype)
    return lambda: cross_entropy(model, (x, data[1]))


def flat_grad(model: nn.Module) -> Tensor:
    """`.grad` of the trainable parameters as one vector, with zeros for None."""
    return torch.cat(
        [
            (torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1).cpu()
            for p in model.parameters()
            if p.requires_grad
        ]
    ).detach()


def direction(make: Callable[[nn.Module], Objective], model: nn.Module, data: Batch) -> Tensor:
    """The direction that an objective adds to the empty `.grad` of a copy of `model`."""
    model = copy.deepcopy(model)
    make(model).backward(closure_of(model, data))
    return flat_grad(model)
