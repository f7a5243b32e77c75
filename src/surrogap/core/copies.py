"""Exact copies of many small tensors, filled and put back many times."""

from importlib.util import find_spec

import torch
from torch import Tensor


class Copies:
    """Room for a copy of each tensor, all on one device and of one dtype."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self._tensors = tensors
        self._copies = [torch.empty_like(tensor) for tensor in tensors]

    def save(self) -> None:
        """Copies what the tensors hold now."""
        torch._foreach_copy_(self._copies, self._tensors)

    def restore(self) -> None:
        """Puts back what they held at the last `save`."""
        torch._foreach_copy_(self._tensors, self._copies)


def room_for(tensors: list[Tensor]) -> Copies:
    """The fastest room for copies of these."""
    if tensors[0].device.type == "cuda" and find_spec("triton"):
        from surrogap.core.fused_copies import FusedCopies  # Triton takes a second to load

        if FusedCopies.takes(tensors):
            return FusedCopies(tensors)
    return Copies(tensors)
