"""The loss of a batch, and its number of samples."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from surrogap.errors import InvalidTypeError

LossFn = Callable[[nn.Module, Any], Tensor]


def cross_entropy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The mean cross-entropy of a batch, the default loss of a `Surface`.

    Args:
        model: A classifier, which returns logits.
        batch: Images and labels, which are moved to the model's device.

    Raises:
        TypeError: The batch is not a pair.

    >>> import torch
    >>> cross_entropy(nn.Linear(2, 4), (torch.zeros(3, 2), torch.tensor([0, 1, 2]))).shape
    torch.Size([])
    """
    if not isinstance(batch, Sequence) or len(batch) != 2:
        raise InvalidTypeError(
            "batches must be a list or a DataLoader of pairs (images, labels), got a batch of type "
            f"{type(batch).__name__}. For other batches pass loss_fn=, a function of the model and "
            "a batch that returns the mean loss."
        )
    device = next(model.parameters()).device
    images, labels = (tensor.to(device, non_blocking=True) for tensor in batch)
    return nn.functional.cross_entropy(model(images), labels)


def num_samples_of(batch: Any) -> int:
    """The number of samples of a batch: the length of the first tensor in it.

    Raises:
        TypeError: The batch does not hold a tensor with a row for each sample.

    >>> import torch
    >>> num_samples_of({"images": torch.zeros(5, 3), "labels": torch.zeros(5)})
    5
    """
    first = _first_tensor(batch)
    if first is None or first.ndim == 0:
        raise InvalidTypeError(
            f"batch must hold a tensor with a row for each sample, got {type(batch).__name__} "
            "without one. Pass num_samples_of=, a function from a batch to its number of samples."
        )
    return len(first)


def _first_tensor(batch: Any) -> Tensor | None:
    if isinstance(batch, Tensor):
        return batch
    items = batch.values() if isinstance(batch, Mapping) else batch
    if not isinstance(items, Iterable) or isinstance(items, str):
        return None
    return next((found for item in items if (found := _first_tensor(item)) is not None), None)
