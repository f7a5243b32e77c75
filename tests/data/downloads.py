"""Synthetic files in the layouts of published sets, as torchvision downloads them.

torchvision's classes compare checksums with those of the real files, which these functions replace
by those of the synthetic ones.
"""

from pathlib import Path

import numpy as np
import pytest
import scipy.io
from torchvision import datasets

from tests.data.synthetic import md5, pickled, pixels, save_image


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


def fake_flowers(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Six images, two in each split."""
    base = root / "flowers-102"
    for number in range(1, 7):
        save_image(base / "jpg" / f"image_{number:05d}.jpg", seed=number)
    scipy.io.savemat(base / "imagelabels.mat", {"labels": [1, 102, 3, 4, 5, 6]})
    ids = {"trnid": [5, 2], "valid": [1, 3], "tstid": [4, 6]}
    scipy.io.savemat(base / "setid.mat", ids)
    files = {
        **datasets.Flowers102._file_dict,
        "label": ("imagelabels.mat", md5(base / "imagelabels.mat")),
        "setid": ("setid.mat", md5(base / "setid.mat")),
    }
    monkeypatch.setattr(datasets.Flowers102, "_file_dict", files)


def fake_pets(root: Path) -> None:
    """The same 37 images for training and test, one of each breed."""
    base = root / "oxford-iiit-pet"
    names = [f"Breed_{number:02d}_7" for number in range(37)]
    for number, name in enumerate(names):
        save_image(base / "images" / f"{name}.jpg", seed=number)
    (base / "annotations").mkdir()
    lines = "".join(f"{name} {number} 1 1\n" for number, name in enumerate(names, 1))
    for split in ("trainval", "test"):
        (base / "annotations" / f"{split}.txt").write_text(lines)
