"""Parameters that are sharded over processes, by FSDP2, HSDP or tensor parallelism.

Such a parameter is a `DTensor`: each process holds a shard of it. Copies, climbs and combinations
work on shards. Sums over the whole model, such as `<g, g>`, are reduced over processes; a shard
that several processes replicate counts once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from surrogap.core.vectors import total


@dataclass(frozen=True)
class Sharding:
    """The processes over which a parameter is sharded.

    Attributes:
        groups: One process group for each dimension of the mesh along which it is sharded.
        device_type: The type of device on which the groups communicate.
    """

    groups: tuple[Any, ...] = ()
    device_type: str = ""

    def sum(self, partial: Tensor) -> Tensor:
        """Return the sum of the `partial` sums of all shards."""
        if not self.groups:
            return partial
        # With weights offloaded to the CPU, the groups may support only CUDA.
        result = partial.to(self.device_type, copy=True)
        for group in self.groups:
            dist.all_reduce(result, group=group)
        return result.to(partial.device)


WHOLE = Sharding()


def totals(rows: Sequence[Sequence[Tensor]], shardings: Sequence[Sharding]) -> list[Tensor]:
    """Return sums over the whole model, with one message for each sharding.

    Args:
        rows: One row for each quantity: a partial sum for each group of parameters.
        shardings: The shardings of the groups.
    """
    if all(sharding is WHOLE for sharding in shardings):
        return [total(row) for row in rows]
    sums = []
    for sharding in dict.fromkeys(shardings):
        mine = [index for index, other in enumerate(shardings) if other == sharding]
        sums.append(sharding.sum(torch.stack([total([row[i] for i in mine]) for row in rows])))
    return list(total(sums))


def is_distributed() -> bool:
    """Return whether there is a process group."""
    return dist.is_available() and dist.is_initialized()


def is_sharded(tensor: object) -> bool:
    """Return whether `tensor` is a `DTensor`."""
    # The import is slow, and without a process group there are no such tensors.
    if not is_distributed():
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def sharding_of(parameter: Any) -> Sharding:
    """Return the sharding of `parameter`."""
    if not is_sharded(parameter):
        return WHOLE
    mesh = parameter.device_mesh
    groups = tuple(
        mesh.get_group(dimension)
        for dimension, placement in enumerate(parameter.placements)
        if not placement.is_replicate() and mesh.size(dimension) > 1
    )
    return Sharding(groups, mesh.device_type) if groups else WHOLE


def compute_device(parameter: Any) -> torch.device:
    """Return the device on which passes use a parameter, even if FSDP offloads it to the CPU."""
    device: torch.device = parameter.device
    if is_sharded(parameter) and (kind := parameter.device_mesh.device_type) != device.type:
        return torch.device(kind, torch.get_device_module(kind).current_device())
    return device


def has_copies(parameter: Any) -> bool:
    """Return whether several processes hold the same shard of a parameter."""
    return is_sharded(parameter) and any(
        placement.is_replicate() and parameter.device_mesh.size(dimension) > 1
        for dimension, placement in enumerate(parameter.placements)
    )


@torch.no_grad()
def reduced_like(gradient: Any, parameter: Any) -> Any:
    """Return `gradient` sharded like its `parameter`; a new tensor if it was a partial sum."""
    if gradient is None or not is_sharded(parameter):
        return gradient
    if gradient.placements == parameter.placements:
        return gradient
    return gradient.redistribute(placements=parameter.placements)


@torch.no_grad()
def shard_of(tensor: Any, parameter: Any) -> Any:
    """Return this process's shard of `tensor`, which is the parameter or its gradient."""
    if tensor is None or not is_sharded(parameter):
        return tensor
    return reduced_like(tensor, parameter).to_local().detach()


def whole_of(piece: Tensor | None, parameter: Any) -> Any:
    """Return a tensor sharded like `parameter`, from this process's shard of it."""
    if piece is None or not is_sharded(parameter):
        return piece
    from torch.distributed.tensor import DTensor

    if piece.device.type != parameter.device_mesh.device_type:
        # `from_local` would move it to the mesh's devices, but FSDP has offloaded it.
        whole = torch.empty_like(parameter, requires_grad=False)
        shard_of(whole, parameter).copy_(piece)
        return whole
    return DTensor.from_local(
        piece,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def mean_over(groups: Sequence[Any], scalar: Tensor) -> Tensor:
    """Return the mean of a scalar over process groups, one for each dimension of a mesh.

    In float64, so that the mean of equal numbers is exact.
    """
    mean = scalar.to(torch.float64, copy=True)
    for group in groups:
        dist.all_reduce(mean, group=group)
        mean /= group.size()
    return mean.to(scalar)
