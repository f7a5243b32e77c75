"""Checks of an objective's first call: that its closure trains the objective's model.

They look at every module and every node of the graph, so later calls leave them out.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel

from surrogap.core.engines import check_engine
from surrogap.core.shards import is_distributed
from surrogap.core.weights import Weights
from surrogap.errors import InvalidValueError, UnsupportedError


@contextmanager
def outside_wrappers(weights: Weights) -> Iterator[None]:
    """Context in which the model must not run inside a wrapper that the objective does not have.

    The wrapper would average what it sees of the passes, and nothing would average the directions.

    Raises:
        TypeError: It runs inside a wrapper that an objective cannot train.
        ValueError: It runs inside DistributedDataParallel.
    """
    is_alone = not is_distributed() or dist.get_world_size() == 1
    if is_alone or weights.wrappers or weights.are_sharded:
        yield
        return
    own = set(map(id, weights.modules))

    def check(module: nn.Module, _: Any) -> None:
        if id(module) in own or not any(id(child) in own for child in module.modules()):
            return
        check_engine(type(module))
        if isinstance(module, DistributedDataParallel):
            raise InvalidValueError(
                "model must be the wrapped one, got the model inside DistributedDataParallel. "
                "Build the objective after wrapping, from what DistributedDataParallel, "
                "accelerator.prepare or fabric.setup returned; else replicas drift apart."
            )

    handle = register_module_forward_pre_hook(check)
    try:
        yield
    finally:
        handle.remove()


def check_leaves(loss: Tensor, weights: Weights) -> None:
    """Check that the trainable parameters in the graph of a loss are the model's.

    Inputs that require gradients are not parameters, and may be in it.

    Raises:
        RuntimeError: Another is: both passes would add to its gradient.
    """
    known, leaves = weights.identities(), list(_leaves(loss))
    others = [p for p in leaves if isinstance(p, nn.Parameter) and id(p) not in known]
    if others and len(others) < len(leaves):  # otherwise it is another model's loss, refused later
        raise UnsupportedError(
            "loss must depend on no trainable parameter outside of the objective's model, got one "
            f"of shape {tuple(others[0].shape)}. It would get the sum of both passes' gradients: "
            "pass nn.ModuleList([model, other]) to the objective, or freeze the other."
        )


def _leaves(loss: Tensor) -> Iterator[Tensor]:
    """Yield the leaves of a graph."""
    nodes: list[Any] = [loss.grad_fn]
    seen = set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (leaf := getattr(node, "variable", None)) is not None:
            yield leaf
        nodes.extend(following for following, _ in node.next_functions)
