"""Closures whose side effects happen once, in the first of several passes."""

import copy
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

from torch import Tensor, nn

T = TypeVar("T")

# The exact types that are copied: subclasses may be read-only.
_LISTS = (list, deque)
_DICTS = (dict, defaultdict, OrderedDict, Counter)
# Larger tensors and dictionaries are data, not counters or metrics, and would take long to copy.
_MAX_COUNTER, _MAX_DICT = 10**5, 10**4

# Attributes of every module: parameters, buffers, submodules and hooks, among others.
_OWN_OF_MODULES = frozenset(vars(nn.Module()))


def with_effects_once(
    closure: Callable[[], T], without_effects: Callable[[], AbstractContextManager[object]]
) -> Callable[[], T]:
    """Return a closure for all passes of one step, whose side effects happen in the first pass.

    Args:
        closure: Runs a forward pass, and may log or count.
        without_effects: Returns a context manager that undoes or prevents such side effects. Every
            call of the closure except the first runs in one.
    """
    is_first = True

    def run() -> T:
        nonlocal is_first
        if is_first:
            is_first = False
            return closure()
        with without_effects():
            return closure()

    return run


@contextmanager
def restoring_attributes(owner: object) -> Iterator[None]:
    """Context manager that restores the attributes of a trainer or a module on exit.

    In the body, copies replace small tensors, lists and dictionaries, which may be changed in
    place. The parameters, buffers and submodules of a module are not touched.
    """
    attributes = vars(owner)
    before = {name: v for name, v in attributes.items() if name not in _OWN_OF_MODULES}
    attributes.update({name: _copied(value) for name, value in before.items()})
    try:
        yield
    finally:
        attributes.update(before)


def _copied(value: Any) -> Any:
    """Copy tensors, lists and nested dictionaries, but not the items of lists."""
    if isinstance(value, Tensor):
        # A tensor that requires grad is a weight or an activation, not a counter, and a large one
        # is data.
        is_counter = not value.requires_grad and value.numel() <= _MAX_COUNTER
        return value.clone() if is_counter else value
    if type(value) in _LISTS or (type(value) in _DICTS and len(value) > _MAX_DICT):
        return copy.copy(value)
    if type(value) not in _DICTS:
        return value
    result = copy.copy(value)
    for key, item in value.items():
        result[key] = _copied(item)
    return result
