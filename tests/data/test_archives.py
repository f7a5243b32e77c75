"""Sets in NumPy archives."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from surrogap.data import load
from surrogap.data.archives import read_archive
from tests.data.synthetic import arrays, pixels


def saved(folder: Path, **changes: Any) -> Path:
    path = folder / "set.npz"
    np.savez(path, **arrays(**changes))
    return path


def test_an_archive_holds_pixels_and_labels_as_they_are(tmp_path: Path) -> None:
    splits = load(saved(tmp_path))
    expected = arrays()
    for part in ("train", "test"):
        assert np.array_equal(
            splits.by_name[part].images.permute(0, 2, 3, 1), expected[f"{part}_images"]
        )
        assert splits.by_name[part].labels.tolist() == expected[f"{part}_labels"].tolist()
    assert splits.classes == ("ant", "bee", "cat")
    assert splits.name == str(tmp_path / "set.npz")
    assert splits.val is None
    assert splits.train.images.is_contiguous()


def test_an_archive_may_have_val_and_unknown_arrays(tmp_path: Path) -> None:
    more = {"val_images": pixels(2, 8, 8, 3), "val_labels": np.array([0, 1], np.uint8)}
    splits = load(saved(tmp_path, **more, test_human_counts=np.array([{}], dtype=object)))
    assert splits.by_name["val"].labels.dtype == torch.int64
    assert repr(splits).endswith("3 classes, train: 6, test: 3, val: 2)")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"test_labels": None},
            "path must be an archive with test_labels, got .*, which has train",
        ),
        ({"val_images": pixels(2, 8, 8, 3)}, "path must be an archive with val_labels, got "),
        (
            {"train_images": pixels(6, 8, 8)},
            r"train_images must be uint8 of shape \(number, height, width, 1 or 3\), got uint8 of "
            r"\(6, 8, 8\)\. An archive holds .* \(In .*set.npz\.\)",
        ),
        (
            {"train_images": pixels(6, 3, 8, 8)},
            r"train_images must .*, got uint8 of \(6, 3, 8, 8\)",
        ),
        ({"test_images": np.zeros((3, 8, 8, 3))}, "test_images must .*, got float64 of"),
        ({"train_labels": np.arange(5)}, r"train_labels must be int64 of shape \(6,\), got int64"),
        ({"train_labels": np.zeros(6)}, "train_labels must be int64 .*, got float64 of"),
        ({"train_labels": np.full(6, 3)}, "labels of train must be from 0 to 2, .*got 3 to 3"),
        ({"test_labels": np.array([-1, 0, 1])}, "labels of test must be .*, got -1 to 1. Number"),
        (
            {"test_images": pixels(3, 9, 9, 3)},
            "splits must have images of the same shape, got train: T",
        ),
        ({"classes": np.arange(3)}, r"classes must be a list of strings, got int64 of \(3,\) in"),
        ({"classes": np.array([["a"]])}, r"classes must be a list of strings, got <U1 of \(1, 1\)"),
        (
            {"classes": np.array(["a", "b", "c"], dtype=object)},
            r"path must be a NumPy archive, got .* \(Object arrays cannot be loaded",
        ),
        (
            {"test_images": pixels(0, 8, 8, 3), "test_labels": np.arange(0)},
            r"images must not be empty, got shape \(0, 3, 8, 8\)",
        ),
    ],
)
def test_bad_archives(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load(saved(tmp_path, **changes))


@pytest.mark.parametrize("content", [b"", b"no archive", b"PK\x03\x04 and then nothing"])
def test_files_that_are_not_archives(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "set.npz").write_bytes(content)
    with pytest.raises(
        ValueError, match=r"path must be a NumPy archive, got .*set.npz, which cannot"
    ):
        load(tmp_path / "set.npz")


@pytest.mark.parametrize(
    ("place", "value", "reason"),
    [
        (8, 1, "encrypted"),  # zipfile raises RuntimeError
        (10, 99, "compression"),  # NotImplementedError
        (None, 7, "invalid block type"),  # zlib.error
    ],
)
def test_damaged_archives(tmp_path: Path, place: int | None, value: int, reason: str) -> None:
    path = tmp_path / "set.npz"
    np.savez_compressed(path, **arrays())
    content = bytearray(path.read_bytes())
    if place is None:  # the first byte of the first file, after its header, name and extra field
        place = 30 + content[26] + content[28]
    else:
        place += content.index(b"PK\x01\x02")  # the first entry of the central directory
    content[place] = value
    path.write_bytes(content)
    message = rf"path must be a NumPy archive, got .*set.npz, which cannot be read .*{reason}"
    with pytest.raises(ValueError, match=message):
        load(path)


def test_a_single_array_is_not_an_archive(tmp_path: Path) -> None:
    np.save(tmp_path / "set.npy", np.zeros(3))
    with pytest.raises(
        ValueError, match=r"path must be a NumPy archive, got .*set.npy, which cannot"
    ):
        read_archive(tmp_path / "set.npy")
