"""Closures whose side effects happen once, in the first of several passes."""

import copy
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

from torch import Tensor, nn

T = TypeVar("T")

# Parameters, buffers, submodules and hooks, among others.
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

    In its body, copies replace the tensors, lists and dictionaries, which may be changed in place.
    The parameters, buffers and submodules of a module are not touched.
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
        # A tensor that requires grad is a weight or an activation, not a counter.
        return value if value.requires_grad else value.clone()
    if not isinstance(value, list | deque | dict):
        return value
    result = copy.copy(value)
    if isinstance(result, dict):
        for key, item in result.items():
            result[key] = _copied(item)
    return result
