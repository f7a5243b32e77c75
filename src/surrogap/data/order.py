"""Which images, when, and by which process."""

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
    """The order of the images in each epoch, and each process's share of it.

    The images of one step, on all processes together, are `batch_size * world_size` neighbours in
    the order, so one process with a batch of 8 takes the same steps as two with batches of 4.
    The order depends on (seed, epoch) alone.

    A ragged last batch is dropped or kept. Kept, it is spread evenly over the processes, and every
    image comes once and on one process. All processes have equally many batches: where fewer
    images than processes are left, a process without one keeps back the last image of its batch
    before.

    Args:
        num_images: How many there are.
        batch_size: How many images one process takes in a step.
        rank: Which process this is, from 0.
        world_size: How many processes there are.
        shuffle: Whether to shuffle; if not, every epoch has the set's own order.
        drop_last: Whether to drop a ragged last batch.
        seed: Of the shuffling; the same on all processes.

    Raises:
        TypeError: A number is not whole.
        ValueError: A number is out of range, or there are too few images to go round.

    >>> order = Order(num_images=10, batch_size=4, shuffle=False, drop_last=False)
    >>> [order.places(step).tolist() for step in range(len(order))]
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
        integer(
            "batch_size", self.batch_size, at_least=1, remedy="Pass a number of images, as 128."
        )
        integer("world_size", self.world_size, at_least=1, remedy="Pass the number of processes.")
        integer("rank", self.rank, at_least=0, remedy="Pass the process's number, from 0.")
        integer("seed", self.seed, at_least=0, remedy="Pass one such as 0.")
        if self.rank >= self.world_size:
            raise InvalidValueError(
                f"rank must be below world_size, got rank={self.rank} and "
                f"world_size={self.world_size}. Processes count from 0."
            )
        if self.num_images < (self.together if self.drop_last else self.world_size):
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
    def together(self) -> int:
        """How many images all processes take in a step."""
        return self.batch_size * self.world_size

    def __len__(self) -> int:
        """The number of batches in an epoch, the same for each process."""
        return self.num_images // self.together + (not self.drop_last and self._rest > 0)

    def images(self, epoch: int) -> Tensor:
        """The images' numbers in the order of an epoch, on all processes together."""
        if not self.shuffle:
            return torch.arange(self.num_images)
        return torch.randperm(self.num_images, generator=generator("order", self.seed, epoch))

    def places(self, position: int) -> Tensor:
        """Where in the order the images of this process's batch at a position are."""
        start = position * self.together
        mine = torch.arange(start + self.rank * self.batch_size, start + self._end())
        is_lacking = self.rank >= self.world_size - self._num_lacking
        if position == len(self) - 2 and is_lacking:
            return mine[:-1]
        if start + self.together <= self.num_images:
            return mine
        if is_lacking:
            return mine[-1:] - self.together
        return torch.arange(start, self.num_images).tensor_split(self.world_size)[self.rank]

    @property
    def _rest(self) -> int:
        return self.num_images % self.together

    @property
    def _num_lacking(self) -> int:
        """How many processes find no image in the last batch."""
        if self.drop_last or not self._rest:
            return 0
        return max(self.world_size - self._rest, 0)

    def _end(self) -> int:
        return (self.rank + 1) * self.batch_size
