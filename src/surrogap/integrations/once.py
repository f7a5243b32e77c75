"""Closures whose side effects happen once, in the first of several passes."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TypeVar

T = TypeVar("T")


def acting_once(
    closure: Callable[[], T], undone: Callable[[], AbstractContextManager[object]]
) -> Callable[[], T]:
    """Return `closure`, to be called once per pass of one step.

    Args:
        closure: Runs a forward pass, and may log or count.
        undone: Returns a context that undoes or prevents such side effects. Every call of the
            closure but the first runs in one.
    """
    is_first = True

    def run() -> T:
        nonlocal is_first
        if is_first:
            is_first = False
            return closure()
        with undone():
            return closure()

    return run
