"""The order of the images in each epoch, and its distribution over processes."""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from surrogap.checks import integer
from surrogap.data.seeds import generator
from surrogap.errors import InvalidValueError


@final
@dataclass(frozen=True)
class Order:
    """The order of the images in each epoch, and the share of each process.

    The images of one step, over all processes, are `batch_size * world_size` consecutive images of
    the order, so one process with batches of 8 takes the same steps as two with batches of 4. The
    order depends only on (seed, epoch).

    An incomplete last batch is dropped or kept. If kept, it is spread evenly over the processes,
    and each image occurs once, in one process. All processes have the same number of batches: if
    fewer images than processes are left, a process without one gets the last image of its
    second-to-last batch instead.

    Args:
        num_images: The number of images.
        batch_size: The number of images of one process in a step.
        rank: The rank of this process.
        world_size: The number of processes.
        shuffle: Shuffle in each epoch; otherwise each epoch has the order of the dataset.
        drop_last: Drop an incomplete last batch.
        seed: The seed of the shuffling, the same in all processes.

    Raises:
        TypeError: A number is not an integer.
        ValueError: A number is out of range, or there are too few images for the processes.

    >>> order = Order(num_images=10, batch_size=4, shuffle=False, drop_last=False)
    >>> [order.indices(step).tolist() for step in range(len(order))]
    [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    """

    num_images: int
    batch_size: int
    rank: int = 0
    world_size: int = 1
    shuffle: bool = True
    drop_last: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        integer("batch_size", self.batch_size, at_least=1, remedy="Pass a number such as 128.")
        integer("world_size", self.world_size, at_least=1, remedy="Pass the number of processes.")
        integer("rank", self.rank, at_least=0, remedy="Pass the rank of the process.")
        integer("seed", self.seed, at_least=0, remedy="Pass one such as 0.")
        if self.rank >= self.world_size:
            raise InvalidValueError(
                f"rank must be below world_size, got rank={self.rank} and "
                f"world_size={self.world_size}. Ranks start at 0."
            )
        if self.num_images < (self.global_batch_size if self.drop_last else self.world_size):
            raise InvalidValueError(
                f"batch_size must leave {'a full batch' if self.drop_last else 'an image'} for "
                f"each process, got {self.num_images} images for {self.world_size} processes with "
                f"batch_size={self.batch_size}. "
                + ("Pass a smaller one." if self.drop_last else "Use fewer processes.")
            )
        if self.batch_size == 1 and self._num_lacking:
            raise InvalidValueError(
                f"batch_size must be at least 2 to share {self.num_images} images among "
                f"{self.world_size} processes, got 1. Pass 2, or drop_last=True."
            )

    @property
    def global_batch_size(self) -> int:
        """The number of images of a step over all processes."""
        return self.batch_size * self.world_size

    def __len__(self) -> int:
        """The number of batches in an epoch, the same for each process."""
        return self.num_images // self.global_batch_size + (not self.drop_last and self._rest > 0)

    def images(self, epoch: int) -> Tensor:
        """Return the indices of the images in the order of an epoch, over all processes."""
        if not self.shuffle:
            return torch.arange(self.num_images)
        return torch.randperm(self.num_images, generator=generator("order", self.seed, epoch))

    def indices(self, position: int) -> Tensor:
        """Return the positions in the order that make up this process's batch at a position."""
        start = position * self.global_batch_size
        first = start + self.rank * self.batch_size
        mine = torch.arange(first, first + self.batch_size)
        is_lacking = self.rank >= self.world_size - self._num_lacking
        if position == len(self) - 2 and is_lacking:
            return mine[:-1]
        if start + self.global_batch_size <= self.num_images:
            return mine
        if is_lacking:
            return mine[-1:] - self.global_batch_size
        return torch.arange(start, self.num_images).tensor_split(self.world_size)[self.rank]

    @property
    def _rest(self) -> int:
        return self.num_images % self.global_batch_size

    @property
    def _num_lacking(self) -> int:
        """The number of processes for which the last batch has no image."""
        if self.drop_last or not self._rest:
            return 0
        return max(self.world_size - self._rest, 0)
