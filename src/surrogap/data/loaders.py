"""Loaders of batches on the device, resumable mid-epoch."""

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
from surrogap.data.files import Reader, RequestSampler, Unreadable, collated
from surrogap.data.mixup import mixup
from surrogap.data.order import Order
from surrogap.data.seeds import derived, generator
from surrogap.data.splits import FileSet, Splits, TensorSet
from surrogap.data.streams import Batch, on_side_stream
from surrogap.data.worker_signals import blocked_signals, obey_parent_only
from surrogap.errors import InvalidValueError


class Loader(ABC):
    """Batches `(images, targets)` of one split, on the device. `loader` builds the right subclass.

    One iteration is one epoch. After `load_state_dict` the next iteration yields exactly the
    remaining batches of the epoch. An iteration that is abandoned ends its epoch, and the next one
    starts the following epoch.

    Targets are int64 class indices, or float32 probabilities with mixup; see `soft_targets`.

    Args:
        splits: The dataset, for its classes, mean and standard deviation.
        order: The images of each batch.
        augmentation: The augmentation.
        device: The device of the batches.

    Attributes:
        epoch: The number of the epoch, from 0.
        position: The number of batches of the epoch that have been yielded.
    """

    def __init__(
        self, splits: Splits, order: Order, augmentation: Augmentation, device: torch.device
    ) -> None:
        self.order = order
        self.augmentation = augmentation
        self.device = device
        self.num_classes = len(splits.classes)
        self.epoch = 0
        self.position = 0
        self._is_resumed = False
        # Pixels are from 0 to 255; the statistics of the dataset are for pixels in [0, 1].
        self._mean, self._std = (
            255 * torch.tensor(values, dtype=torch.float32, device=device)[:, None, None]
            for values in (splits.mean, splits.std)
        )

    @property
    def soft_targets(self) -> bool:
        """True if targets are probabilities instead of class indices."""
        return self.augmentation.mixup > 0

    def __len__(self) -> int:
        """The number of batches of an epoch, the same in all processes."""
        return len(self.order)

    def __iter__(self) -> Iterator[Batch]:
        return on_side_stream(self._epoch(), self.device)

    def _epoch(self) -> Iterator[Batch]:
        if self.position and not self._is_resumed:
            self._start_next_epoch()
        self._is_resumed = False
        epoch = self.epoch
        for position, (images, labels) in enumerate(self._raw(epoch), start=self.position):
            batch = self._normalized(images, labels, position)
            # Before the yield, so that a checkpoint after the step does not repeat the batch.
            self.position = position + 1
            yield batch
        self._start_next_epoch()

    @abstractmethod
    def _raw(self, epoch: int) -> Iterator[Batch]:
        """Yield the rest of an epoch: uint8 images and labels on the device."""

    def _normalized(self, images: Tensor, labels: Tensor, position: int) -> Batch:
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

    def _start_next_epoch(self) -> None:
        self.epoch, self.position = self.epoch + 1, 0

    def state_dict(self) -> dict[str, int]:
        """Return the position, and the settings that a resumed loader must share."""
        is_over = self.position == len(self)
        return {
            "epoch": self.epoch + is_over,
            "position": 0 if is_over else self.position,
            **self._fingerprint(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from the state of another loader.

        With the same number of processes, the remaining batches are equal bit for bit. With a
        different number of processes and the same global batch size, each step has the same images
        with a different augmentation.

        Args:
            state: The return value of `state_dict`.

        Raises:
            ValueError: The state is of a loader with a different dataset, seed or global batch
                size.
        """
        for name, value in self._fingerprint().items():
            if state.get(name) != value:
                raise InvalidValueError(
                    f"state must have {name}={value}, as this loader does, got {state.get(name)}. "
                    "Resume with the dataset, seed and global batch size of the saved run."
                )
        self.epoch, self.position = state["epoch"], state["position"]
        self._is_resumed = True

    def _fingerprint(self) -> dict[str, int]:
        return {
            "seed": self.order.seed,
            "num_images": self.order.num_images,
            "images_per_step": self.order.global_batch_size,
        }

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({len(self)} batches of {self.order.batch_size}, "
            f"epoch {self.epoch}, position {self.position})"
        )


@final
class TensorLoader(Loader):
    """Batches of a dataset in memory, which is moved to the device once and augmented there.

    Augmentation works on whole batches, with random numbers for each image. They are drawn on the
    CPU, so that they are the same on all devices. Loaders share images that are already on the
    device: if several loaders read the same split, pass `splits.to(device)`.

    >>> from surrogap.data import load
    >>> train = loader(load("embedded"), batch_size=128, augmentation="light")
    >>> images, targets = next(iter(train))
    >>> images.shape, images.dtype, targets.dtype, len(train)
    (torch.Size([128, 1, 28, 28]), torch.float32, torch.int64, 39)
    """

    def __init__(self, dataset: TensorSet, *, size: int | None, **shared: Any) -> None:
        super().__init__(**shared)
        if size is not None:
            integer("size", size, at_least=1, remedy="Pass a number of pixels, such as 32.")
        self.size = size
        self.dataset = dataset.to(self.device)

    def _raw(self, epoch: int) -> Iterator[Batch]:
        order = self.order.images(epoch).to(self.device)
        for position in range(self.position, len(self)):
            chosen = order[self.order.indices(position).to(self.device)]
            images = augmented(
                self.dataset.images[chosen], self.augmentation, self._generator("images", position)
            )
            if self.size is not None:
                images = functional.resize(images, [self.size, self.size])
            yield images, self.dataset.labels[chosen]


@final
class FileLoader(Loader):
    """Batches of image files, which worker processes read, crop and augment.

    The random numbers of an image depend on the seed, the epoch and its index in the order of the
    epoch, not on the number of workers. Normalisation and mixup run on the device, for whole
    batches. The workers live as long as the loader. Iteration raises ValueError for a file that
    cannot be read; `intact` finds such files beforehand.

    >>> cat = FileSet(["cat.jpg"], [0])
    >>> loader(Splits("one", ("cat",), train=cat, test=cat), batch_size=1, num_workers=0)
    FileLoader(1 batches of 1, epoch 0, position 0)
    """

    def __init__(
        self, dataset: FileSet, *, size: int, num_workers: int | None, **shared: Any
    ) -> None:
        super().__init__(**shared)
        integer("size", size, at_least=1, remedy="Pass a number of pixels, such as 224.")
        if num_workers is None:
            num_workers = min(_num_cpus(), 8)
        integer("num_workers", num_workers, at_least=0, remedy="Pass 0 to read in this process.")
        # Without this, DataLoader draws the seeds of its workers from the global generator.
        self._worker_seeds = torch.Generator()
        self._sampler = RequestSampler(self.order, dataset)
        self._workers: DataLoader[Any] = DataLoader(
            Reader(transform_of_files(self.augmentation, size)),
            batch_sampler=self._sampler,
            collate_fn=collated,
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
            pin_memory=self.device.type == "cuda",
            generator=self._worker_seeds,
            worker_init_fn=obey_parent_only,
        )

    def _raw(self, epoch: int) -> Iterator[Batch]:
        self._worker_seeds.manual_seed(derived("workers", self.order.seed, epoch))
        self._sampler.epoch, self._sampler.position = epoch, self.position
        with blocked_signals():  # so that workers block them from their start
            batches = iter(self._workers)
        for batch in batches:
            if isinstance(batch, Unreadable):
                raise InvalidValueError(
                    f"image files must be intact, got {batch.path} ({batch.reason}). Replace or "
                    "delete it."
                )
            images, labels = batch
            yield (
                images.to(self.device, non_blocking=True),
                labels.to(self.device, non_blocking=True),
            )


def _num_cpus() -> int:
    """Return the number of CPUs that this process may use, which may be fewer in a container."""
    if hasattr(os, "sched_getaffinity"):  # Linux only
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


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
    """Build the loader of a split: a `TensorLoader` for images in memory, a `FileLoader` for files.

    Args:
        splits: The dataset.
        split: The name of the split: "train", "test", or "val" if the dataset has it.
        batch_size: The number of images of this process in a step.
        augmentation: "none", "light", "medium", "strong", or an `Augmentation`.
        shuffle: Shuffle in each epoch. By default only for "train".
        drop_last: Drop an incomplete last batch. By default only for "train". If it is kept, each
            image occurs exactly once, in one process.
        seed: The seed of order and augmentation, the same in all processes.
        device: The device of the batches.
        rank: The rank of this process.
        world_size: The number of processes. Each takes its share of every step.
        size: The height and width of the images. Files are cropped to it, by default 224. Images in
            memory are resized to it after augmentation, by default not at all.
        num_workers: The number of worker processes that read files; 0 reads in this process. By
            default the number of CPUs, at most 8: pass it if several processes share a machine.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: A value is out of range or unknown, or the split has too few images.

    >>> from surrogap.data import load
    >>> train = loader(load("embedded"), batch_size=500, augmentation="medium", seed=1)
    >>> for step, (images, targets) in enumerate(train):
    ...     if step == 3:
    ...         state = train.state_dict()  # a checkpoint mid-epoch
    >>> resumed = loader(load("embedded"), batch_size=500, augmentation="medium", seed=1)
    >>> resumed.load_state_dict(state)
    >>> rest = list(resumed)
    >>> len(rest), torch.equal(rest[-1][0], images), torch.equal(rest[-1][1], targets)
    (6, True, True)
    """
    dataset, is_train = splits.by_name[one_of("split", split, splits.by_name)], split == "train"
    order = Order(
        num_images=len(dataset),
        batch_size=batch_size,
        rank=rank,
        world_size=world_size,
        shuffle=is_train if shuffle is None else shuffle,
        drop_last=is_train if drop_last is None else drop_last,
        seed=seed,
    )
    shared: dict[str, Any] = {
        "splits": splits,
        "order": order,
        "augmentation": augmentation_of(augmentation),
        "device": torch.device(device),
    }
    if isinstance(dataset, TensorSet):
        return TensorLoader(dataset, size=size, **shared)
    return FileLoader(
        dataset, size=224 if size is None else size, num_workers=num_workers, **shared
    )
