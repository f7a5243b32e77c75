"""Published sets, from synthetic files in the real layouts.

The classes are torchvision's. They compare checksums with those of the real files, which the tests
replace by those of the synthetic ones.
"""

import sys
from pathlib import Path
from urllib.error import URLError

import numpy as np
import pytest
import scipy.io
import torch
from torchvision import datasets

from surrogap.data import FileSet, TensorSet, load
from tests.data.synthetic import folder, md5, pickled, pixels, save_image


def fake_cifar(root: Path, monkeypatch: pytest.MonkeyPatch, num_classes: int) -> np.ndarray:
    """Two images in each file; the images of the training files."""
    kind = datasets.CIFAR10 if num_classes == 10 else datasets.CIFAR100
    key = "labels" if num_classes == 10 else "fine_labels"
    base, images = root / kind.base_folder, []
    for attribute in ("train_list", "test_list"):
        listed = []
        for number, (name, _) in enumerate(getattr(kind, attribute)):
            images.append(pixels(2, 3072, seed=number))
            content = {"data": images[-1], key: [number, num_classes - 1]}
            listed.append([name, pickled(base / name, content)])
        monkeypatch.setattr(kind, attribute, listed)
    names = {kind.meta["key"]: [f"class {i}" for i in range(num_classes)]}
    checksum = pickled(base / kind.meta["filename"], names)
    monkeypatch.setattr(kind, "meta", {**kind.meta, "md5": checksum})
    return np.concatenate(images[:-1])


@pytest.mark.parametrize("num_classes", [10, 100])
def test_cifar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_classes: int) -> None:
    planes = fake_cifar(tmp_path, monkeypatch, num_classes)
    splits = load(f"cifar{num_classes}", root=tmp_path)
    assert isinstance(splits.train, TensorSet)
    assert torch.equal(splits.train.images, torch.from_numpy(planes).reshape(-1, 3, 32, 32))
    assert splits.train.labels[:2].tolist() == [0, num_classes - 1]
    assert len(splits.classes) == num_classes
    assert len(splits.test) == 2


def test_damaged_cifar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cifar(tmp_path, monkeypatch, 10)
    (tmp_path / "cifar-10-batches-py" / "test_batch").write_bytes(b"")
    message = "root must hold CIFAR-10, got .*cifar-10-batches-py, which is missing or damaged"
    with pytest.raises(ValueError, match=message):
        load("cifar10", root=tmp_path)


def fake_flowers(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = root / "flowers-102"
    for number in range(1, 7):
        save_image(base / "jpg" / f"image_{number:05d}.jpg")
    scipy.io.savemat(base / "imagelabels.mat", {"labels": [1, 102, 3, 4, 5, 6]})
    ids = {"trnid": [5, 2], "valid": [1, 3], "tstid": [4, 6]}
    scipy.io.savemat(base / "setid.mat", ids)
    files = {
        **datasets.Flowers102._file_dict,
        "label": ("imagelabels.mat", md5(base / "imagelabels.mat")),
        "setid": ("setid.mat", md5(base / "setid.mat")),
    }
    monkeypatch.setattr(datasets.Flowers102, "_file_dict", files)


def test_flowers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_flowers(tmp_path, monkeypatch)
    splits = load("flowers102", root=tmp_path)
    assert isinstance(splits.train, FileSet)
    assert [Path(path).name for path in splits.train.paths] == [
        "image_00005.jpg",
        "image_00002.jpg",
    ]
    assert list(splits.train.labels) == [4, 101]
    assert list(splits.by_name["val"].labels) == [0, 2]
    assert len(splits.classes) == 102


def test_flowers_without_scipy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_flowers(tmp_path, monkeypatch)
    monkeypatch.setitem(sys.modules, "scipy.io", None)
    with pytest.raises(
        ImportError, match=r"scipy must be installed to read Flowers-102.*pip install scipy"
    ):
        load("flowers102", root=tmp_path)


def test_pets(tmp_path: Path) -> None:
    base = tmp_path / "oxford-iiit-pet"
    save_image(base / "images" / "Abyssinian_1.jpg")
    (base / "annotations").mkdir()
    lines = "".join(f"Breed_{i:02d}_7 {i + 1} 1 1\n" for i in range(37))
    (base / "annotations" / "trainval.txt").write_text(lines)
    (base / "annotations" / "test.txt").write_text(lines)
    splits = load("pets37", root=tmp_path)
    assert isinstance(splits.test, FileSet)
    assert splits.test.paths[3] == str(base / "images" / "Breed_03_7.jpg")
    assert list(splits.test.labels) == list(range(37))
    assert splits.classes[:2] == ("Breed 00", "Breed 01")


def test_imagenet_in_folders(tmp_path: Path) -> None:
    folder(tmp_path / "imagenet")
    splits = load("imagenet", root=tmp_path)
    assert splits.name == "imagenet"
    assert splits.classes == ("ant", "bee")
    assert splits.val is None


def test_imagenet_with_its_names(tmp_path: Path) -> None:
    folder(tmp_path / "imagenet")
    names = {"ant": ("emmet", "pismire"), "bee": ("bumble",)}
    torch.save((names, []), tmp_path / "imagenet" / "meta.bin")
    splits = load("imagenet", root=tmp_path)
    assert splits.classes == ("emmet", "bumble")
    assert list(splits.test.labels) == [0] * 5 + [1] * 5


def test_imagenet_is_not_for_download(tmp_path: Path) -> None:
    message = "download must be False for imagenet, got True. Register at https://image-net.org"
    with pytest.raises(ValueError, match=message):
        load("imagenet", root=tmp_path, download=True)


@pytest.mark.parametrize(
    ("name", "title", "folder", "remedy"),
    [
        ("cifar10", "CIFAR-10", "cifar-10-batches-py", "pass download=True, or put the files from"),
        ("cifar100", "CIFAR-100", "cifar-100-python", "pass download=True, or put the files from"),
        ("flowers102", "Flowers-102", "flowers-102", "pass download=True, or put the files from"),
        ("pets37", "Oxford-IIIT Pet", "oxford-iiit-pet", "pass download=True, or put the files"),
        ("imagenet", "ImageNet", "imagenet", "put the files from https://image-net.org there"),
    ],
)
def test_missing_sets(tmp_path: Path, name: str, title: str, folder: str, remedy: str) -> None:
    message = rf"root must hold {title}, got .*{folder}, which is missing or damaged \(.*\). To get"
    with pytest.raises(ValueError, match=f"{message} it, {remedy}"):
        load(name, root=tmp_path)


def test_a_download_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(self: object) -> None:
        raise URLError("no route")

    monkeypatch.setattr(datasets.CIFAR10, "download", unreachable)
    message = "Cannot download CIFAR-10: .*no route.*Try again later, or put the"
    with pytest.raises(RuntimeError, match=message):
        load("cifar10", root=tmp_path, download=True)
