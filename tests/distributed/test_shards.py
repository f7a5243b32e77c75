"""Pieces of weights that lie elsewhere than their mesh, as FSDP's offloading has them."""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from surrogap.core.shards import piece_of, whole_of
from tests.distributed.processes import Processes


def offloaded() -> tuple[str, str, bool]:
    # No GPU is needed to say that there are some.
    mesh = DeviceMesh("cuda", [0, 1], _init_backend=False)
    local = torch.randn(2, 3)
    spec = DTensorSpec(mesh, (Shard(0),), TensorMeta(torch.Size([4, 3]), (3, 1), local.dtype))
    parameter = nn.Parameter(DTensor(local, spec, requires_grad=True))
    piece = torch.randn(2, 3)
    parameter.grad = whole_of(piece, parameter)
    return (
        mesh.device_type,
        parameter.grad.device.type,
        torch.equal(piece_of(parameter.grad, parameter), piece),
    )


def test_gradients_of_offloaded_weights_stay_on_the_cpu(two: Processes) -> None:
    assert two.run(offloaded) == [("cuda", "cpu", True)] * 2
