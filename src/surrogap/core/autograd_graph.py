"""The autograd graph of a loss."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor


def nodes(*outputs: Tensor) -> Iterator[Any]:
    """Yield the nodes of the autograd graph of some tensors."""
    following, seen = [output.grad_fn for output in outputs], set()
    while following:
        node = following.pop()
        if node is not None and node not in seen:
            yield node
            seen.add(node)
            following += [each for each, _ in node.next_functions]


def leaves(loss: Tensor) -> list[Tensor]:
    """Return the tensors that require gradients, and on which a loss depends."""
    variables = (getattr(node, "variable", None) for node in nodes(loss))
    return [variable for variable in variables if variable is not None]
