"""Checks of an objective's first call: its closure must train the objective's model.

They visit every module and every node of the autograd graph, so only the first call runs them.
"""

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel

from surrogap.core.autograd_graph import leaves
from surrogap.core.gradients import versions
from surrogap.core.random_state import host_generators
from surrogap.core.shards import is_distributed
from surrogap.core.weights import Weights, check_engine
from surrogap.errors import InvalidValueError, UnsupportedError


@contextmanager
def first_forward_pass(weights: Weights) -> Iterator[None]:
    """Context for the first forward pass, with more checks, and a gradient for one parameter.

    A closure that calls `zero_grad` changes this gradient; the others are None already. Also find
    out which random generators of Python and NumPy the pass draws from.
    """
    parameter = weights.parameters[0]
    has_none = parameter.grad is None
    before = [(generator, pickle.dumps(generator.get())) for generator in host_generators()]
    try:
        if has_none:
            parameter.grad = torch.zeros_like(parameter)
        with _outside_wrappers(weights):
            yield
    finally:
        if has_none:
            parameter.grad = None
    weights.drawn |= {g for g, state in before if pickle.dumps(g.get()) != state}


@contextmanager
def _outside_wrappers(weights: Weights) -> Iterator[None]:
    """Context in which the model must not run inside a wrapper that the objective does not know.

    The wrapper would average the gradients of each pass, and nothing would average the direction.
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
                "model must be the wrapper, got the model inside DistributedDataParallel. "
                "Build the objective after wrapping, from what DistributedDataParallel, "
                "accelerator.prepare or fabric.setup returned. Otherwise replicas diverge."
            )

    handle = register_module_forward_pre_hook(check)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def first_backward_pass(loss: Tensor, weights: Weights) -> Iterator[None]:
    """Context for the first backward pass, with checks of its graph.

    All trainable parameters in it must belong to the model: both passes would add to the gradients
    of others. Inputs that require gradients are allowed, since they are not parameters. Also find
    out if the pass reaches parameters outside the graph, as reentrant checkpointing does.
    """
    reachable, known = leaves(loss), weights.identities()
    others = [p for p in reachable if isinstance(p, nn.Parameter) and id(p) not in known]
    # If all leaves are others, it is another model's loss, which is rejected later.
    if others and len(others) < len(reachable):
        raise UnsupportedError(
            "loss must not depend on trainable parameters outside the objective's model, got one "
            f"of shape {tuple(others[0].shape)}. It would get the sum of both passes' gradients: "
            "freeze it, or to train both with this objective, pass nn.ModuleList([model, other])."
        )
    before = versions(weights)
    yield
    rows = zip(weights.parameters, before, versions(weights), strict=True)
    reached = {id(parameter) for parameter, old, new in rows if old != new}
    weights.are_reentrant |= not reached.issubset(map(id, reachable))
