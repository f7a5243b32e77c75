"""Balanced subsets against a loop over the images, and sets with noisy labels."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from surrogap.data import FileSet, Splits, TensorSet, archive_of, load, subset
from surrogap.data.archives import read_archive
from surrogap.data.splits import mean_and_std

LABELS = torch.tensor([1, 0, 0, 1, 2, 0, 2, 1, 0, 2, 1, 2])


def grey(labels: torch.Tensor) -> TensorSet:
    """Return images whose pixels are their position, with noisy labels that are all wrong."""
    images = torch.arange(len(labels), dtype=torch.uint8)[:, None, None, None].expand(-1, 1, 2, 2)
    return TensorSet(images.contiguous(), labels, (labels + 1) % 3)


def splits() -> Splits:
    return Splits("synthetic", ("a", "b", "c"), grey(LABELS), grey(LABELS[:3]))


def positions(part: Any) -> list[int]:
    return [int(image[0, 0, 0]) for image in part.images]


def reference(num_train: int, num_val: int) -> tuple[list[int], list[int]]:
    """The reference: a loop over the images, until each class has enough."""
    seen = dict.fromkeys(range(3), 0)
    train, val = [], []
    for position, label in enumerate(LABELS.tolist()):
        seen[label] += 1
        if seen[label] <= num_train:
            train.append(position)
        elif seen[label] <= num_train + num_val:
            val.append(position)
    return train, val


@pytest.mark.parametrize(("num_train", "num_val"), [(1, 1), (2, 1), (2, 2), (3, 1)])
def test_the_first_of_each_class_in_the_order_of_the_set(num_train: int, num_val: int) -> None:
    found = subset(splits(), train_per_class=num_train, val_per_class=num_val)
    train, val = reference(num_train, num_val)
    assert found.val is not None
    assert (positions(found.train), positions(found.val)) == (train, val)
    assert torch.equal(found.train.labels, LABELS[train])  # type: ignore[arg-type]
    assert len(found.test) == 3
    assert (found.mean, found.std) == mean_and_std(found.train)


def test_validation_images_alone_are_the_last_of_each_class() -> None:
    found = subset(splits(), val_per_class=1)
    assert found.val is not None
    assert positions(found.val) == [8, 10, 11]
    assert len(found.train) == 9


def test_a_set_that_holds_only_the_first_images_gives_the_same_subset() -> None:
    whole, part = splits(), splits()
    train, val = reference(2, 1)
    first = part.train[torch.tensor(sorted(train + val))]
    part = Splits("part", part.classes, first, part.test)
    found = [subset(one, train_per_class=2, val_per_class=1) for one in (whole, part)]
    assert positions(found[0].train) == positions(found[1].train)
    assert found[0].mean == found[1].mean


def test_noisy_labels_are_those_of_the_same_images() -> None:
    clean = subset(splits(), train_per_class=2, val_per_class=1)
    noisy = subset(splits(), train_per_class=2, val_per_class=1, noisy_labels=True)
    assert positions(noisy.train) == positions(clean.train)
    assert torch.equal(noisy.train.labels, (clean.train.labels + 1) % 3)  # type: ignore[arg-type]
    assert clean.val is not None and noisy.val is not None  # noqa: PT018
    assert torch.equal(noisy.val.labels, clean.val.labels)  # type: ignore[arg-type]
    assert noisy.mean == clean.mean


def test_nothing_asked_for_changes_nothing() -> None:
    whole = splits()
    assert subset(whole).train is whole.train


def test_files_have_subsets_too() -> None:
    files = FileSet([f"{i}.jpg" for i in range(4)], [0, 1, 0, 1])
    found = subset(Splits("files", ("a", "b"), files, files), train_per_class=1)
    assert isinstance(found.train, FileSet)
    assert list(found.train.paths) == ["0.jpg", "1.jpg"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train_per_class": 0}, "train_per_class must be at least 1, got 0"),
        ({"val_per_class": 0}, "val_per_class must be at least 1, got 0"),
        ({"train_per_class": 3, "val_per_class": 2}, "each class must have 3 training and 2"),
        ({"val_per_class": 4}, "each class must have some training and 4 validation images, got 4"),
    ],
)
def test_what_a_set_does_not_have_is_refused(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        subset(splits(), **changes)  # type: ignore[arg-type]


def test_noisy_labels_must_be_there() -> None:
    clean = replace(splits(), train=TensorSet(grey(LABELS).images, LABELS))
    with pytest.raises(ValueError, match="train_labels must be clean for synthetic, which has no"):
        subset(clean, noisy_labels=True)


def archive(path: Path, **changes: Any) -> Path:
    labels = np.array([0, 1, 0, 1])
    arrays = {
        "train_images": np.zeros((4, 2, 2, 3), np.uint8),
        "train_labels": labels,
        "test_images": np.zeros((2, 2, 2, 3), np.uint8),
        "test_labels": labels[:2],
        "classes": np.array(["a", "b"]),
        "train_noisy_labels": 1 - labels,
    }
    np.savez(path, **(arrays | changes))
    return path


def test_an_archive_may_have_noisy_labels(tmp_path: Path) -> None:
    train = read_archive(archive(tmp_path / "some.npz")).train
    assert isinstance(train, TensorSet)
    assert train.noisy_labels is not None
    assert train.noisy_labels.tolist() == [1, 0, 1, 0]
    moved = train.to("cpu")
    assert moved.noisy_labels is not None


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (np.array([0, 1]), "train_noisy_labels must be int64 of shape"),
        (np.array([0, 1, 2, 0]), "labels of train \\(noisy\\) must be from 0 to 1"),
    ],
)
def test_noisy_labels_of_an_archive_are_checked(
    labels: np.ndarray, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        read_archive(archive(tmp_path / "some.npz", train_noisy_labels=labels))


def test_noisy_labels_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match="noisy_labels must be int64 of shape"):
        TensorSet(torch.zeros(2, 1, 2, 2, dtype=torch.uint8), torch.tensor([0, 1]), torch.zeros(2))


def test_a_named_set_may_be_an_archive_in_the_root(tmp_path: Path) -> None:
    assert archive_of("cifar10", tmp_path) is None
    path = archive(tmp_path / "cifar10.npz")
    assert archive_of("cifar10", tmp_path) == path
    assert archive_of(str(path)) == path
    assert load("cifar10", tmp_path).name == "cifar10"
    assert len(load("cifar10", tmp_path).train) == 4
