"""Shards that are not on their mesh's device, or next to unsharded parameters."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from surrogap import SAM
from surrogap.core.shards import shard_of, whole_of
from tests.distributed.processes import Processes


def offloaded() -> tuple[str, str, bool]:
    # A mesh of GPUs can be declared without a GPU.
    mesh = DeviceMesh("cuda", [0, 1], _init_backend=False)
    local = torch.randn(2, 3)
    spec = DTensorSpec(mesh, (Shard(0),), TensorMeta(torch.Size([4, 3]), (3, 1), local.dtype))
    parameter = nn.Parameter(DTensor(local, spec, requires_grad=True))
    piece = torch.randn(2, 3)
    parameter.grad = whole_of(piece, parameter)
    return (
        mesh.device_type,
        parameter.grad.device.type,
        torch.equal(shard_of(parameter.grad, parameter), piece),
    )


def test_gradients_of_offloaded_weights_stay_on_the_cpu(two: Processes) -> None:
    assert two.run(offloaded) == [("cuda", "cpu", True)] * 2


def half_sharded() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    fully_shard(model[0], mesh=init_device_mesh("cpu", (2,)))
    with pytest.raises(ValueError, match=r"1\.weight must be sharded like the others, got a plain"):
        SAM(model)
    model[1].requires_grad_(False)
    SAM(model)


def test_weights_that_fsdp_does_not_shard_are_refused(two: Processes) -> None:
    two.run(half_sharded)
