"""What a second pass must leave where the first left it: BatchNorm's statistics, and their like."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules import module
from torch.nn.parameter import is_lazy

from surrogap.core.copies import Copies, room_for
from surrogap.core.weights import Weights, are_same, contents


class Buffers:
    """The buffers of a model: BatchNorm's statistics, and whatever else a pass may move.

    Room for one copy of them is kept from step to step.
    """

    def __init__(self) -> None:
        self._tensors: list[Tensor | None] = []
        self._writable: list[Tensor] = []
        self._originals: list[Tensor] = []
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
        homes_before, copies, places = self._homes, self._copies, self._places
        writable, originals = self._writable, self._originals
        for some in copies:
            some.save()

        def put_back() -> None:
            # Some modules assign a new tensor instead of writing in place.
            if not are_same(contents(homes), before):
                for home in homes:
                    home.clear()
                for home, content in homes_before:
                    home.update(content)
            if _places(writable) != places:  # and some assign to its data
                for tensor, original in zip(writable, originals, strict=True):
                    tensor.data = original
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
        self._originals = [t.detach() for t in self._writable]
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

    Nested and quantised tensors, and views that conjugate or negate, are taken for constants.
    """
    if is_lazy(buffer) or buffer.layout is not torch.strided or buffer.is_nested:
        return False
    if buffer.is_quantized:
        return False
    if buffer.is_conj() or buffer.is_neg():
        return False
    pairs = zip(buffer.shape, buffer.stride(), strict=True)
    return all(stride > 0 for size, stride in pairs if size > 1)
