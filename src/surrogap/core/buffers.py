"""Buffers during a step: BatchNorm's statistics, and all others that a pass may write to.

Frozen parameters that a pass has written to count as buffers here.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from surrogap.core.vectors import groups_of
from surrogap.core.weights import Dictionaries, are_same, contents


class Buffers:
    """A copy of a model's buffers, in memory that is reused from step to step."""

    def __init__(self) -> None:
        self._tensors: list[Tensor | None] = []
        self._places: list[tuple[Tensor, Tensor]] = []
        self._dictionaries: list[tuple[dict[str, Tensor | None], dict[str, Tensor | None]]] = []
        self._groups: list[tuple[list[Tensor], list[Tensor]]] = []

    @contextmanager
    def kept(self, dictionaries: Dictionaries, *, on_error_only: bool = False) -> Iterator[None]:
        """Context manager that restores buffers on exit; with `on_error_only` only after errors."""
        before = contents(dictionaries)
        if not are_same(before, self._tensors) or moved(self._places):
            self._allocate(dictionaries, before)
        for tensors, copies in self._groups:
            torch._foreach_copy_(copies, tensors)
        try:
            yield
        except BaseException:
            self.restore(dictionaries)
            raise
        if not on_error_only:
            self.restore(dictionaries)

    def restore(
        self, dictionaries: Dictionaries, *, caches: Iterable[set[str]] | None = None
    ) -> None:
        """Restore buffers to their last copy.

        Args:
            dictionaries: The dictionaries of the buffers.
            caches: Names of buffers. If given, do not restore buffers that were added, were
                replaced by ones of another shape, or were replaced and are named here. They are
                caches, of masks or of the frequencies of position embeddings, and Python attributes
                may hold their sizes.
        """
        # Some modules assign a new tensor instead of writing in place.
        if not are_same(contents(dictionaries), self._tensors):
            names = set().union(*(caches or ()))
            contents_before = {id(d): content for d, content in self._dictionaries}
            for dictionary in dictionaries:
                before = contents_before.get(id(dictionary), {})
                now = () if caches is None else dictionary.items()
                kept = {k: b for k, b in now if _is_cache(b, before.get(k), k in names)}
                dictionary.clear()
                dictionary.update(before | kept)
        for tensor, place in moved(self._places):
            tensor.data = place
        for tensors, copies in self._groups:
            # A graph from before the call stays valid, unless a pass has written to its buffers.
            with _unsafe_preserve_version_counter(tuple(tensors)):
                torch._foreach_copy_(tensors, copies)

    def _allocate(self, dictionaries: Dictionaries, tensors: list[Tensor | None]) -> None:
        self._tensors = tensors
        self._dictionaries = [(d, d.copy()) for d in dictionaries if d]
        self._places = places_of(t for t in tensors if t is not None and _is_writable(t))
        words = [_words(place) for _, place in self._places]
        groups = [[words[index] for index in group] for group in groups_of(words)]
        self._groups = [(group, list(map(torch.empty_like, group))) for group in groups]


def places_of(tensors: Iterable[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Return pairs of a tensor and its memory."""
    return [(tensor, tensor.detach()) for tensor in tensors]


def moved(places: list[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """Return the pairs whose tensor has other memory now: `.data` was assigned, or it was resized.

    `resize_` moves the memory of both, so the sizes are compared too.
    """
    return [
        (tensor, place)
        for tensor, place in places
        if tensor.data_ptr() != place.data_ptr() or tensor.numel() != place.numel()
    ]


def _is_cache(buffer: Tensor | None, before: Tensor | None, is_named: bool) -> bool:
    if buffer is None or buffer is before:
        return False
    return is_named or before is None or before.shape != buffer.shape


def _words(tensor: Tensor) -> Tensor:
    """Return a view as 32-bit words if possible, to copy buffers of several dtypes at once."""
    if tensor.is_contiguous() and tensor.element_size() % 4 == 0:
        return tensor.view(-1).view(torch.int32)
    return tensor


def _is_writable(buffer: Tensor) -> bool:
    """Return whether a forward pass could write to a buffer: not if elements share memory.

    Inference tensors cannot be written to either. Sparse, nested and quantised tensors, and
    conjugate or negative views, are treated as constants.
    """
    if buffer.layout is not torch.strided or buffer.is_inference():
        return False
    if buffer.is_nested or buffer.is_quantized:
        return False
    pairs = zip(buffer.shape, buffer.stride(), strict=True)
    is_apart = all(stride > 0 for size, stride in pairs if size > 1)
    return is_apart and not buffer.is_conj() and not buffer.is_neg()
