"""The random state of a step: both passes draw the same random numbers."""

import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache, partial
from typing import Any, NamedTuple, Protocol

import torch


class Generator(NamedTuple):
    """A random generator, by the functions that read and write its state."""

    get: Callable[[], Any]
    set: Callable[[Any], object]


class Replayable(Protocol):
    """Random numbers that can be drawn again."""

    def replayed(self) -> AbstractContextManager[None]:
        """Context in which the same numbers are drawn again; restores the generators."""


class RandomState:
    """The current state of global generators.

    Args:
        devices: The devices whose generators to include, in addition to the CPU's.
        others: Further generators.
    """

    def __init__(self, devices: Iterable[torch.device], others: Iterable[Generator] = ()) -> None:
        self._generators = [_CPU, *others]
        self._generators += [_of_device(device) for device in devices if device.type != "cpu"]
        self._states = [generator.get() for generator in self._generators]

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """See `Replayable`."""
        end = [generator.get() for generator in self._generators]
        self._set(self._states)
        try:
            yield
        finally:
            self._set(end)

    def _set(self, states: Sequence[Any]) -> None:
        for generator, state in zip(self._generators, states, strict=True):
            generator.set(state)


_CPU = Generator(torch.default_generator.get_state, torch.default_generator.set_state)


def host_generators() -> list[Generator]:
    """Return the global generators of Python and, if it is loaded, NumPy.

    To read and write their states twice takes 0.1 and 0.7 ms, so later steps include only those
    that the closure draws from in the first call.
    """
    found = [Generator(random.getstate, random.setstate)]
    if (numpy := sys.modules.get("numpy")) is not None:
        found.append(Generator(numpy.random.get_state, numpy.random.set_state))
    return found


@lru_cache
def _of_device(device: torch.device) -> Generator:
    module = torch.get_device_module(device)
    if device.type == "mps":  # a single generator, whose functions take no device
        return Generator(module.get_rng_state, module.set_rng_state)
    if device.type == "cuda":  # a shortcut for the functions below
        generator = torch.cuda.default_generators[device.index]
        return Generator(generator.get_state, generator.set_state)
    return Generator(
        partial(module.get_rng_state, device), partial(module.set_rng_state, device=device)
    )
