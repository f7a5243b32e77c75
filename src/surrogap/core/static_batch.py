"""The static batch of a captured step: the memory from which its graph reads every batch."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from surrogap.core.passes import Closure, Passes
from surrogap.core.random_state import RandomStates
from surrogap.errors import InvalidValueError

# From the tensors of a batch to the loss, or `(loss, aux)`.
BatchLoss: TypeAlias = Callable[..., Tensor | tuple[Tensor, Any]]


class StaticBatch:
    """A batch in fixed memory, and the closures of a step on it.

    Args:
        example: A batch with the shapes and dtypes of every batch.
        device: The device of the model.
        loss_fn: The loss of a batch.
        micro_batches: The number of micro-batches to split it into.
        shares_perturbation: Whether one call of the objective takes all micro-batches.
        climb_fraction: The fraction of the rows that the first pass runs on.

    Attributes:
        num_calls: The number of calls of the objective in a step.
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
        self.num_calls = 1 if shares_perturbation else micro_batches
        self._tensors = [tensor.to(device, copy=True) for tensor in example]
        self._loss_fn = loss_fn
        self._micro_batches = micro_batches
        self.climbs_on_part = climb_fraction < 1.0
        self._climb_fraction = climb_fraction

    def check(self, batch: Sequence[Tensor]) -> None:
        """Check that a batch has the shapes and dtypes of the example.

        Raises:
            ValueError: The batch differs.
        """
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

    def passes(self, random_state: RandomStates) -> list[Passes]:
        """Return the passes of each call of the objective."""
        make = partial(Passes, name="loss_fn", random_state=random_state)
        climb = self._climb_closure()
        first = None if climb is None else make(climb)
        return [make(closure, first=first) for closure in self._closures()]

    def _closures(self) -> list[Closure | list[Closure]]:
        if self._micro_batches == 1:
            return [partial(self._loss_fn, *self._tensors)]
        chunks = zip(*(t.chunk(self._micro_batches) for t in self._tensors), strict=True)
        closures: list[Closure] = [partial(self._divided_loss, *chunk) for chunk in chunks]
        return [closures] if self.num_calls == 1 else list(closures)

    def _divided_loss(self, *chunk: Tensor) -> tuple[Tensor, Any]:
        result = self._loss_fn(*chunk)
        loss, aux = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
        # If the loss is not a tensor, the objective refuses it.
        return loss / self._micro_batches if isinstance(loss, Tensor) else loss, aux

    def _climb_closure(self) -> Closure | None:
        if not self.climbs_on_part:
            return None
        sizes = (max(1, round(self._climb_fraction * len(tensor))) for tensor in self._tensors)
        return partial(self._loss_fn, *(t[:n] for t, n in zip(self._tensors, sizes, strict=True)))


def _format(tensor: object) -> object:
    if not isinstance(tensor, Tensor):
        return type(tensor).__name__
    return tuple(tensor.shape), tensor.dtype
