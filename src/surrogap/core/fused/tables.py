"""Tables of addresses, and plans of work, for the kernels."""

from array import array
from collections.abc import Iterable
from functools import lru_cache
from itertools import accumulate, chain

import torch
from torch import Tensor

from surrogap.core.geometry import Kind

# 16 elements for each thread of a program; with 64, registers spill.
BLOCK = 4096
_NUM_ROWS = 5
# In elements: for any dtype at least the 16 bytes that a thread loads at once.
_ALIGNMENT = 16


@lru_cache(maxsize=16)
def plan(
    sizes: tuple[int, ...], kinds: tuple[Kind, ...], device: torch.device
) -> tuple[Tensor, int]:
    """Return the plan that `kernels` describes, for tensors of these sizes and kinds.

    Also return the number of elements of a flat copy of the tensors, which aligns each of them.
    """
    *firsts, total = accumulate((-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes), initial=0)
    blocks = [
        (index, start, size - start, first + start, int(kind))
        for index, (size, kind, first) in enumerate(zip(sizes, kinds, firsts, strict=True))
        for start in range(0, size, BLOCK)
    ]
    if not blocks:
        return torch.empty(_NUM_ROWS, 0, dtype=torch.int64, device=device), total
    rows = _on_device(chain(*zip(*blocks, strict=True)), device)
    return rows.view(_NUM_ROWS, len(blocks)), total


# The allocator mostly returns the same addresses in every step.
@lru_cache(maxsize=64)
def address_table(addresses: tuple[int, ...], device: torch.device) -> Tensor:
    """Return a table of these addresses."""
    return _on_device(addresses, device)


def _on_device(numbers: Iterable[int], device: torch.device) -> Tensor:
    # From pageable memory: the driver copies so few bytes immediately, so nothing waits.
    return torch.frombuffer(array("q", numbers), dtype=torch.int64).to(device, non_blocking=True)


class Tables:
    """The tables of a CUDA graph.

    Addresses become known during the capture, when nothing can be copied, so the tables are filled
    afterwards. They are allocated before the capture, because memory that the graph allocates may
    hold other tensors earlier in a replay.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self._memory = torch.empty(size, dtype=torch.int64, device=device)
        self._content: list[int] = []

    def add(self, addresses: tuple[int, ...]) -> Tensor:
        """Return the table that will hold these addresses."""
        start = len(self._content)
        # Pad to an even number: kernels rely on tables aligned to 16 bytes.
        self._content += (*addresses, *[0] * (len(addresses) % 2))
        return self._memory[start : start + len(addresses)]

    def fill(self) -> None:
        """Write all tables, after the capture."""
        self._memory[: len(self._content)].copy_(torch.tensor(self._content))
