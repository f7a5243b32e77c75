"""FSDP2 around the passes of a step: the modules that `fully_shard` was called on."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

from torch import nn

from surrogap.core.shards import is_distributed


class FullySharded:
    """The modules among `modules` that `fully_shard` was called on."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.modules: list[Any] = []
        if is_distributed():
            from torch.distributed.fsdp import FSDPModule

            self.modules = [module for module in modules if isinstance(module, FSDPModule)]

    def reshard(self) -> None:
        """Free the gathered parameters, so that the modules hold shards.

        After a pass FSDP usually does so itself, but not after an evaluation or an error, nor with
        `reshard_after_forward=False`. The next pass would use the gathered parameters, not the
        moved shards.
        """
        for module in self.modules:
            module.reshard()

    def gathered(self) -> list[Any]:
        """Return the unsharded parameters; None where FSDP has not gathered them."""
        parameters = chain.from_iterable(group.fsdp_params for group in self._groups())
        return [getattr(parameter, "_unsharded_param", None) for parameter in parameters]

    @property
    def reduce(self) -> bool:
        """True if backward passes reduce gradients; see `set_requires_gradient_sync`."""
        return all(group.reduce_grads and group.all_reduce_grads for group in self._groups())

    @contextmanager
    def reducing(self) -> Iterator[None]:
        """Context for passes, in which the gradients of each are reduced.

        Without reduction FSDP keeps the gradients of a pass internally, and `.grad` stays empty.
        After an error, discards the state of the pass, which includes `.grad`.
        """
        groups = self._groups()
        before = [(group.reduce_grads, group.all_reduce_grads) for group in groups]
        for group in groups:
            group.reduce_grads = group.all_reduce_grads = True
        try:
            yield
        except BaseException:
            self._discard()
            raise
        finally:
            for group, flags in zip(groups, before, strict=True):
                group.reduce_grads, group.all_reduce_grads = flags

    def _discard(self) -> None:
        """Discard the state of a pass that raised: gathered parameters and unreduced gradients."""
        for module in self.modules:
            state = module._get_fsdp_state()
            if state._is_root is None:
                continue  # no pass has begun yet
            if not hasattr(module, "reset_iter_state"):
                _reset(state)
            elif state._is_root:
                module.reset_iter_state()

    def _groups(self) -> list[Any]:
        """Return the groups of parameters that FSDP gathers and reduces together."""
        groups: list[Any] = []
        for state in (module._get_fsdp_state() for module in self.modules):
            # torch 2.11 has a single group per module
            groups += getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
        return [group for group in groups if group is not None]


def _reset(state: Any) -> None:
    """Do what `reset_iter_state` does, which torch 2.11 does not have."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

    state._modules_to_run_forward.clear()
    state._training_state = TrainingState.IDLE
    state._state_ctx.iter_forward_root = None
    state._state_ctx.post_backward_final_callback_queued = False
    state._comm_ctx.post_forward_order.clear()
    group = state._fsdp_param_group
    if group is not None:
        group.finalize_backward()
        for parameter in group.fsdp_params:
            parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None
        group._training_state = TrainingState.IDLE
        group.reshard()
