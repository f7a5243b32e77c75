"""The vector space of a model's weights, with one flat tensor for each vector.

A vector has an entry for each trainable weight, in at least float32. If the weights are sharded
over processes (FSDP2), its tensor is this process's shard, and inner products sum over all
processes.
"""

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from surrogap.core.shards import is_sharded, shard_of
from surrogap.core.vectors import chunks, flat_dot, total
from surrogap.core.weights import Weights
from surrogap.errors import InvalidValueError


class Space:
    """Vectors with an entry for each trainable weight.

    Args:
        weights: The model's weights.

    Attributes:
        size: The number of weights, over all processes.
        dtype: The dtype of vectors.
        device: The device of vectors: that of the first parameter.

    >>> space = Space(Weights(nn.Linear(2, 3)))
    >>> space.size
    9
    >>> [tuple(piece.shape) for piece in space.pieces(space.zeros())]
    [(3, 2), (3,)]
    """

    def __init__(self, weights: Weights) -> None:
        self._parameters = weights.parameters
        tensors, shardings = weights.tensors, weights.shardings
        self.size = sum(parameter.numel() for parameter in weights.parameters)
        self.device = tensors[0].device
        self.dtype = torch.float32
        for tensor in tensors:
            self.dtype = torch.promote_types(self.dtype, tensor.dtype)
        self._shapes = [tensor.shape for tensor in tensors]
        # Parameters with the same sharding are adjacent, so that one sum reduces all of them.
        self._slices = [slice(0)] * len(tensors)
        self._segments = []
        end = 0
        for sharding in dict.fromkeys(shardings):
            start = end
            for index, tensor in enumerate(tensors):
                if shardings[index] == sharding:
                    self._slices[index] = slice(end, end + tensor.numel())
                    end += tensor.numel()
            self._segments.append((sharding, slice(start, end)))
        self.length = end

    def zeros(self) -> Tensor:
        """A vector of zeros."""
        return torch.zeros(self.length, dtype=self.dtype, device=self.device)

    def pieces(self, vector: Tensor) -> list[Tensor]:
        """The entries of a vector for each parameter, as views.

        Raises:
            ValueError: The vector has a wrong shape.
        """
        if vector.shape != (self.length,):
            raise InvalidValueError(
                f"vector must have shape ({self.length},), an entry for each trainable weight, "
                f"got {tuple(vector.shape)}. Make one with Surface.space.vector."
            )
        return [
            vector[own].view(shape) for own, shape in zip(self._slices, self._shapes, strict=True)
        ]

    def vector(self, tensors: Iterable[Tensor]) -> Tensor:
        """A vector from a tensor for each trainable parameter, or from this process's shards."""
        vector = self.zeros()
        for piece, tensor in zip(self.pieces(vector), tensors, strict=True):
            piece.copy_(shard_of(tensor.detach(), tensor))
        return vector

    def random(self, seed: int, *stream: str | int) -> Tensor:
        """Standard normal numbers, which do not depend on the device or the sharding.

        Args:
            seed: The seed.
            stream: The name of one of several vectors with the same seed. Unlike `seed + index` as
                a seed, it shares no vectors with neighbouring seeds.
        """
        if stream:
            digest = hashlib.blake2b(repr((seed, *stream)).encode(), digest_size=7).digest()
            seed = int.from_bytes(digest, "big")
        generator = torch.Generator().manual_seed(seed)
        return self.vector(
            _sharded_like(torch.randn(parameter.shape, generator=generator), parameter)
            for parameter in self._parameters
        )

    def products(self, rows: Tensor, vector: Tensor) -> Tensor:
        """The inner product of each row with `vector`."""
        return total([sharding.sum(rows[:, own] @ vector[own]) for sharding, own in self._segments])

    def dot(self, x: Tensor, y: Tensor) -> Tensor:
        """The inner product of two vectors."""
        # Not `products`, which on a CPU has an error of 2% for 10^8 weights.
        return total(
            [
                sharding.sum(flat_dot((a, b) for a, b in chunks(x[own], y[own])))
                for sharding, own in self._segments
            ]
        )

    def norm(self, x: Tensor) -> Tensor:
        """The Euclidean norm of a vector."""
        return self.dot(x, x).sqrt()


def _sharded_like(tensor: Tensor, parameter: nn.Parameter) -> Tensor:
    if not is_sharded(parameter):
        return tensor
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(parameter, DTensor)
    mesh = parameter.device_mesh
    # Every process has the whole tensor, so none has to send a shard.
    return distribute_tensor(
        tensor.to(mesh.device_type), mesh, parameter.placements, src_data_rank=None
    )
