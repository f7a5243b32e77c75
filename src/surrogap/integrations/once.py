"""Closures whose side effects happen once, in the first of several passes."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TypeVar

T = TypeVar("T")


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
