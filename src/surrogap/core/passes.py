"""What the passes share: the closure, the random numbers, the buffers."""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache, partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.modules import module
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from surrogap.core.copies import Copies, room_for
from surrogap.core.vectors import are_any, wide
from surrogap.core.weights import Weights, are_same, contents

Closure = Callable[[], Tensor | tuple[Tensor, Any]]

_EXAMPLE = "Pass one such as lambda: loss_fn(model(x), y)."


class Passes:
    """Forward and backward passes over one batch.

    Args:
        closure: Runs the forward pass and returns the loss or `(loss, aux)`; or a list of such
            functions, whose losses are added.
        scaler: Multiplies the loss before its backward pass.
        backward: Called on the loss in place of `loss.backward()`.
        random_state: Gives the random numbers that come next on some devices.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: The list of closures is empty.
    """

    def __init__(
        self,
        closure: Closure | Sequence[Closure],
        scaler: GradScaler | None = None,
        backward: Callable[[Tensor], object] | None = None,
        random_state: "Callable[[Iterable[torch.device]], Replayable] | None" = None,
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
        self.random_state = random_state or RandomState

    def run(self, weights: Weights) -> tuple[Tensor, Any]:
        """Adds the gradient of the loss to `.grad`.

        Returns:
            The loss, in at least float32 and unscaled, and aux.

        Raises:
            TypeError: A closure returned no tensor.
            RuntimeError: A closure returned a loss that is no real scalar or has no graph, or it
                called `backward`.
        """
        results = [
            self._run(closure, weights, index) for index, closure in enumerate(self._closures)
        ]
        loss = sum((loss for loss, _ in results[1:]), start=results[0][0])
        auxes = [aux for _, aux in results]
        return loss, auxes[0] if self._is_single else auxes

    def _run(self, closure: Closure, weights: Weights, index: int) -> tuple[Tensor, Any]:
        versions = _versions(weights) if index else []  # before the first there are no gradients
        # Around the whole call there may be an autocast or a `parametrize.cached`. What an earlier
        # pass made of the weights would stand in for the weights of this one.
        torch.clear_autocast_cache()
        parametrize._cache.clear()
        with torch.enable_grad():
            result = closure()
            loss, aux = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
            _check_loss(loss)
            if _versions(weights) != versions:
                raise RuntimeError(
                    "closure must not call backward, got one that changed .grad. "
                    "Return the loss; the objective calls backward itself, once per pass."
                )
            self._backward(loss if self._scaler is None else self._scaler.scale(loss))
        # A copy, since a model compiled to CUDA graphs reuses the memory of what it returns; by a
        # kernel, since copies of memory were slow to launch in a profile.
        copy = loss.detach().to(wide(loss.dtype)) * 1
        return copy if copy.ndim == 0 else copy.reshape(()), aux

    def scale(self, device: torch.device) -> Tensor | None:
        """By what the loss is multiplied, as a scalar on `device`; None without a scaler."""
        if self._scaler is None:
            return None
        return self._scaler.scale(torch.ones((), dtype=torch.float32, device=device))


def _versions(weights: Weights) -> list[int | None]:
    """What changes when anything is added to `.grad`; empty if there is nothing."""
    gradients = weights.gradients
    if not are_any(gradients):
        return []
    return [None if gradient is None else gradient._version for gradient in gradients]


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


class Replayable(Protocol):
    """Random numbers that can be drawn twice."""

    def replayed(self) -> AbstractContextManager[None]:
        """Draws the same numbers again in the body; afterwards the generators are as before it."""


class RandomState:
    """The random numbers that come next from torch's global generators.

    Not from those of Python and NumPy, whose states would take 0.1 and 0.4 ms a step to read and
    write; nor from a generator that the closure owns and passes on by hand.

    Args:
        devices: Whose generators to include beside the CPU's.
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._generators = [_CPU]
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


class _Generator(NamedTuple):
    get: Callable[[], Any]
    set: Callable[[Any], object]


_CPU = _Generator(torch.default_generator.get_state, torch.default_generator.set_state)


@lru_cache
def _of_device(device: torch.device) -> _Generator:
    module = torch.get_device_module(device)
    if device.type == "mps":  # a single generator, whose functions take no device
        return _Generator(module.get_rng_state, module.set_rng_state)
    if device.type == "cuda":  # as below, without the detours
        generator = torch.cuda.default_generators[device.index]
        return _Generator(generator.get_state, generator.set_state)
    return _Generator(
        partial(module.get_rng_state, device), partial(module.set_rng_state, device=device)
    )


class Buffers:
    """The buffers of a model: BatchNorm's statistics, and whatever else a pass may move.

    Room for one copy of them is kept from step to step.
    """

    def __init__(self) -> None:
        self._tensors: list[Tensor | None] = []
        self._writable: list[Tensor] = []
        self._places: list[int] = []
        self._homes: list[tuple[dict[str, Tensor | None], dict[str, Tensor | None]]] = []
        self._copies: list[Copies] = []

    @contextmanager
    def kept(
        self, homes: list[dict[str, Tensor | None]], *, on_error_only: bool = False
    ) -> Iterator[None]:
        """Whatever the body does to the buffers is undone after it, or only where it raises.

        Args:
            homes: The dictionaries in which the modules hold them.
            on_error_only: Whether it stays done after a body that does not raise.
        """
        before = contents(homes)
        if not (are_same(before, self._tensors) and _places(self._writable) == self._places):
            self._make_room(homes, before)
        homes_before, copies = self._homes, self._copies
        for some in copies:
            some.save()

        def put_back() -> None:
            # Some modules assign a new tensor instead of writing in place.
            if not are_same(contents(homes), before):
                for home in homes:
                    home.clear()
                for home, content in homes_before:
                    home.update(content)
            for some in copies:
                some.restore()

        try:
            yield
        except BaseException:
            put_back()
            raise
        if not on_error_only:
            put_back()

    def _make_room(
        self, homes: list[dict[str, Tensor | None]], tensors: list[Tensor | None]
    ) -> None:
        # A lazy buffer takes shape in a first pass, and must be looked at again after it.
        self._tensors = [] if any(t is not None and is_lazy(t) for t in tensors) else tensors
        self._homes = [(home, home.copy()) for home in homes if home]
        self._writable = [t for t in tensors if t is not None and _is_writable(t)]
        self._places = _places(self._writable)
        groups: dict[object, list[Tensor]] = {}
        for words in map(_words, self._writable):
            groups.setdefault((words.device, words.dtype), []).append(words)
        self._copies = [room_for(group) for group in groups.values()]


@contextmanager
def traceless(weights: Weights, buffers: Buffers) -> Iterator[None]:
    """Passes in the body leave buffers and frozen parameters as the first pass left them.

    torch's norms are told to track nothing. To track, to copy and to put back are kernels, for
    whose launch an eager step of a small network waits. Not where anything is compiled, which would
    be compiled again for modules told otherwise.

    Something else may write to their statistics. Whether they stay is looked at once, and they are
    copied as well if they did not, or if a norm runs code that is not its class's.

    Args:
        weights: The model.
        buffers: Room to copy into what a pass may move still.
    """
    norms = [] if _has_compiled() else weights.norms
    are_sure = norms and weights.do_norms_obey and not _are_altered(norms)
    may_move = weights.other_buffers if are_sure else weights.buffers
    with _kept(weights.written()), buffers.kept(may_move), _untracked(norms):
        if not norms or weights.do_norms_obey is not None:
            yield
            return
        before = list(map(Tensor.clone, _statistics(norms)))
        yield
        weights.do_norms_obey = all(map(torch.equal, before, _statistics(norms)))


def _statistics(norms: Sequence[nn.Module]) -> list[Tensor]:
    return [tensor for norm in norms for tensor in norm._buffers.values() if tensor is not None]


def _are_altered(norms: Sequence[nn.Module]) -> bool:
    """Whether a forward pass runs code that is not its class's, and may do anything."""
    if module._global_forward_pre_hooks or module._global_forward_hooks:
        return True
    own = [norm.__dict__ for norm in norms]
    return any(d["_forward_pre_hooks"] or d["_forward_hooks"] or "forward" in d for d in own)


@contextmanager
def _kept(tensors: list[Tensor]) -> Iterator[None]:
    copies = list(map(Tensor.clone, tensors))
    try:
        yield
    finally:
        for tensor, copied in zip(tensors, copies, strict=True):
            tensor.copy_(copied)


@contextmanager
def _untracked(norms: Sequence[nn.Module]) -> Iterator[None]:
    tracking = [norm for norm in norms if norm.track_running_stats]
    try:
        _track(tracking, False)
        yield
    finally:
        try:
            _track(tracking, True)
        except BaseException:  # Ctrl-C may strike here too
            _track(tracking, True)
            raise


def _track(norms: Sequence[nn.Module], value: bool) -> None:
    for norm in norms:
        norm.__dict__["track_running_stats"] = value  # without the detours of nn.Module


def _has_compiled() -> bool:
    """Whether torch.compile has compiled anything since the process began or it was reset."""
    dynamo = sys.modules.get("torch._dynamo.convert_frame")
    return dynamo is not None and getattr(dynamo, "FRAME_COUNTER", 1) > 0


def _places(tensors: Sequence[Tensor]) -> list[int]:
    """Where tensors lie, and how far they reach."""
    return [*map(Tensor.data_ptr, tensors), *map(Tensor.numel, tensors)]


def _words(tensor: Tensor) -> Tensor:
    """A view as 32-bit words where that is possible: one copy then serves all dtypes."""
    if tensor.is_contiguous() and tensor.element_size() % 4 == 0:
        return tensor.detach().view(-1).view(torch.int32)
    return tensor


def _is_writable(buffer: Tensor) -> bool:
    """Whether a forward pass could write into it: not so if it repeats itself in memory.

    Nested tensors, and views that conjugate or negate, are taken for constants.
    """
    if is_lazy(buffer) or buffer.layout is not torch.strided or buffer.is_nested:
        return False
    if buffer.is_conj() or buffer.is_neg():
        return False
    pairs = zip(buffer.shape, buffer.stride(), strict=True)
    return all(stride > 0 for size, stride in pairs if size > 1)
