"""The random state of a step: both passes draw the same random numbers."""

import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache, partial
from typing import Any, NamedTuple, Protocol

import torch


class Generator(NamedTuple):
    """A random generator, as the functions that read and write its state."""

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
    """Return the global generators of Python and, if it is imported, NumPy.

    Reading and writing their states twice takes 0.02 and 0.1 ms, so later steps include only those
    that the closure draws from in the first call.
    """
    return [_PYTHON, _NUMPY] if "numpy" in sys.modules else [_PYTHON]


# Functions, not the methods of the generators: a copy of an objective would copy those too.
def _python_state() -> Any:
    return random.getstate()


def _set_python_state(state: Any) -> None:
    random.setstate(state)


def _numpy_state() -> Any:
    return sys.modules["numpy"].random.get_state(legacy=False)


def _set_numpy_state(state: Any) -> None:
    sys.modules["numpy"].random.set_state(state)


_PYTHON = Generator(_python_state, _set_python_state)
_NUMPY = Generator(_numpy_state, _set_numpy_state)


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
