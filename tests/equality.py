"""Equality of tensors: bit for bit, or by their relative error."""

import torch
from torch import Tensor, nn


def bits(model: nn.Module) -> list[Tensor]:
    """The weights and buffers of `model`, as copies."""
    return [tensor.detach().clone() for tensor in (*model.parameters(), *model.buffers())]


def same_bits(before: list[Tensor], after: list[Tensor]) -> bool:
    """Whether two lists hold the same bytes: NaN equals NaN, and 0.0 is not -0.0."""
    return not differing(before, after)


def differing(before: list[Tensor], after: list[Tensor]) -> dict[int, tuple[Tensor, Tensor]]:
    """The tensors in two lists that do not hold the same bytes, by their index."""
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
