"""Sets, splits and their statistics."""

from typing import Any

import pytest
import torch

from surrogap.data import FileSet, Splits, TensorSet
from surrogap.data.splits import mean_and_std
from tests.data.synthetic import tensors


def test_mean_and_std_are_those_of_the_pixels() -> None:
    splits = tensors(20)
    assert isinstance(splits.train, TensorSet)
    pixels = splits.train.images.double() / 255
    assert splits.mean == pytest.approx(pixels.mean((0, 2, 3)).tolist(), abs=1e-14)
    assert splits.std == pytest.approx(pixels.std((0, 2, 3), correction=0).tolist(), abs=1e-14)


def test_mean_and_std_can_be_given() -> None:
    part = tensors(4).train
    given = Splits("half", ("a", "b", "c"), part, part, mean=(0.5,) * 3)
    assert given.mean == (0.5,) * 3
    assert given.std == mean_and_std(part)[1]


def test_splits_by_name_and_device() -> None:
    splits = tensors(4)
    assert splits.channels == 3
    assert set(splits.by_name) == {"train", "test"}
    moved = splits.to("cpu")
    assert isinstance(splits.train, TensorSet)
    assert isinstance(moved.train, TensorSet)
    assert moved.train.images is splits.train.images  # shared, not copied
    files = FileSet(["a.png"], [0])
    assert files.to("cpu") is files
    assert Splits("one", ("a",), files, files).channels == 3


IMAGES, LABELS = torch.zeros(2, 3, 4, 4, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64)


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (IMAGES.float(), LABELS, "images must be uint8 of shape .*, got torch.float32 of"),
        (IMAGES[0], LABELS, r"images must be uint8 of shape .*, got torch.uint8 of \(3, 4, 4\)"),
        (IMAGES[:, :2], LABELS, r"images must .* of \(2, 2, 4, 4\). Pass the original pixels"),
        (IMAGES, LABELS.int(), r"labels must be int64 of shape \(2,\), got torch.int32 of \(2,\)"),
        (IMAGES, LABELS[:1], r"labels must be int64 of shape \(2,\), got torch.int64 of \(1,\)"),
        (IMAGES[:0], LABELS[:0], "images must not be empty, got shape"),
    ],
)
def test_bad_tensors(images: torch.Tensor, labels: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TensorSet(images, labels)


@pytest.mark.parametrize(("paths", "labels"), [([], []), (["a.png"], [0, 1])])
def test_bad_files(paths: list[str], labels: list[int]) -> None:
    with pytest.raises(ValueError, match=f"paths must not be empty.*, got {len(paths)} paths and"):
        FileSet(paths, labels)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"classes": ("a", "b")}, "labels of train must be from 0 to 1, .* got 0 to 2. Number"),
        (
            {"test": FileSet(["a.png"], [0])},
            "splits must have images of the same shape, got train: ",
        ),
        ({"mean": (0.5,)}, r"mean must be 3 finite numbers, .*, got \(0.5,\). Leave it out"),
        ({"std": (1.0, 1.0, float("nan"))}, "std must be 3 finite numbers, one for each"),
        ({"std": (1.0, 1.0, 0.0)}, "std must be above 0, got"),
    ],
)
def test_bad_splits(changes: dict[str, Any], message: str) -> None:
    part = tensors(4).train
    good: dict[str, Any] = {"classes": ("a", "b", "c"), "train": part, "test": part}
    with pytest.raises(ValueError, match=message):
        Splits("bad", **{**good, **changes})
