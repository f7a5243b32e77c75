"""The space that the weights of a model live in, with one flat tensor for each vector.

A vector has a number for each trainable weight, in at least float32. Where processes hold pieces of
the weights (FSDP2), its tensor is this process's part of it, and inner products sum over all
processes.
"""

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from surrogap.core.shards import is_sharded, shard_of
from surrogap.core.vectors import total
from surrogap.core.weights import Weights
from surrogap.errors import InvalidValueError


class Space:
    """Vectors with a number for each trainable weight.

    Args:
        weights: The model's weights.

    Attributes:
        size: The number of weights, over all processes.
        dtype: That of vectors.
        device: Where vectors lie: where the first of the parameters does.

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
        # Pieces that are spread alike lie side by side, so that one sum serves them.
        self._places = [slice(0)] * len(tensors)
        self._segments = []
        end = 0
        for sharding in dict.fromkeys(shardings):
            start = end
            for index, tensor in enumerate(tensors):
                if shardings[index] == sharding:
                    self._places[index] = slice(end, end + tensor.numel())
                    end += tensor.numel()
            self._segments.append((sharding, slice(start, end)))
        self.length = end

    def zeros(self) -> Tensor:
        """The origin."""
        return torch.zeros(self.length, dtype=self.dtype, device=self.device)

    def pieces(self, vector: Tensor) -> list[Tensor]:
        """A vector's parts for each parameter, as views of it.

        Raises:
            ValueError: It has another shape than the weights.
        """
        if vector.shape != (self.length,):
            raise InvalidValueError(
                f"vector must have shape ({self.length},), a number for each trainable weight, "
                f"got {tuple(vector.shape)}. Make one with Surface.space.vector."
            )
        return [
            vector[place].view(shape)
            for place, shape in zip(self._places, self._shapes, strict=True)
        ]

    def vector(self, tensors: Iterable[Tensor]) -> Tensor:
        """A vector from a tensor for each trainable parameter, or from this process's pieces."""
        vector = self.zeros()
        for piece, tensor in zip(self.pieces(vector), tensors, strict=True):
            piece.copy_(shard_of(tensor.detach(), tensor))
        return vector

    def random(self, seed: int, *stream: str | int) -> Tensor:
        """Standard normal numbers, the same on every device and however the weights are spread.

        Args:
            seed: The seed.
            stream: Names one of several vectors of a seed. Those of neighbouring seeds are
                independent, as those of `seed + index` would not be.
        """
        if stream:
            digest = hashlib.blake2b(repr((seed, *stream)).encode(), digest_size=7).digest()
            seed = int.from_bytes(digest, "big")
        generator = torch.Generator().manual_seed(seed)
        return self.vector(
            _spread_like(torch.randn(parameter.shape, generator=generator), parameter)
            for parameter in self._parameters
        )

    def products(self, rows: Tensor, vector: Tensor) -> Tensor:
        """The inner product of each of the `rows` with `vector`."""
        return total(
            [sharding.sum(rows[:, part] @ vector[part]) for sharding, part in self._segments]
        )

    def dot(self, x: Tensor, y: Tensor) -> Tensor:
        """The inner product of two vectors."""
        return self.products(x[None], y)[0]

    def norm(self, x: Tensor) -> Tensor:
        """The Euclidean norm of a vector."""
        return self.dot(x, x).sqrt()


def _spread_like(tensor: Tensor, parameter: nn.Parameter) -> Tensor:
    if not is_sharded(parameter):
        return tensor
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(parameter, DTensor)
    mesh = parameter.device_mesh
    # Every process has the whole, so none has to send its piece.
    return distribute_tensor(
        tensor.to(mesh.device_type), mesh, parameter.placements, src_data_rank=None
    )
