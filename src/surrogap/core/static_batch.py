"""The static batch of a captured step: the memory from which its graph reads every batch."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from surrogap.core.passes import Closure, Passes
from surrogap.errors import InvalidValueError

# From the tensors of a batch to the loss, or `(loss, aux)`.
BatchLoss: TypeAlias = Callable[..., Tensor | tuple[Tensor, Any]]


class StaticBatch:
    """A batch in fixed memory, and the closures of a step on it.

    `capture` documents the arguments.

    Attributes:
        calls: The passes of each call to the objective in a step.
        climbs_on_part: Whether the first pass runs on fewer rows.
    """

    def __init__(
        self,
        example: Sequence[Tensor],
        device: torch.device,
        loss_fn: BatchLoss,
        *,
        micro_batches: int,
        shares_perturbation: bool,
        climb_fraction: float,
    ) -> None:
        self._tensors = [tensor.to(device, copy=True) for tensor in example]
        self.climbs_on_part = climb_fraction < 1.0
        first = None
        if self.climbs_on_part:
            rows = [t[: max(1, round(climb_fraction * len(t)))] for t in self._tensors]
            first = Passes(partial(loss_fn, *rows), name="loss_fn")
        calls: Sequence[Closure | Sequence[Closure]] = [partial(loss_fn, *self._tensors)]
        if micro_batches > 1:
            divided = partial(_divided, loss_fn, micro_batches)
            chunks = zip(*(t.chunk(micro_batches) for t in self._tensors), strict=True)
            closures = [partial(divided, *chunk) for chunk in chunks]
            calls = [closures] if shares_perturbation else closures
        self.calls = [Passes(call, first=first, name="loss_fn") for call in calls]

    def check(self, batch: Sequence[Tensor]) -> None:
        """Check that a batch has the shapes and dtypes of the example."""
        mine, theirs = list(map(_format, self._tensors)), list(map(_format, batch))
        if mine != theirs:
            raise InvalidValueError(
                f"batch must have the shapes and dtypes of the example, {mine}, got {theirs}. Drop "
                "the last batch of an epoch if it is smaller, or use objective.backward for it."
            )

    def copy_(self, batch: Sequence[Tensor]) -> None:
        """Copy a batch into the static memory."""
        for static, tensor in zip(self._tensors, batch, strict=True):
            static.copy_(tensor, non_blocking=True)


def _divided(loss_fn: BatchLoss, divisor: int, *batch: Tensor) -> tuple[Tensor, Any]:
    result = loss_fn(*batch)
    loss, aux = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
    # If the loss is not a tensor, the objective rejects it.
    return loss / divisor if isinstance(loss, Tensor) else loss, aux


def _format(tensor: object) -> object:
    if not isinstance(tensor, Tensor):
        return type(tensor).__name__
    return tuple(tensor.shape), tensor.dtype
