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
    """Return the leaf tensors that require gradients and on which a loss depends."""
    # By name: nodes of custom functions may have any attributes.
    return [n.variable for n in nodes(loss) if n.name() == "torch::autograd::AccumulateGrad"]
