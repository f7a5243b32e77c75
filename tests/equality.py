"""Equality of tensors: bit for bit, or up to a relative error."""

import torch
from torch import Tensor, nn


def bits(model: nn.Module) -> list[Tensor]:
    """Copies of the weights and buffers of `model`."""
    return [tensor.detach().clone() for tensor in (*model.parameters(), *model.buffers())]


def same_bits(before: list[Tensor], after: list[Tensor]) -> bool:
    """Return whether two lists hold the same bytes: NaN equals NaN, but 0.0 differs from -0.0."""
    return not differing(before, after)


def differing(before: list[Tensor], after: list[Tensor]) -> dict[int, tuple[Tensor, Tensor]]:
    """The tensors whose bytes differ between two lists, by their index."""
    return {
        index: (a, b)
        for index, (a, b) in enumerate(zip(before, after, strict=True))
        if a.dtype != b.dtype or not torch.equal(_bytes(a), _bytes(b))
    }


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    actual, expected = actual.double().cpu(), expected.double().cpu()
    return float((actual - expected).norm() / expected.norm())
