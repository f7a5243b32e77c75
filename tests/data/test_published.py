"""Published sets, from synthetic files in the real layouts."""

import sys
from pathlib import Path
from urllib.error import URLError

import pytest
import torch
from torchvision import datasets

from surrogap.data import FileSet, TensorSet, load
from tests.data.downloads import fake_cifar, fake_flowers, fake_pets
from tests.data.synthetic import folder


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
    fake_pets(tmp_path)
    base = tmp_path / "oxford-iiit-pet"
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


_DOWNLOAD = r"pass --download \(download=True\), or put the files from"


@pytest.mark.parametrize(
    ("name", "title", "folder", "remedy"),
    [
        ("cifar10", "CIFAR-10", "cifar-10-batches-py", _DOWNLOAD),
        ("cifar100", "CIFAR-100", "cifar-100-python", _DOWNLOAD),
        ("flowers102", "Flowers-102", "flowers-102", _DOWNLOAD),
        ("pets37", "Oxford-IIIT Pet", "oxford-iiit-pet", _DOWNLOAD),
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
