"""Published datasets, read by torchvision's classes.

Each function takes `root`, the folder of named datasets, and `download`: whether to download the
dataset if it is missing. It raises ValueError if the dataset is missing or damaged, RuntimeError if
it cannot be downloaded, and ImportError if torchvision lacks a package that it reads it with.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from urllib.error import URLError

import torch
from torchvision import datasets

from surrogap.data.folders import read_folder
from surrogap.data.splits import FileSet, Splits, TensorSet
from surrogap.errors import InvalidValueError, MissingPackageError, UnsupportedError


def cifar(num_classes: int, root: Path, download: bool) -> Splits:
    """Load CIFAR-10 or CIFAR-100 into memory."""
    kind = datasets.CIFAR10 if num_classes == 10 else datasets.CIFAR100
    splits: dict[str, Any] = {}
    for split in ("train", "test"):
        images = _open(
            partial(kind, root, train=split == "train", download=download),
            f"CIFAR-{num_classes}",
            root / kind.base_folder,
            kind.url,
        )
        pixels = torch.from_numpy(images.data).permute(0, 3, 1, 2).contiguous()
        splits[split] = TensorSet(pixels, torch.tensor(images.targets))
    return Splits(f"cifar{num_classes}", tuple(images.classes), **splits)


def flowers102(root: Path, download: bool) -> Splits:
    """Load Flowers-102: 1,020 training, 1,020 validation and 6,149 test images."""
    splits: dict[str, Any] = {}
    for split in ("train", "val", "test"):
        images = _open(
            partial(datasets.Flowers102, root, split=split, download=download),
            "Flowers-102",
            root / "flowers-102",
            "https://www.robots.ox.ac.uk/~vgg/data/flowers/102",
        )
        splits[split] = FileSet([str(file) for file in images._image_files], images._labels)
    return Splits("flowers102", tuple(images.classes), **splits)


def pets37(root: Path, download: bool) -> Splits:
    """Load Oxford-IIIT Pet, 37 breeds of cats and dogs: 3,680 training and 3,669 test images."""
    splits: dict[str, Any] = {}
    for split, published in (("train", "trainval"), ("test", "test")):
        images = _open(
            partial(datasets.OxfordIIITPet, root, split=published, download=download),
            "Oxford-IIIT Pet",
            root / "oxford-iiit-pet",
            "https://www.robots.ox.ac.uk/~vgg/data/pets",
        )
        splits[split] = FileSet([str(file) for file in images._images], images._labels)
    return Splits("pets37", tuple(images.classes), **splits)


def imagenet(root: Path, download: bool) -> Splits:
    """Load ImageNet-1k: 1.28 million training images and 50,000 test images.

    `root/imagenet` holds either the folders `train` and `val`, with a folder for each WordNet ID,
    or the archives of ILSVRC2012, which torchvision extracts there once. ImageNet requires
    registration, so it cannot be downloaded.
    """
    home = "https://image-net.org"
    if download:
        raise InvalidValueError(
            "download must be False for imagenet, got True. Register at "
            f"{home}, and put train and val into {root / 'imagenet'}."
        )
    folder = root / "imagenet"
    unpacked = (folder / "train").is_dir() and (folder / "val").is_dir()
    archives = (folder / "meta.bin").exists() or list(folder.glob("ILSVRC2012_devkit*"))
    if unpacked and not archives:  # both layouts sort by WordNet ID, so the labels are the same
        return read_folder(folder, "imagenet")
    splits: dict[str, Any] = {}
    for split, published in (("train", "train"), ("test", "val")):
        images = _open(
            partial(datasets.ImageNet, folder, split=published), "ImageNet", folder, home
        )
        splits[split] = FileSet([path for path, _ in images.samples], images.targets)
    return Splits("imagenet", tuple(names[0] for names in images.classes), **splits)


def _open(make: Callable[[], Any], title: str, folder: Path, home: str) -> Any:
    """Build a torchvision dataset, and raise an error with a remedy if that fails."""
    by_hand = f"put the files from {home} there"
    try:
        return make()
    except URLError as error:
        raise UnsupportedError(
            f"Cannot download {title}: {error}. Try again later, or {by_hand}: {folder}."
        ) from error
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        raise MissingPackageError(
            f"{package} must be installed to read {title}. Run pip install {package}."
        ) from error
    except (RuntimeError, OSError) as error:
        download = "" if title == "ImageNet" else "pass --download (download=True), or "
        raise InvalidValueError(
            f"root must hold {title}, got {folder}, which is missing or damaged ({error}). "
            f"To get it, {download}{by_hand}."
        ) from error
