"""What the passes share: the closure, the random numbers, the buffers."""

import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from surrogap.core.vectors import Layout, Vector, widened
from surrogap.core.weights import Weights

Closure = Callable[[], Tensor | tuple[Tensor, Any]]

_EXAMPLE = "Pass one such as lambda: loss_fn(model(x), y)."


class Passes:
    """Forward and backward passes over one batch.

    Args:
        closure: Runs the forward pass and returns the loss or `(loss, aux)`; or a list of such
            functions, whose losses are added.
        scaler: Multiplies the loss before its backward pass.
        backward: Called on the loss in place of `loss.backward()`.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: The list of closures is empty.
    """

    def __init__(
        self,
        closure: Closure | Sequence[Closure],
        scaler: GradScaler | None,
        backward: Callable[[Tensor], object] | None,
    ) -> None:
        self._is_single = callable(closure)
        closures = [closure] if callable(closure) else closure
        if not isinstance(closures, list | tuple) or not all(map(callable, closures)):
            raise TypeError(
                "closure must be a function that runs the forward pass and returns the loss, or a "
                f"list of them, got {type(closure).__name__}. {_EXAMPLE}"
            )
        if not closures:
            raise ValueError(f"closure must not be an empty list, got []. {_EXAMPLE}")
        if scaler is not None and not isinstance(scaler, GradScaler):
            raise TypeError(
                f"scaler must be a torch.amp.GradScaler, got {type(scaler).__name__}. "
                "Leave it out to train without loss scaling."
            )
        if backward is not None and not callable(backward):
            raise TypeError(
                f"backward must be a function of the loss, got {type(backward).__name__}. "
                "Leave it out to call loss.backward()."
            )
        self._closures: Sequence[Closure] = closures
        self._scaler = scaler
        self._backward = backward or Tensor.backward

    def run(self, weights: Weights) -> tuple[Tensor, Any]:
        """Adds the gradient of the loss to `.grad`.

        Returns:
            The loss, in at least float32 and unscaled, and aux.

        Raises:
            TypeError: A closure returned no tensor.
            RuntimeError: A closure returned a loss that is no real scalar or has no graph, or it
                called `backward`.
        """
        results = [self._run(closure, weights) for closure in self._closures]
        loss = torch.stack([loss for loss, _ in results]).sum()
        auxes = [aux for _, aux in results]
        return loss, auxes[0] if self._is_single else auxes

    def _run(self, closure: Closure, weights: Weights) -> tuple[Tensor, Any]:
        before = _marks(weights)
        with torch.enable_grad():
            result = closure()
            loss, aux = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
            _check_loss(loss)
            if _marks(weights) != before:
                raise RuntimeError(
                    "closure must not call backward, got one that changed .grad. "
                    "Return the loss; the objective calls backward itself, once per pass."
                )
            self._backward(loss if self._scaler is None else self._scaler.scale(loss))
        # A copy, since a model compiled to CUDA graphs reuses the memory of what it returns.
        return widened(loss.detach()).reshape(()).clone(), aux

    def scale(self, device: torch.device) -> Tensor | None:
        """By what the loss is multiplied, as a scalar on `device`; None without a scaler."""
        if self._scaler is None:
            return None
        return self._scaler.scale(torch.ones((), device=device))


def _marks(weights: Weights) -> list[tuple[int, int] | None]:
    """What changes when anything is added to `.grad`."""
    return [None if g is None else (id(g), g._version) for g in weights.gradients]


def _check_loss(loss: object) -> None:
    if not isinstance(loss, Tensor):
        raise TypeError(
            "closure must return the loss as a tensor, or (loss, aux), "
            f"got {type(loss).__name__}. {_EXAMPLE}"
        )
    if loss.numel() != 1 or not loss.is_floating_point():
        raise RuntimeError(
            f"closure must return a real scalar, got shape {tuple(loss.shape)} and dtype "
            f"{loss.dtype}. Reduce the loss with .mean() or .sum()."
        )
    if not loss.requires_grad:
        raise RuntimeError(
            "closure must return a loss with a graph, got one without. Compute it inside the "
            "closure, from the model's output, without detach(), item() or no_grad()."
        )


class RandomState:
    """The random numbers that come next: torch's, Python's and NumPy's global generators.

    A generator that the closure owns and passes on by hand is its own affair.

    Args:
        devices: Whose generators to include beside the CPU's.
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._devices = [device for device in devices if device.type != "cpu"]
        self._states = self._current()

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Draws the same numbers again in the body; afterwards the generators are as before it."""
        end = self._current()
        self._set(self._states)
        try:
            yield
        finally:
            self._set(end)

    def _current(self) -> list[Any]:
        states: list[Any] = [random.getstate(), torch.get_rng_state()]
        states += [
            torch.get_device_module(device).get_rng_state(*_which(device))
            for device in self._devices
        ]
        if numpy_random := sys.modules.get("numpy.random"):
            states.append(numpy_random.get_state())
        return states

    def _set(self, states: Sequence[Any]) -> None:
        python, cpu, *rest = states
        random.setstate(python)
        torch.set_rng_state(cpu)
        for device, state in zip(self._devices, rest, strict=False):
            torch.get_device_module(device).set_rng_state(state, *_which(device))
        if len(rest) > len(self._devices):
            sys.modules["numpy.random"].set_state(rest[-1])


def _which(device: torch.device) -> tuple[torch.device, ...]:
    # torch.mps has a single generator, and its functions take no device.
    return () if device.type == "mps" else (device,)


class Buffers:
    """The buffers of `model`: BatchNorm's statistics, and whatever else a forward pass may move."""

    def __init__(self, model: nn.Module) -> None:
        self._homes = [
            (module._buffers, name)
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]

    @contextmanager
    def kept(self, *, on_error_only: bool = False) -> Iterator[None]:
        """Whatever the body does to the buffers is undone after it, or only where it raises."""
        tensors = [home[name] for home, name in self._homes]
        writable = [t for t in tensors if t is not None and _is_writable(t)]
        copy = Vector(Layout(writable)).read_(writable)

        def put_back() -> None:
            # The tensor itself too: some modules assign a new one instead of writing in place.
            for (home, name), tensor in zip(self._homes, tensors, strict=True):
                home[name] = tensor
            copy.write_to_(writable)

        try:
            yield
        except BaseException:
            put_back()
            raise
        if not on_error_only:
            put_back()


def _is_writable(buffer: Tensor) -> bool:
    """Whether a forward pass could write into it: not so if it repeats itself in memory."""
    return buffer.layout is torch.strided and all(
        stride != 0 or size <= 1 for size, stride in zip(buffer.shape, buffer.stride(), strict=True)
    )
