"""Loaders: batches on the device, epoch by epoch, that can be resumed in mid-epoch."""

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, final

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torchvision.transforms.v2 import functional

from surrogap.checks import integer, one_of
from surrogap.data.augmentation import (
    Augmentation,
    augmentation_of,
    augmented,
    transform_of_files,
)
from surrogap.data.files import Reader, Request, Unreadable, collated
from surrogap.data.mixup import mixup
from surrogap.data.order import Order
from surrogap.data.seeds import derived, generator
from surrogap.data.splits import FileSet, Splits, TensorSet
from surrogap.data.streams import Batch, on_side_stream
from surrogap.errors import InvalidTypeError, InvalidValueError


class Loader(ABC):
    """Batches of one split, `(images, targets)` on the device. `loader` makes the right kind.

    One iteration is one epoch. After `load_state_dict` the next iteration yields what was left of
    the epoch, and exactly that. An iteration that is abandoned ends its epoch: the next one starts
    the epoch after it.

    Targets are int64 class numbers, or, with mixup, float32 probabilities; `soft_targets` tells.

    Args:
        splits: The set.
        split: Its split: "train", "test", or "val" where there is one.
        batch_size: How many images this process takes in a step.
        augmentation: "none", "light", "medium", "strong", or an `Augmentation`.
        shuffle: Whether to shuffle. By default the split "train" is.
        drop_last: Whether to drop a ragged last batch. By default that of "train" is. Kept, every
            image comes exactly once, on one process.
        seed: Of order and augmentation; the same on all processes.
        device: Where the batches shall be.
        rank: Which process this is, from 0.
        world_size: How many processes there are. Each takes its share of every step.

    Attributes:
        epoch: Which epoch this is, from 0.
        position: How many of its batches have been yielded.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: A value is out of range or unknown, or the split has too few images.
    """

    def __init__(
        self,
        splits: Splits,
        split: str = "train",
        *,
        batch_size: int,
        augmentation: str | Augmentation = "none",
        shuffle: bool | None = None,
        drop_last: bool | None = None,
        seed: int = 0,
        device: torch.device | str = "cpu",
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self.dataset = splits.by_name[one_of("split", split, splits.by_name)]
        self.order = Order(
            num_images=len(self.dataset),
            batch_size=batch_size,
            rank=rank,
            world_size=world_size,
            shuffle=split == "train" if shuffle is None else shuffle,
            drop_last=split == "train" if drop_last is None else drop_last,
            seed=seed,
        )
        self.augmentation = augmentation_of(augmentation)
        self.num_classes = len(splits.classes)
        self.device = torch.device(device)
        self.epoch = 0
        self.position = 0
        self._is_resumed = False
        # Pixels are 0 to 255, the set's statistics those of 0 to 1.
        self._mean, self._std = (
            255 * torch.tensor(values, dtype=torch.float32, device=self.device)[:, None, None]
            for values in (splits.mean, splits.std)
        )

    @property
    def soft_targets(self) -> bool:
        """Whether targets are probabilities instead of class numbers."""
        return self.augmentation.mixup > 0

    def __len__(self) -> int:
        """The number of batches in a whole epoch, the same on every process."""
        return len(self.order)

    def __iter__(self) -> Iterator[Batch]:
        return on_side_stream(self._epoch(), self.device)

    def _epoch(self) -> Iterator[Batch]:
        if self.position and not self._is_resumed:
            self._turn()
        self._is_resumed = False
        epoch = self.epoch
        for position, (images, labels) in enumerate(self._raw(epoch), start=self.position):
            batch = self._finished(images, labels, position)
            # Before the batch is out: a checkpoint after its step must not repeat it.
            self.position = position + 1
            yield batch
        self._turn()

    @abstractmethod
    def _raw(self, epoch: int) -> Iterator[Batch]:
        """What is left of an epoch: uint8 images on the device, and labels."""

    def _finished(self, images: Tensor, labels: Tensor, position: int) -> Batch:
        normal = (images.to(torch.float32) - self._mean).div_(self._std)
        if not self.soft_targets:
            return normal, labels
        return mixup(
            normal,
            labels,
            self.num_classes,
            self._generator("mixup", position),
            probability=self.augmentation.mixup,
            alpha=self.augmentation.mixup_alpha,
        )

    def _generator(self, purpose: str, position: int) -> torch.Generator:
        return generator(purpose, self.order.seed, self.epoch, position, self.order.rank)

    def _turn(self) -> None:
        self.epoch, self.position = self.epoch + 1, 0

    def state_dict(self) -> dict[str, int]:
        """Where the loader stands, and what must be the same where it goes on."""
        is_over = self.position == len(self)
        return {
            "epoch": self.epoch + is_over,
            "position": 0 if is_over else self.position,
            **self._fingerprint(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where another loader stood.

        With as many processes, batches and augmentations are the same bit by bit. With another
        number of processes, and batches that make as many images together, each step sees the
        same images, and augments them otherwise.

        Args:
            state: What its `state_dict` returned.

        Raises:
            ValueError: It is no such state, or that of a loader with other images, seed or batch.
        """
        for name, value in self._fingerprint().items():
            if state.get(name) != value:
                raise InvalidValueError(
                    f"state must have {name}={value} as this loader has, got {state.get(name)}. "
                    "Resume with the set, the seed and the batch of all processes of the run "
                    "that was saved."
                )
        epoch, position = state.get("epoch"), state.get("position")
        integer("epoch", epoch, at_least=0, remedy="Pass what state_dict() returned.")
        integer("position", position, at_least=0, remedy="Pass what state_dict() returned.")
        if state["position"] >= len(self):
            raise InvalidValueError(
                f"position must be below {len(self)}, the number of batches, got {position}. "
                "Pass what state_dict() returned."
            )
        self.epoch, self.position = state["epoch"], state["position"]
        self._is_resumed = True

    def _fingerprint(self) -> dict[str, int]:
        return {
            "seed": self.order.seed,
            "num_images": self.order.num_images,
            "images_per_step": self.order.together,
        }

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({len(self)} batches of {self.order.batch_size}, "
            f"epoch {self.epoch}, position {self.position})"
        )


@final
class TensorLoader(Loader):
    """Batches of a set that is in memory: it goes to the device once, and is augmented there.

    Whole batches at a time, each image with its own random numbers, drawn on the CPU: the
    same on all devices.

    Args:
        splits: As for `Loader`, which has the other arguments too. Loaders share what is on the
            device already: pass `splits.to(device)` where several read the same split.
        size: Height and width to resize to, after augmentation; by default the images' own.

    >>> from surrogap.data import load
    >>> loader = TensorLoader(load("embedded"), batch_size=128, augmentation="light")
    >>> images, targets = next(iter(loader))
    >>> images.shape, images.dtype, targets.dtype, len(loader)
    (torch.Size([128, 1, 28, 28]), torch.float32, torch.int64, 39)
    """

    dataset: TensorSet

    def __init__(
        self, splits: Splits, split: str = "train", *, size: int | None = None, **settings: Any
    ) -> None:
        super().__init__(splits, split, **settings)
        if not isinstance(self.dataset, TensorSet):
            raise InvalidTypeError(
                f"splits must be in memory, got {self.dataset}. Use surrogap.data.loader."
            )
        if size is not None:
            integer("size", size, at_least=1, remedy="Pass a number of pixels, as 32.")
        self.size = size
        self.dataset = self.dataset.to(self.device)

    def _raw(self, epoch: int) -> Iterator[Batch]:
        order = self.order.images(epoch).to(self.device)
        for position in range(self.position, len(self)):
            chosen = order[self.order.places(position).to(self.device)]
            images = augmented(
                self.dataset.images[chosen], self.augmentation, self._generator("images", position)
            )
            if self.size is not None:
                images = functional.resize(images, [self.size, self.size])
            yield images, self.dataset.labels[chosen]


@final
class FileLoader(Loader):
    """Batches of a set of files, read, cropped and augmented by worker processes.

    Each image is transformed by itself, with random numbers that depend on seed, epoch and its
    place in the epoch's order, and thus not on how many workers there are. Normalisation and mixup
    follow on the device, for whole batches.

    Args:
        splits: As for `Loader`, which has the other arguments too.
        size: Height and width of the images.
        num_workers: How many worker processes; 0 reads in this one. By default as many as there
            are processors, 8 at most: pass it where several processes share a machine. They live
            as long as the loader.

    Raises:
        ValueError: When it comes to a file that is no image; the message names it.

    >>> cat = FileSet(["cat.jpg"], [0])
    >>> FileLoader(Splits("one", ("cat",), train=cat, test=cat), batch_size=1, num_workers=0)
    FileLoader(1 batches of 1, epoch 0, position 0)
    """

    dataset: FileSet

    def __init__(
        self,
        splits: Splits,
        split: str = "train",
        *,
        size: int = 224,
        num_workers: int | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(splits, split, **settings)
        if not isinstance(self.dataset, FileSet):
            raise InvalidTypeError(
                f"splits must be files, got {self.dataset}. Use surrogap.data.loader."
            )
        integer("size", size, at_least=1, remedy="Pass a number of pixels, as 224.")
        if num_workers is None:
            num_workers = min(_num_processors(), 8)
        integer("num_workers", num_workers, at_least=0, remedy="Pass 0 to read in this process.")
        # Without it, DataLoader draws its workers' seeds from the global generator.
        self._worker_seeds = torch.Generator()
        self._requests = _Requests(self.order, self.dataset)
        self._workers: DataLoader[Any] = DataLoader(
            Reader(transform_of_files(self.augmentation, size)),
            batch_sampler=self._requests,
            collate_fn=collated,
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
            pin_memory=self.device.type == "cuda",
            generator=self._worker_seeds,
        )

    def _raw(self, epoch: int) -> Iterator[Batch]:
        self._worker_seeds.manual_seed(derived("workers", self.order.seed, epoch))
        self._requests.epoch, self._requests.position = epoch, self.position
        for batch in self._workers:
            if isinstance(batch, Unreadable):
                raise InvalidValueError(
                    f"files of a set must be images, got {batch.path}, which cannot be read "
                    f"({batch.reason}). Replace it, or take it out."
                )
            images, labels = batch
            yield (
                images.to(self.device, non_blocking=True),
                labels.to(self.device, non_blocking=True),
            )


def _num_processors() -> int:
    """How many processors this process may use, which in a container are not all."""
    if hasattr(os, "sched_getaffinity"):  # not everywhere
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class _Requests:
    """What to read, batch by batch, from an epoch and a position on.

    It runs in the main process and hands files and seeds to the workers, who thus hold no list of
    all files: a million of them, copied by each worker, takes gigabytes.
    """

    def __init__(self, order: Order, dataset: FileSet) -> None:
        self.order = order
        self.dataset = dataset
        self.epoch = 0
        self.position = 0

    def __iter__(self) -> Iterator[list[Request]]:
        paths, labels = self.dataset.paths, self.dataset.labels
        images = self.order.images(self.epoch)
        for position in range(self.position, len(self.order)):
            places = self.order.places(position)
            seeds = (self.order.seed, self.epoch)
            yield [
                Request(paths[image], labels[image], derived("image", *seeds, place))
                for place, image in zip(places.tolist(), images[places].tolist(), strict=True)
            ]


def loader(
    splits: Splits,
    split: str = "train",
    *,
    batch_size: int,
    augmentation: str | Augmentation = "none",
    shuffle: bool | None = None,
    drop_last: bool | None = None,
    seed: int = 0,
    device: torch.device | str = "cpu",
    rank: int = 0,
    world_size: int = 1,
    size: int | None = None,
    num_workers: int | None = None,
) -> Loader:
    """The loader of one split: a `TensorLoader` for sets in memory, a `FileLoader` for files.

    Args:
        splits: The set.
        split: Its split: "train", "test", or "val" where there is one.
        batch_size: How many images this process takes in a step.
        augmentation: "none", "light", "medium", "strong", or an `Augmentation`.
        shuffle: Whether to shuffle. By default the split "train" is.
        drop_last: Whether to drop a ragged last batch. By default that of "train" is.
        seed: Of order and augmentation; the same on all processes.
        device: Where the batches shall be.
        rank: Which process this is, from 0.
        world_size: How many processes there are.
        size: Height and width of the images; by default 224 for files, and for sets in memory
            what they have.
        num_workers: How many worker processes read files, by default as many as there are
            processors, 8 at most; sets in memory need none.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: A value is out of range or unknown, or the split has too few images.

    >>> from surrogap.data import load
    >>> train = loader(load("embedded"), batch_size=500, augmentation="medium", seed=1)
    >>> for step, (images, targets) in enumerate(train):
    ...     if step == 3:
    ...         state = train.state_dict()  # a checkpoint in mid-epoch
    >>> resumed = loader(load("embedded"), batch_size=500, augmentation="medium", seed=1)
    >>> resumed.load_state_dict(state)
    >>> rest = list(resumed)
    >>> len(rest), torch.equal(rest[-1][0], images), torch.equal(rest[-1][1], targets)
    (6, True, True)
    """
    settings: dict[str, Any] = {
        "batch_size": batch_size,
        "augmentation": augmentation,
        "shuffle": shuffle,
        "drop_last": drop_last,
        "seed": seed,
        "device": device,
        "rank": rank,
        "world_size": world_size,
    }
    if isinstance(splits.train, TensorSet):
        return TensorLoader(splits, split, size=size, **settings)
    size = 224 if size is None else size
    return FileLoader(splits, split, size=size, num_workers=num_workers, **settings)
