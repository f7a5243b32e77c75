"""Kernel launches: compile once, and launch on the model's device."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

_WARPS = 8
_PROGRAMS_PER_PROCESSOR = 4


class Kernel:
    """A kernel that the first call compiles, and every later call launches directly.

    So every call needs arguments of the same types, with equal integers, on the same device.
    Triton's own lookup of the compiled kernel takes longer than the launch.
    """

    def __init__(self, kernel: Any, device: torch.device) -> None:
        self._kernel = kernel
        self._num_programs = num_programs(device)
        self._launch: Callable[..., object] | None = None

    def __call__(self, *arguments: object) -> None:
        """Launch it on the current device."""
        if self._launch is not None:
            # Pass addresses: for a tensor, Triton would query the driver.
            self._launch(*[a.data_ptr() if isinstance(a, Tensor) else a for a in arguments])
            return
        built = self._kernel[(self._num_programs,)](
            *arguments, num_warps=_WARPS, enable_fp_fusion=True
        )
        if built is not None:  # Triton's interpreter does not compile
            self._launch = built[(self._num_programs, 1, 1)]


@lru_cache
def num_programs(device: torch.device) -> int:
    """Return the number of programs that share a kernel's work."""
    if device.type != "cuda":
        return 3
    return _PROGRAMS_PER_PROCESSOR * torch.cuda.get_device_properties(device).multi_processor_count


def on(device: torch.device) -> AbstractContextManager[object]:
    """Context for launches: Triton uses the current device, which may not be the model's."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)
