"""Buffers during a step: BatchNorm's statistics, and all others that a pass may write to.

Frozen parameters that a pass has written to count as buffers here.
"""

from collections.abc import Iterator, Sequence
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
        self._writable: list[Tensor] = []
        self._originals: list[Tensor] = []
        self._addresses: list[int] = []
        self._dictionaries: list[tuple[dict[str, Tensor | None], dict[str, Tensor | None]]] = []
        self._groups: list[tuple[list[Tensor], list[Tensor]]] = []

    @contextmanager
    def kept(self, dictionaries: Dictionaries, *, on_error_only: bool = False) -> Iterator[None]:
        """Context manager that restores buffers on exit; with `on_error_only` only after errors."""
        before = contents(dictionaries)
        if not (are_same(before, self._tensors) and _addresses(self._writable) == self._addresses):
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

    def restore(self, dictionaries: Dictionaries, *, except_caches: bool = False) -> None:
        """Restore buffers to their last copy.

        Args:
            dictionaries: The dictionaries of the buffers.
            except_caches: Whether to leave buffers that were added, or replaced by ones of another
                shape. They are caches of masks, for example, and Python attributes may hold their
                sizes.
        """
        # Some modules assign a new tensor instead of writing in place.
        if not are_same(contents(dictionaries), self._tensors):
            contents_before = {id(d): content for d, content in self._dictionaries}
            for dictionary in dictionaries:
                before = contents_before.get(id(dictionary), {})
                now = dictionary.items() if except_caches else ()
                caches = {name: b for name, b in now if _is_new(b, before.get(name))}
                dictionary.clear()
                dictionary.update(before | caches)
        if _addresses(self._writable) != self._addresses:  # some assign to `buffer.data`
            for tensor, original in zip(self._writable, self._originals, strict=True):
                tensor.data = original
        for tensors, copies in self._groups:
            # A graph from before the call stays valid, unless a pass has written to its buffers.
            with _unsafe_preserve_version_counter(tuple(tensors)):
                torch._foreach_copy_(tensors, copies)

    def _allocate(self, dictionaries: Dictionaries, tensors: list[Tensor | None]) -> None:
        self._tensors = tensors
        self._dictionaries = [(d, d.copy()) for d in dictionaries if d]
        self._writable = [t for t in tensors if t is not None and _is_writable(t)]
        self._originals = [t.detach() for t in self._writable]
        self._addresses = _addresses(self._writable)
        words = list(map(_words, self._writable))
        groups = [[words[index] for index in group] for group in groups_of(words)]
        self._groups = [(group, list(map(torch.empty_like, group))) for group in groups]


def _is_new(buffer: Tensor | None, before: Tensor | None) -> bool:
    return buffer is not None and (before is None or before.shape != buffer.shape)


def _addresses(tensors: Sequence[Tensor]) -> list[int]:
    """Return the addresses and sizes of tensors."""
    return [*map(Tensor.data_ptr, tensors), *map(Tensor.numel, tensors)]


def _words(tensor: Tensor) -> Tensor:
    """Return a view as 32-bit words if possible, to copy buffers of several dtypes at once."""
    if tensor.is_contiguous() and tensor.element_size() % 4 == 0:
        return tensor.detach().view(-1).view(torch.int32)
    return tensor.detach()


def _is_writable(buffer: Tensor) -> bool:
    """Return whether a forward pass could write to a buffer: not if elements share memory.

    Inference tensors cannot be written to either. Nested and quantised tensors, and conjugate or
    negative views, are treated as constants.
    """
    if buffer.layout is not torch.strided or buffer.is_nested or buffer.is_quantized:
        return False
    if buffer.is_inference():
        return False
    pairs = zip(buffer.shape, buffer.stride(), strict=True)
    is_apart = all(stride > 0 for size, stride in pairs if size > 1)
    return is_apart and not buffer.is_conj() and not buffer.is_neg()
