"""Balanced subsets: the first images of each class for training, the next for validation."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from surrogap.checks import integer
from surrogap.data.splits import Splits, TensorSet
from surrogap.errors import InvalidValueError


def subset(
    splits: Splits,
    *,
    train_per_class: int | None = None,
    val_per_class: int | None = None,
    noisy_labels: bool = False,
) -> Splits:
    """Return a dataset with fewer training images, and validation images taken from the others.

    Images are taken in the order of the dataset, so two archives that begin with the same images
    give the same subset. Mean and standard deviation are those of the chosen training images.

    Args:
        splits: The whole dataset. Its test split is kept.
        train_per_class: The number of training images of each class; None for all that are not
            held out for validation.
        val_per_class: The number of validation images of each class. They follow the training
            images, or are the last of their class if `train_per_class` is None. None keeps the
            dataset's own validation split, if any.
        noisy_labels: Train on the dataset's noisy labels. The images are chosen by their true
            labels, which validation and test images keep.

    Raises:
        TypeError: A number is not an integer.
        ValueError: A class has too few images, or the dataset has no noisy labels.

    >>> from surrogap.data import load
    >>> subset(load("embedded"), train_per_class=100, val_per_class=50)
    Splits('embedded', 10 classes, train: 1000, test: 2000, val: 500)
    """
    for name, value in (("train_per_class", train_per_class), ("val_per_class", val_per_class)):
        if value is not None:
            integer(name, value, at_least=1, remedy="Pass a number of images, such as 100.")
    changes: dict[str, Any] = {}
    if train_per_class is not None or val_per_class is not None:
        train, val = _positions(splits, train_per_class, val_per_class or 0)
        changes = {"train": splits.train[train], "mean": (), "std": ()}
        if len(val):
            changes["val"] = splits.train[val]
    chosen = replace(splits, **changes)
    return replace(chosen, train=_with_noisy_labels(chosen)) if noisy_labels else chosen


def _positions(splits: Splits, num_train: int | None, num_val: int) -> tuple[Tensor, Tensor]:
    """Return the positions of the training and validation images, in the order of the dataset."""
    labels = torch.as_tensor(splits.train.labels)
    trains, vals = [], []
    for label, name in enumerate(splits.classes):
        own = (labels == label).nonzero()[:, 0]
        end = len(own) - num_val if num_train is None else num_train
        if end < 1 or end + num_val > len(own):
            wanted = f"{num_train or 'some'} training and {num_val} validation images"
            raise InvalidValueError(
                f"each class must have {wanted}, got {len(own)} images of {name} in "
                f"{splits.name}. Pass a smaller train_per_class or val_per_class."
            )
        trains.append(own[:end])
        vals.append(own[end : end + num_val])
    return torch.cat(trains).sort().values, torch.cat(vals).sort().values


def _with_noisy_labels(splits: Splits) -> TensorSet:
    noisy = getattr(splits.train, "noisy_labels", None)
    if not isinstance(splits.train, TensorSet) or noisy is None:
        raise InvalidValueError(
            f"train_labels must be clean for {splits.name}, which has no noisy labels, got noisy. "
            "Pass an .npz archive with train_noisy_labels."
        )
    return TensorSet(splits.train.images, noisy)
