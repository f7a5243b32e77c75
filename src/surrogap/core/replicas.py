"""Processes that train copies of one model: DistributedDataParallel.

Each process has its own batch, so `g` and `g_p` may be the gradients of one process, or the means
over all processes or a group: the scope of the perturbation. Both passes run without DDP's
synchronisation, and the averages are taken here: those of both gradients within the scope, and
unless the scope is global, that of the direction. So the weights stay bit-identical on all
processes.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Literal, TypeAlias, TypeGuard, Union

import torch
import torch.distributed as dist
from torch import Tensor

from surrogap.core.shards import is_distributed, mean_over
from surrogap.core.vectors import Gradients, Layout, groups_of
from surrogap.core.weights import Weights, contents
from surrogap.errors import InvalidTypeError, InvalidValueError, UnsupportedError

if TYPE_CHECKING:  # some builds of torch do not have it
    from torch.distributed import ProcessGroup

Scope: TypeAlias = Union[Literal["replica", "global"], "ProcessGroup", None]

# As in DDP: large enough to use the bandwidth, small enough for the first message to start early.
_BUCKET_BYTES = 25 * 2**20


class Replicas:
    """The processes that train copies of a model, or this process alone.

    Args:
        weights: The model's tensors, and the modules wrapped in DDP.
        scope: The scope of the perturbation; `Objective` documents it, and its errors.
    """

    def __init__(self, weights: Weights, scope: Scope) -> None:
        _check(scope, weights)
        wrappers = weights.wrappers
        groups = [wrapper.process_group for wrapper in wrappers]
        if any(group != groups[0] for group in groups):
            raise InvalidValueError(
                "model must be wrapped in DistributedDataParallel over one process group, got "
                "several. Wrap it as a whole."
            )
        if any(wrapper.static_graph for wrapper in wrappers):
            raise InvalidValueError(
                "static_graph of DistributedDataParallel must be False, got True. It needs each "
                "pass to be synchronised, but the passes of an objective run inside no_sync: leave "
                "it out, or pass find_unused_parameters=True."
            )
        self._wrappers = wrappers
        self._everyone = groups[0] if groups else None
        self._in_scope = scope if _is_group(scope) else None
        if scope == "global" or _size(self._in_scope) == _size(self._everyone):
            self._in_scope = self._everyone

    @contextmanager
    def unsynchronised(self) -> Iterator[None]:
        """Context in which DDP does not average the gradients of a pass."""
        with ExitStack() as stack:
            for wrapper in self._wrappers:
                if wrapper._join_config.enable:
                    raise UnsupportedError(
                        "model must not be inside join() of DistributedDataParallel, got a call in "
                        "it. Give all processes the same number of batches."
                    )
                # After a forward pass outside of this context, DDP may still be prepared to reduce
                # the gradients of the next backward pass.
                if wrapper.require_forward_param_sync:
                    wrapper.reducer._reset_state()
                stack.enter_context(wrapper.no_sync())
            yield

    @property
    def shares_direction(self) -> bool:
        """True if directions differ between processes, and must be averaged before a step."""
        return self._in_scope is not self._everyone

    def mean_number(self, scalar: Tensor) -> Tensor:
        """Return the mean of a scalar over all processes; exact if all values are equal."""
        return scalar if _size(self._everyone) == 1 else mean_over([self._everyone], scalar)

    def mean(
        self, gradients: Gradients, parameters: Sequence[Tensor], *, in_scope: bool = False
    ) -> Gradients:
        """Return the mean of gradients over all processes, or over the scope."""
        group = self._in_scope if in_scope else self._everyone
        if group is None or group.size() == 1:
            return gradients
        result: Gradients = [None] * len(gradients)
        indices = self._reached(gradients, parameters[0].device, group)
        messages = []
        for bucket in _buckets(indices, parameters):
            vector = Layout([parameters[index] for index in bucket]).read(
                [gradients[index] for index in bucket]
            )
            (flat,) = vector.flats
            # Divided first, as DDP does: a sum in float16 may overflow.
            work = dist.all_reduce(flat.div_(group.size()), group=group, async_op=True)
            messages.append((bucket, vector, work))
        for bucket, vector, work in messages:
            work.wait()
            for index, view in zip(bucket, vector.views(), strict=True):
                result[index] = view
        return result

    def _reached(
        self, gradients: Gradients, device: torch.device, group: "ProcessGroup"
    ) -> list[int]:
        """Return the indices of the parameters that have a gradient in any process.

        Without `find_unused_parameters` DDP assumes that all have one, and so does this.
        """
        if not any(wrapper.find_unused_parameters for wrapper in self._wrappers):
            return list(range(len(gradients)))
        flags = torch.tensor([gradient is not None for gradient in gradients], dtype=torch.int32)
        flags = flags.to(device)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=group)
        return flags.nonzero().flatten().tolist()

    def share_buffers(self, dictionaries: list[dict[str, Tensor | None]]) -> None:
        """Broadcast the first process's buffers if DDP has `broadcast_buffers=True`.

        DDP does so before a forward pass, but not inside `no_sync`.
        """
        is_wanted = any(wrapper.broadcast_buffers for wrapper in self._wrappers)
        if not is_wanted or _size(self._everyone) == 1:
            return
        tensors = [buffer for buffer in contents(dictionaries) if buffer is not None]
        for bucket in _buckets(range(len(tensors)), tensors):
            mine = [tensors[index] for index in bucket]
            vector = Layout(mine).read(mine)
            dist.broadcast(vector.flats[0], group_src=0, group=self._everyone)
            vector.write_to_(mine)


def _size(group: "ProcessGroup | None") -> int:
    return 1 if group is None else group.size()


def _is_group(scope: object) -> "TypeGuard[ProcessGroup]":
    return dist.is_available() and isinstance(scope, dist.ProcessGroup)


def _check(scope: object, weights: Weights) -> None:
    if scope is None:
        return
    if not _is_group(scope) and scope not in ("replica", "global"):
        error = InvalidValueError if isinstance(scope, str) else InvalidTypeError
        raise error(
            "scope must be 'replica', 'global' or a process group that contains this process, got "
            f"{scope!r}. Pass this process's own, such as the first result of "
            "torch.distributed.new_subgroups, or leave it out for the default."
        )
    if weights.are_sharded and scope != "global":
        raise InvalidValueError(
            f"scope must be 'global' for sharded weights, got {scope!r}. A process that holds only "
            "a shard cannot take an ascent step of its own: leave scope out."
        )
    if weights.are_sharded or weights.wrappers:
        return
    is_alone = not is_distributed() or dist.get_world_size() == 1
    if _is_group(scope) or not is_alone:  # a single process accepts 'replica' and 'global'
        raise InvalidValueError(
            "scope must be left out for a model that is neither wrapped in "
            f"DistributedDataParallel nor sharded, got {scope!r}. Wrap the model first, and pass "
            "the wrapped one."
        )


def _buckets(indices: Sequence[int], tensors: Sequence[Tensor]) -> Iterator[list[int]]:
    """Yield `indices` in buckets of one device and dtype, for one message each."""
    for members in groups_of([tensors[index] for index in indices]):
        bucket: list[int] = []
        size = 0
        for index in (indices[member] for member in members):
            size += tensors[index].nbytes
            bucket.append(index)
            if size >= _BUCKET_BYTES:
                yield bucket
                bucket, size = [], 0
        if bucket:
            yield bucket
