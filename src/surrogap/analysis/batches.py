"""What is asked of batches: their loss, and how many samples they hold."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from surrogap.errors import InvalidTypeError

LossFn = Callable[[nn.Module, Any], Tensor]


def cross_entropy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The mean cross-entropy of a batch of images and labels, moved to where the model is.

    >>> import torch
    >>> cross_entropy(nn.Linear(2, 4), (torch.zeros(3, 2), torch.tensor([0, 1, 2]))).shape
    torch.Size([])
    """
    device = next(model.parameters()).device
    images, labels = (part.to(device, non_blocking=True) for part in batch)
    return nn.functional.cross_entropy(model(images), labels)


def num_samples_of(batch: Any) -> int:
    """How many samples a batch has: the length of the first tensor in it.

    Raises:
        TypeError: There is none.

    >>> import torch
    >>> num_samples_of({"images": torch.zeros(5, 3), "labels": torch.zeros(5)})
    5
    """
    first = _first_tensor(batch)
    if first is None or first.ndim == 0:
        raise InvalidTypeError(
            f"batch must hold a tensor with a row for each sample, got {type(batch).__name__} "
            "without. Pass num_samples_of=, a function from a batch to its number of samples."
        )
    return len(first)


def _first_tensor(batch: Any) -> Tensor | None:
    if isinstance(batch, Tensor):
        return batch
    parts = batch.values() if isinstance(batch, Mapping) else batch
    if not isinstance(parts, Iterable) or isinstance(parts, str):
        return None
    return next((found for part in parts if (found := _first_tensor(part)) is not None), None)
