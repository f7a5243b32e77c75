"""Image datasets in memory or in files, split into train and test."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor

from surrogap.errors import InvalidValueError

# The statistics of ImageNet's training images that torchvision and timm normalise with.
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


@final
@dataclass(frozen=True, eq=False)
class TensorSet:
    """Small images in memory.

    Args:
        images: uint8, NCHW, with one or three channels.
        labels: int64, one class index for each image.
        noisy_labels: Labels with errors, such as CIFAR-10N's; None if there are none.

    Raises:
        ValueError: A tensor has the wrong dtype or shape, or there are no images.

    >>> TensorSet(torch.zeros(6, 1, 8, 8, dtype=torch.uint8), torch.arange(6))
    TensorSet(6 images of 1x8x8)
    """

    images: Tensor
    labels: Tensor
    noisy_labels: Tensor | None = None

    def __post_init__(self) -> None:
        shape = tuple(self.images.shape)
        if self.images.dtype != torch.uint8 or len(shape) != 4 or shape[1] not in (1, 3):
            raise InvalidValueError(
                "images must be uint8 of shape (number, 1 or 3, height, width), got "
                f"{self.images.dtype} of {shape}. Pass the original pixels, channels first."
            )
        for name, labels in (("labels", self.labels), ("noisy_labels", self.noisy_labels)):
            if labels is not None and (labels.dtype != torch.int64 or labels.shape != shape[:1]):
                raise InvalidValueError(
                    f"{name} must be int64 of shape ({shape[0]},), got {labels.dtype} of "
                    f"{tuple(labels.shape)}. Pass one class index for each image."
                )
        if not self.images.numel():
            raise InvalidValueError(f"images must not be empty, got shape {shape}. Pass some.")

    def to(self, device: torch.device | str) -> "TensorSet":
        """Return the dataset on a device, without a copy if it is already there."""
        noisy = None if self.noisy_labels is None else self.noisy_labels.to(device)
        return TensorSet(self.images.to(device), self.labels.to(device), noisy)

    def __getitem__(self, chosen: Tensor) -> "TensorSet":
        """Return the images at some positions, with their labels."""
        noisy = None if self.noisy_labels is None else self.noisy_labels[chosen]
        return TensorSet(self.images[chosen], self.labels[chosen], noisy)

    def __len__(self) -> int:
        return len(self.images)

    def __repr__(self) -> str:
        return f"TensorSet({len(self)} images of {'x'.join(map(str, self.images.shape[1:]))})"


@final
@dataclass(frozen=True, eq=False)
class FileSet:
    """Image files, read when they are needed.

    Args:
        paths: The files.
        labels: One class index for each file.

    Raises:
        ValueError: There are no files, or not one label for each.

    >>> FileSet(["cat/1.jpg", "dog/1.jpg"], [0, 1])
    FileSet(2 images)
    """

    paths: Sequence[str]
    labels: Sequence[int]

    def __post_init__(self) -> None:
        if not self.paths or len(self.paths) != len(self.labels):
            raise InvalidValueError(
                f"paths must not be empty, and have one label each, got {len(self.paths)} paths "
                f"and {len(self.labels)} labels. Pass both in the same order."
            )

    def to(self, device: torch.device | str) -> "FileSet":
        """Return the dataset itself: files are not moved."""
        return self

    def __getitem__(self, chosen: Tensor) -> "FileSet":
        """Return the images at some positions, with their labels."""
        positions = chosen.tolist()
        return FileSet([self.paths[i] for i in positions], [self.labels[i] for i in positions])

    def __len__(self) -> int:
        return len(self.paths)

    def __repr__(self) -> str:
        return f"FileSet({len(self)} images)"


@final
@dataclass(frozen=True, eq=False)
class Splits:
    """A dataset, split into train, test and optionally val.

    Args:
        name: The name or the path of the dataset.
        classes: The names of the classes; a label is an index into them.
        train: The training images.
        test: The test images.
        val: The validation images, if the dataset has some.
        mean: The mean of each channel, of pixels in [0, 1]. By default computed from `train` for
            images in memory, and ImageNet's for files.
        std: The standard deviation of each channel, with the same default. It is 1 for a constant
            channel.

    Raises:
        ValueError: A label is out of range, the splits differ in kind or shape, or mean or std does
            not have one number for each channel.

    >>> train = TensorSet(torch.full((2, 1, 8, 8), 51, dtype=torch.uint8), torch.tensor([0, 1]))
    >>> splits = Splits("grey", ("left", "right"), train, test=train)
    >>> splits
    Splits('grey', 2 classes, train: 2, test: 2)
    >>> splits.mean, splits.std
    ((0.2,), (1.0,))
    """

    name: str
    classes: tuple[str, ...]
    train: TensorSet | FileSet
    test: TensorSet | FileSet
    val: TensorSet | FileSet | None = None
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        self._check_labels()
        self._check_shapes()
        if not (self.mean and self.std):
            mean, std = mean_and_std(self.train)
            object.__setattr__(self, "mean", tuple(self.mean) or mean)
            object.__setattr__(self, "std", tuple(self.std) or std)
        self._check_statistics()

    @property
    def by_name(self) -> dict[str, TensorSet | FileSet]:
        """The splits by name; "val" only if the dataset has it."""
        splits = {"train": self.train, "test": self.test}
        return splits if self.val is None else {**splits, "val": self.val}

    @property
    def channels(self) -> int:
        """The number of channels of an image: 1 or 3."""
        return self.train.images.shape[1] if isinstance(self.train, TensorSet) else 3

    def to(self, device: torch.device | str) -> "Splits":
        """Return the splits on a device, for loaders to share."""
        moved: dict[str, Any] = {name: split.to(device) for name, split in self.by_name.items()}
        return replace(self, **moved)

    def _check_labels(self) -> None:
        labelled = {name: split.labels for name, split in self.by_name.items()}
        if isinstance(self.train, TensorSet) and self.train.noisy_labels is not None:
            labelled["train (noisy)"] = self.train.noisy_labels
        for name, labels in labelled.items():
            if isinstance(labels, Tensor):
                low, high = (int(bound) for bound in labels.aminmax())
            else:
                low, high = min(labels), max(labels)
            if low < 0 or high >= len(self.classes):
                raise InvalidValueError(
                    f"labels of {name} must be from 0 to {len(self.classes) - 1}, since there are "
                    f"{len(self.classes)} classes, got {low} to {high}. "
                    "Number the classes from 0, and name each of them."
                )

    def _check_shapes(self) -> None:
        kinds = {
            tuple(split.images.shape[1:]) if isinstance(split, TensorSet) else "files"
            for split in self.by_name.values()
        }
        if len(kinds) > 1:
            shapes = ", ".join(f"{name}: {split}" for name, split in self.by_name.items())
            raise InvalidValueError(
                f"splits must have images of the same shape, got {shapes}. Resize them."
            )

    def _check_statistics(self) -> None:
        for name, values in (("mean", self.mean), ("std", self.std)):
            if len(values) != self.channels or not all(map(math.isfinite, values)):
                raise InvalidValueError(
                    f"{name} must be {self.channels} finite numbers, one for each channel, got "
                    f"{values}. Leave it out to compute it."
                )
        if min(self.std) <= 0:
            raise InvalidValueError(
                f"std must be above 0, got {self.std}. Leave it out to compute it."
            )

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name}: {len(split)}" for name, split in self.by_name.items())
        return f"Splits({self.name!r}, {len(self.classes)} classes, {sizes})"


def mean_and_std(images: TensorSet | FileSet) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the mean and the standard deviation of each channel, of pixels in [0, 1].

    They are exact, from the counts of the 256 values. For files they are ImageNet's.

    >>> pixels = torch.tensor([0, 255], dtype=torch.uint8).reshape(2, 1, 1, 1)
    >>> mean_and_std(TensorSet(pixels, torch.tensor([0, 1])))
    ((0.5,), (0.5,))
    """
    if isinstance(images, FileSet):
        return IMAGENET_MEAN, IMAGENET_STD
    values = torch.arange(256, dtype=torch.float64) / 255
    means, stds = [], []
    for channel in images.images.unbind(1):
        counts = torch.bincount(channel.flatten(), minlength=256).double().cpu()
        mean = float(counts @ values / counts.sum())
        std = math.sqrt(float(counts @ (values - mean) ** 2 / counts.sum()))
        means.append(mean)
        stds.append(std if std > 1e-6 else 1.0)
    return tuple(means), tuple(stds)
