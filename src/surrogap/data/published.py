"""Sets that others publish, through torchvision's own classes."""

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
    """CIFAR-10 or CIFAR-100, in memory.

    Args:
        num_classes: Which of the two: 10 or 100.
        root: Where `cifar-10-batches-py` or `cifar-100-python` is, or shall be.
        download: Whether to fetch it, if it is not there.

    Raises:
        ValueError: It is not there, or damaged.
        RuntimeError: It cannot be fetched.
    """
    kind = datasets.CIFAR10 if num_classes == 10 else datasets.CIFAR100
    found = {
        split: _open(
            partial(kind, root, train=split == "train", download=download),
            f"CIFAR-{num_classes}",
            root / kind.base_folder,
            kind.url,
        )
        for split in ("train", "test")
    }
    splits: dict[str, Any] = {
        split: TensorSet(
            torch.from_numpy(images.data).permute(0, 3, 1, 2).contiguous(),
            torch.tensor(images.targets),
        )
        for split, images in found.items()
    }
    return Splits(f"cifar{num_classes}", tuple(found["train"].classes), **splits)


def flowers102(root: Path, download: bool) -> Splits:
    """Oxford's 102 flowers: 1,020 images for training, as many to choose by, 6,149 to test.

    Args:
        root: Where `flowers-102` is, or shall be.
        download: Whether to fetch it, if it is not there.

    Raises:
        ImportError: scipy is missing, with which torchvision reads the labels.
        ValueError: It is not there, or damaged.
        RuntimeError: It cannot be fetched.
    """
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
    """Oxford's 37 breeds of cats and dogs: 3,680 images for training, 3,669 to test.

    Args:
        root: Where `oxford-iiit-pet` is, or shall be.
        download: Whether to fetch it, if it is not there.

    Raises:
        ValueError: It is not there, or damaged.
        RuntimeError: It cannot be fetched.
    """
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
    """ImageNet-1k: 1.28 million images for training, 50,000 to test.

    From `root/imagenet`: either the folders `train` and `val` with a folder for each WordNet
    number, or the archives of ILSVRC2012, which torchvision unpacks there once.

    Args:
        root: The folder that holds the folder `imagenet`.
        download: Must be false: ImageNet is given out to people who register.

    Raises:
        ImportError: scipy is missing, with which torchvision reads the archives' names.
        ValueError: It is not there, or a download was asked for.
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
    if unpacked and not archives:  # both ways sort by WordNet number: the labels are the same
        return read_folder(folder, "imagenet")
    splits: dict[str, Any] = {}
    for split, published in (("train", "train"), ("test", "val")):
        images = _open(
            partial(datasets.ImageNet, folder, split=published), "ImageNet", folder, home
        )
        splits[split] = FileSet([path for path, _ in images.samples], images.targets)
    return Splits("imagenet", tuple(names[0] for names in images.classes), **splits)


def _open(make: Callable[[], Any], title: str, folder: Path, home: str) -> Any:
    """A set of torchvision's, or our words for why there is none."""
    by_hand = f"put the files from {home} there"
    try:
        return make()
    except URLError as error:
        raise UnsupportedError(
            f"download must reach {title}'s server, got {error}. Try again later, or {by_hand}: "
            f"{folder}."
        ) from error
    except ModuleNotFoundError as error:
        raise MissingPackageError(
            f"{title} must be read with {error.name}, got no such package. "
            f"Run pip install {error.name}."
        ) from error
    except (RuntimeError, OSError) as error:
        remedy = by_hand if title == "ImageNet" else f"pass download=True, or {by_hand}"
        raise InvalidValueError(
            f"root must hold {title}, got {folder}, which is missing or damaged ({error}). "
            f"To get it, {remedy}."
        ) from error
