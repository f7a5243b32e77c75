"""Datasets in NumPy archives: `.npz` files of images and labels."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from surrogap.data.splits import Splits, TensorSet
from surrogap.errors import InvalidValueError

_REMEDY = (
    "An archive holds train_images and test_images (uint8, NHWC), train_labels and test_labels "
    "(int64) and classes (their names), and may hold val_images, val_labels and train_noisy_labels."
)
_NOISY = "train_noisy_labels"
_Arrays = Mapping[str, np.ndarray[Any, Any]]


def read_archive(path: str | Path) -> Splits:
    """Read the dataset in an `.npz` archive.

    Args:
        path: An archive with the arrays train_images, test_images (uint8, NHWC, one or three
            channels), train_labels, test_labels (int64) and classes (strings); optionally
            val_images and val_labels, and train_noisy_labels (int64, such as CIFAR-10N's). Others
            are ignored.

    Raises:
        ValueError: `path` is not such an archive.

    >>> import tempfile
    >>> images, labels = np.zeros((2, 8, 8, 3), np.uint8), np.array([0, 1])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     np.savez(
    ...         f"{folder}/two.npz", train_images=images, train_labels=labels,
    ...         test_images=images, test_labels=labels, classes=["left", "right"],
    ...     )
    ...     read_archive(f"{folder}/two.npz").train
    TensorSet(2 images of 3x8x8)
    """
    try:
        # Without pickle, so that an archive cannot run code.
        with open(path, "rb") as file:
            archive = np.load(file, allow_pickle=False)
            arrays = {name: archive[name] for name in archive.files if _is_ours(name)}
    except Exception as error:  # its type depends on what is damaged
        raise InvalidValueError(
            f"path must be a NumPy archive, got {path}, which cannot be read ({error}). {_REMEDY}"
        ) from error
    return splits_of_arrays(str(path), arrays)


def splits_of_arrays(name: str, arrays: _Arrays) -> Splits:
    """Build a dataset from the arrays of an archive.

    Args:
        name: The name of the dataset.
        arrays: The arrays that `read_archive` describes.

    Raises:
        ValueError: An array is missing or has the wrong dtype or shape.

    >>> images, labels = np.zeros((2, 8, 8, 1), np.uint8), np.array([0, 1])
    >>> arrays = {"train_images": images, "train_labels": labels}
    >>> arrays |= {"test_images": images, "test_labels": labels, "classes": np.array(["a", "b"])}
    >>> splits_of_arrays("two", arrays)
    Splits('two', 2 classes, train: 2, test: 2)
    """
    names = _check(name, arrays)
    try:
        splits: dict[str, Any] = {split: _tensors(split, arrays) for split in names}
        return Splits(name, tuple(map(str, arrays["classes"])), **splits)
    except ValueError as error:
        raise InvalidValueError(f"{error} (In {name}.)") from error


def _check(name: str, arrays: _Arrays) -> list[str]:
    """Check shapes and dtypes, and return the names of the splits."""
    names = ["train", "test"] + ["val"] * any(key.startswith("val_") for key in arrays)
    needed = [f"{split}_{kind}" for split in names for kind in ("images", "labels")] + ["classes"]
    missing = [key for key in needed if key not in arrays]
    if missing:
        raise InvalidValueError(
            f"path must be an archive with {', '.join(missing)}, got {name}, which has "
            f"{', '.join(arrays) or 'none of the arrays'}. {_REMEDY}"
        )
    classes = arrays["classes"]
    if classes.ndim != 1 or classes.dtype.kind != "U":
        raise InvalidValueError(
            f"classes must be a list of strings, got {classes.dtype} of {classes.shape} in {name}. "
            f"{_REMEDY}"
        )
    for split in names:
        _check_split(name, split, arrays)
    return names


def _is_ours(name: str) -> bool:
    split, _, kind = name.partition("_")
    return name in ("classes", _NOISY) or (
        split in ("train", "test", "val") and kind in ("images", "labels")
    )


def _check_split(name: str, split: str, arrays: _Arrays) -> None:
    images = arrays[f"{split}_images"]
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[-1] not in (1, 3):
        raise InvalidValueError(
            f"{split}_images must be uint8 of shape (number, height, width, 1 or 3), got "
            f"{images.dtype} of {images.shape}. {_REMEDY} (In {name}.)"
        )
    for key in _labels(split, arrays):
        found = arrays[key]
        if found.dtype.kind not in "iu" or found.shape != images.shape[:1]:
            raise InvalidValueError(
                f"{key} must be int64 of shape ({len(images)},), got {found.dtype} of "
                f"{found.shape}. {_REMEDY} (In {name}.)"
            )


def _labels(split: str, arrays: _Arrays) -> list[str]:
    return [f"{split}_labels"] + [_NOISY] * (split == "train" and _NOISY in arrays)


def _tensors(split: str, arrays: _Arrays) -> TensorSet:
    images = arrays[f"{split}_images"]
    channels_first = np.ascontiguousarray(images.transpose(0, 3, 1, 2))
    numbers = [torch.from_numpy(arrays[key].astype(np.int64)) for key in _labels(split, arrays)]
    return TensorSet(torch.from_numpy(channels_first), *numbers)
